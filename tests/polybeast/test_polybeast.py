"""PolyBeast as a user starts it: servers and learner in real processes."""

import json
import os
import signal
import time

import numpy as np
import pytest
import runs
import torch
from watched_runs import processes_of_session, wait_until

from torchbeast.base.errors import FlagError
from torchbeast.polybeast import env as polybeast_env
from torchbeast.polybeast import start as polybeast
from torchbeast.polybeast.env_connection import server_addresses
from torchbeast.runs import flagset

POLYBEAST = "torchbeast.polybeast"


@pytest.fixture
def small(tmp_path):
    """A small, quick run on CartPole whose dimensions all differ."""
    return {
        "module": POLYBEAST,
        "pipes_basename": f"unix:{tmp_path}/pipe",
        "env": "CartPole-v1",
        "num_servers": 2,
        "envs_per_actor": 3,
        "batch_size": 6,
        "unroll_length": 5,
        "total_steps": 900,
        "precision": "fp32",
        "torch_threads": 1,
        "reward_clipping": "none",
    }


def resolve(*argv):
    flags = flagset.parse(polybeast.make_parser(), argv)
    return polybeast.resolve_layout(flagset.resolve(flags))


def assert_nothing_left(process, tmp_path):
    wait_until(lambda: not processes_of_session(process.pid), "all processes ended")
    assert not list(tmp_path.glob("pipe*"))


# --- A run ----------------------------------------------------------------------------


def test_trains_finishes_and_resumes(tmp_path, small):
    process = runs.start(tmp_path, "a", **small)
    output = runs.finish(process)
    assert process.returncode == 0, output
    assert_nothing_left(process, tmp_path)
    rows = runs.read_logs(tmp_path, "a")
    assert [int(row["step"]) for row in rows] == list(range(30, 901, 30))
    assert all(np.isfinite(float(row["total_loss"])) for row in rows)
    assert sum(row["mean_episode_return"] != "" for row in rows) > 3
    meta = json.loads((tmp_path / "a" / "meta.json").read_text())
    assert meta["successful"]

    output = runs.run(tmp_path, "a", module=POLYBEAST, total_steps=1200)
    assert "Resuming at step 900" in output
    assert "--total_steps 900 -> 1200." in output
    rows = runs.read_logs(tmp_path, "a")
    assert [int(row["step"]) for row in rows] == list(range(30, 1201, 30))

    output = runs.run(tmp_path, "a", module=POLYBEAST, mode="test", num_test_episodes=3)
    assert "3 games: mean return" in output
    result = json.loads((tmp_path / "a" / "test.json").read_text())
    assert (len(result["returns"]), result["step"]) == (3, 1200)


@pytest.mark.slow
@pytest.mark.parametrize("module", [POLYBEAST, "torchbeast.monobeast"])
def test_no_game_is_played_twice(tmp_path, small, monkeypatch, module):
    """Neither by a resumed run nor by a test of it."""
    played = tmp_path / "seeds"
    monkeypatch.setenv("SEED_FILE", str(played))
    small |= {"module": module, "env": "environments:SeedLog", "total_steps": 300}
    if module != POLYBEAST:
        del small["pipes_basename"], small["num_servers"]
    runs.run(tmp_path, "a", **small)
    runs.run(tmp_path, "a", module=module, total_steps=600)
    seeds = played.read_text().split()
    assert len(seeds) >= 600 / 3
    assert len(set(seeds)) == len(seeds), "some games came twice"
    played.unlink()
    runs.run(tmp_path, "a", module=module, mode="test", num_test_episodes=50)
    tested = played.read_text().split()
    assert len(set(tested)) == len(tested) == 50
    assert not set(tested) & set(seeds), "games of the training are no test"


# --- Endings --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_all(tmp_path, small, number):
    small["total_steps"] = 10**9
    process = runs.start(tmp_path, "a", **small)
    runs.wait_for_rows(process, tmp_path, "a", 5)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    output = runs.finish(process)
    assert process.returncode == 128 + number, output
    assert "Traceback" not in output
    assert_nothing_left(process, tmp_path)
    saved = torch.load(tmp_path / "a" / "model.tar", weights_only=True)
    last = runs.read_logs(tmp_path, "a")[-1]
    assert saved["stats"]["step"] == int(last["step"])


