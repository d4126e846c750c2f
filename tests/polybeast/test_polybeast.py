"""PolyBeast as a user starts it: servers and learner in real processes."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import runs
import torch
from gymnasium import spaces
from watched_runs import processes_of_session, wait_until

from torchbeast.base.errors import FlagError
from torchbeast.learner import Learner
from torchbeast.local.env_spec import EnvSpec
from torchbeast.polybeast import env as polybeast_env
from torchbeast.polybeast import start as polybeast
from torchbeast.polybeast.acting import ActingModels
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


def servers_of(process):
    """The server processes of a run, oldest first, without their supervisor."""
    found = [
        p
        for p in processes_of_session(process.pid)
        if "spawn_main" in p.command and "resource_tracker" not in p.command
    ]
    supervisors = {p.parent for p in found}
    return [p for p in found if p.pid not in supervisors]


def assert_nothing_left(process, tmp_path):
    wait_until(lambda: not processes_of_session(process.pid), "all processes ended")
    assert not list(tmp_path.glob("pipe*"))


# --- A run ----------------------------------------------------------------------------


@pytest.mark.parametrize("use_lstm", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_trains_finishes_and_resumes(tmp_path, small, use_lstm):
    process = runs.start(tmp_path, "a", **small, use_lstm=use_lstm)
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


def test_servers_load_no_torch(tmp_path, small):
    small["total_steps"] = 10**9
    process = runs.start(tmp_path, "a", **small)
    try:
        runs.wait_for_rows(process, tmp_path, "a", 3)
        servers = servers_of(process)
        assert len(servers) == 2
        for server in servers:
            maps = pathlib.Path(f"/proc/{server.pid}/maps").read_text()
            assert "libtorchbeast" in maps
            assert "libtorch_" not in maps
    finally:
        process.send_signal(signal.SIGINT)
        runs.finish(process)


@pytest.mark.slow
@pytest.mark.parametrize("env", ["GridWorld", "Locks", "Steering", "Recall"])
def test_spaces_of_all_kinds(tmp_path, small, env):
    small |= {"env": f"environments:{env}", "total_steps": 300, "use_lstm": True}
    runs.run(tmp_path, "a", **small)
    assert runs.read_logs(tmp_path, "a")[-1]["step"] == "300"


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


@pytest.mark.slow
def test_sigint_during_the_start(tmp_path, small, monkeypatch):
    """During imports, and while servers make their environments."""
    monkeypatch.setenv("FAULT_FILE", str(tmp_path / "fault"))
    small["env"] = "faulty:SlowToMake"
    words = runs.command(tmp_path, "a", **small)
    process = runs.start_words(words, fresh=True)
    wait_until(lambda: loaded(process, "libtorch_cpu"), "the import of torch")
    os.killpg(process.pid, signal.SIGINT)
    assert runs.finish(process) == ""
    assert process.returncode == 130
    assert_nothing_left(process, tmp_path)

    process = runs.start_words(words, fresh=True)
    wait_until(lambda: len(list(tmp_path.glob("fault.*"))) == 2, "two environments")
    os.killpg(process.pid, signal.SIGINT)
    output = runs.finish(process)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert_nothing_left(process, tmp_path)


def loaded(process, library):
    with contextlib.suppress(OSError):
        return library in pathlib.Path(f"/proc/{process.pid}/maps").read_text()
    return False


# --- Faults ---------------------------------------------------------------------------


def test_a_killed_server_comes_back(tmp_path, small):
    """The programs that its environments have started end."""
    small |= {
        "total_steps": 10**9,
        "unroll_length": 50,
        "env": "faulty:WithProgram",
    }
    process = runs.start(tmp_path, "a", **small)
    runs.wait_for_rows(process, tmp_path, "a", 3)
    before = servers_of(process)
    programs = [
        p.pid
        for p in processes_of_session(process.pid)
        if p.parent == before[0].pid and "sleep" in p.command
    ]
    assert programs
    os.kill(before[0].pid, signal.SIGKILL)
    wait_until(
        lambda: len({p.pid for p in servers_of(process)} - {p.pid for p in before}),
        "another server",
    )
    wait_until(
        lambda: runs.read_logs(tmp_path, "a")[-1].get("reconnects") == "1",
        "its stream came back",
    )
    alive = {p.pid for p in processes_of_session(process.pid)}
    assert not alive.intersection(programs)
    rows = runs.read_logs(tmp_path, "a")
    assert int(rows[-1]["dropped_steps"]) <= 3 * 50, "of one rollout at most"
    runs.wait_for_rows(process, tmp_path, "a", len(rows) + 10)
    process.send_signal(signal.SIGINT)
    output = runs.finish(process)
    assert process.returncode == 130, output
    assert " died by signal SIGKILL" in output
    assert "Reconnects 1," in output
    assert_nothing_left(process, tmp_path)


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
    assert (tmp_path / "a" / "model.tar").exists()
    assert not json.loads((tmp_path / "a" / "meta.json").read_text())["successful"]
    assert_nothing_left(process, tmp_path)


@pytest.mark.slow
def test_a_server_that_dies_again_and_again_ends_the_run(tmp_path, small, monkeypatch):
    fault = tmp_path / "fault"
    monkeypatch.setenv("FAULT_FILE", str(fault))
    small |= {"total_steps": 10**9, "env": "faulty:Environment", "max_restarts": 1}
    process = runs.start(tmp_path, "a", **small)
    runs.wait_for_rows(process, tmp_path, "a", 3)
    fault.write_text("leave")
    output = runs.finish(process)
    assert process.returncode == 1, output
    assert "exit status 3" in output
    assert "--max_restarts 1" in output
    assert_nothing_left(process, tmp_path)


def test_an_unknown_environment_ends_the_run_at_once(tmp_path, small):
    small["env"] = "CartPoll-v1"
    process = runs.start(tmp_path, "a", **small)
    output = runs.finish(process)
    assert process.returncode == 1, output
    assert "CartPoll" in output
    assert "Traceback" not in output
    assert_nothing_left(process, tmp_path)


@pytest.mark.slow
def test_more_actors_than_servers_share_them(tmp_path, small):
    output = runs.run(tmp_path, "a", **small, num_actors=5)
    assert "5 streams share" in output  # environments outside of the main thread
    assert runs.read_logs(tmp_path, "a")[-1]["step"] == "900"


def test_no_server_at_all(tmp_path):
    output = runs.run(
        tmp_path,
        "a",
        module="torchbeast.polybeast_learner",
        env="CartPole-v1",
        pipes_basename=f"unix:{tmp_path}/nobody",
        connect_timeout=1,
        status=1,
    )
    assert "no environments within 1 s (--connect_timeout): " in output
    assert f"{tmp_path}/nobody.0" in output
    assert "Traceback" not in output
    assert not (tmp_path / "a").exists(), "nothing was written"


def test_a_place_where_the_learner_cannot_listen(tmp_path):
    address = "0.0.0.0:0"  # not secure
    output = runs.run(
        tmp_path,
        "a",
        module="torchbeast.polybeast_learner",
        env="CartPole-v1",
        listen=address,
        status=1,
    )
    assert "--listen: " in output
    assert address in output
    assert "Traceback" not in output


# --- Apart ----------------------------------------------------------------------------


@pytest.mark.slow
def test_environments_dial_a_learner_and_the_next(tmp_path, small):
    """One more environment than streams connects and waits; nothing is restarted."""
    words = [
        f"--env={small['env']}",
        "--num_servers=3",
        f"--envs_per_actor={small['envs_per_actor']}",
        f"--join=unix:{tmp_path}/learner",
    ]
    environments = subprocess.Popen(
        [sys.executable, "-m", "torchbeast.polybeast_env", *words],
        env=runs.environment(),
        start_new_session=True,
    )
    del small["num_servers"], small["pipes_basename"]
    small |= {
        "module": "torchbeast.polybeast_learner",
        "listen": f"unix:{tmp_path}/learner",
        "num_actors": 2,
    }
    try:
        process = runs.start(tmp_path, "a", **small | {"total_steps": 10**9})
        runs.wait_for_rows(process, tmp_path, "a", 5)
        process.kill()  # saves nothing, leaves its socket
        runs.finish(process)
        output = runs.run(tmp_path, "b", **small)
        assert "2 streams of 3 environments" in output
        assert not (tmp_path / "learner").exists()
        assert environments.poll() is None
        environments.send_signal(signal.SIGTERM)
        assert environments.wait(runs.patience(20)) == 128 + signal.SIGTERM
        assert_nothing_left(environments, tmp_path)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(environments.pid, signal.SIGKILL)


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
    assert polybeast_env.addresses(flags) == there
    assert server_addresses(flags) == there
    assert flags.num_actors == 3

    flags.bind = "10.0.0.1:5000"
    assert polybeast_env.addresses(flags) == [f"10.0.0.1:{5000 + i}" for i in range(3)]
    for bad in ("5000", "host:", "host:65534"):
        flags.bind = bad
        with pytest.raises(FlagError, match="HOST:PORT"):
            polybeast_env.addresses(flags)

    file = tmp_path / "addresses"
    file.write_text("a:1\nb:2\n")
    for given in ("a:1,b:2", f"@{file}"):
        flags.server_addresses = given
        assert server_addresses(flags) == ["a:1", "b:2"]
    flags.server_addresses = "a:1,[::1]:8-10"
    assert server_addresses(flags) == [*("a:1", "[::1]:8", "[::1]:9", "[::1]:10")]
    flags.server_addresses = "a:9-8"
    with pytest.raises(FlagError, match="a:9-8"):
        server_addresses(flags)


# --- The same algorithm ---------------------------------------------------------------


def test_acting_weights_are_the_learners():
    space = spaces.Box(-1, 1, (3,), np.float32)
    flags = resolve("--precision", "fp32")
    env = EnvSpec(space, spaces.Discrete(2), 1)
    learner = Learner(flags, env)
    models = ActingModels(learner.model, torch.device("cpu"))
    with torch.no_grad():
        for x in learner.model.parameters():
            x += 1
    bank, version = models.acquire()
    weights = learner.model.state_dict()
    for version in (5, 6, 7):  # more than there are other banks
        assert models.publish(weights, version)
    changed = dict(models.nets[bank].named_parameters())
    newest, version = models.acquire()
    assert version == 7
    assert newest != bank
    for name, x in learner.model.named_parameters():
        new = dict(models.nets[newest].named_parameters())[name]
        torch.testing.assert_close(new, x)
        assert not torch.equal(changed[name], x), "one that is in use has changed"
    assert models.publish(weights, 8)
    third, _ = models.acquire()
    assert len({bank, newest, third}) == models.NUM_BANKS
    assert not models.publish(weights, 9), "all others are in use"
    models.release(bank)
    assert models.publish(weights, 9)
    assert models.acquire() == (bank, 9)


def test_nothing_is_written_before_the_servers_are_known(tmp_path, small):
    small["batch_size"] = 4  # not a multiple of 3
    process = runs.start(tmp_path, "a", **small)
    output = runs.finish(process)
    assert process.returncode == 1, output
    assert "--batch_size 4" in output
    assert not (tmp_path / "a").exists()
    assert_nothing_left(process, tmp_path)