@pytest.mark.slow
def test_servers_end_with_a_learner_that_was_killed(tmp_path, small, monkeypatch):
    """Servers and supervisor end, even if the servers' threads can't run."""
    fault = tmp_path / "fault"
    monkeypatch.setenv("FAULT_FILE", str(fault))
    small |= {"total_steps": 10**9, "env": "faulty:WithProgram"}
    process = runs.start(tmp_path, "a", **small)
    runs.wait_for_rows(process, tmp_path, "a", 3)
    fault.write_text("hold_the_lock")
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    runs.finish(process)
    wait_until(lambda: not processes_of_session(process.pid), "all processes ended")


# --- Faults ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("raise_error", ["ValueError: the ball left the table", "in raise_error"]),
        ("nan_reward", ["step() returned the rewards [nan"]),
    ],
)
def test_an_environments_error_ends_the_run(tmp_path, small, monkeypatch, error, words):
    fault = tmp_path / "fault"
    monkeypatch.setenv("FAULT_FILE", str(fault))
    small |= {"total_steps": 10**9, "env": "faulty:Environment"}
    process = runs.start(tmp_path, "a", **small)
    runs.wait_for_rows(process, tmp_path, "a", 3)
    fault.write_text(error)
    output = runs.finish(process)
    assert process.returncode == 1, output
    assert all(word in output for word in words), output
    assert output.count("[ERROR ") == 1, output
    assert (tmp_path / "a" / "model.tar").exists()
    assert not json.loads((tmp_path / "a" / "meta.json").read_text())["successful"]
    assert_nothing_left(process, tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"env": "CartPoll-v1"}, "CartPoll"),
        ({"batch_size": 4}, "--batch_size 4"),  # no multiple of 3
    ],
)
def test_what_cannot_work_ends_the_run_at_once(tmp_path, small, change, words):
    process = runs.start(tmp_path, "a", **{**small, **change})
    output = runs.finish(process)
    assert process.returncode == 1, output
    assert words in output
    assert "Traceback" not in output
    assert not (tmp_path / "a").exists(), "nothing was written"
    assert_nothing_left(process, tmp_path)


# --- Apart ----------------------------------------------------------------------------


def test_servers_unless_a_flag_says_how_many(monkeypatch):
    monkeypatch.setattr(polybeast, "num_cpus", lambda: 3)
    for words, actors, servers in [
        ([], 4, 3),
        (["--num_actors", "2"], 2, 2),
        (["--num_actors", "7"], 7, 3),
        (["--num_actors", "5", "--num_servers", "1"], 5, 1),
        (["--num_actors", "5", "--sync", "--disable_checkpoint"], 5, 5),
    ]:
        flags = resolve(*words, "--batch_size", "8")
        assert (flags.num_actors, flags.num_servers) == (actors, servers)


def test_addresses(tmp_path):
    flags = resolve("--num_servers", "3", "--pipes_basename", "unix:/tmp/x")
    there = [f"unix:/tmp/x.{i}" for i in range(3)]
    assert polybeast_env.addresses(flags) == server_addresses(flags) == there
    assert flags.num_actors == 3

    flags.bind = "10.0.0.1:5000"
    assert polybeast_env.addresses(flags) == [f"10.0.0.1:{5000 + i}" for i in range(3)]

    (tmp_path / "addresses").write_text("a:1\nb:2\n")
    for given in ("a:1,b:2", f"@{tmp_path}/addresses"):
        flags.server_addresses = given
        assert server_addresses(flags) == ["a:1", "b:2"]
    flags.server_addresses = "a:1,[::1]:8-10"
    assert server_addresses(flags) == [*("a:1", "[::1]:8", "[::1]:9", "[::1]:10")]
    for flags.server_addresses in ("a:9-8", "@/dev/zero", ","):
        with pytest.raises(FlagError, match=r"^--server_addresses"):
            server_addresses(flags)
