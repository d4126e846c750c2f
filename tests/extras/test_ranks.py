"""Several learners equal one; torchrun starts those that a fault hits."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs
import torch
from test_flags import machine_with, parse
from test_polybeast_sync import SYNC, WITH_STATE, assert_logs_agree

from torchbeast.base import devices, ranks
from torchbeast.extras.ranks import several

STREAMS = (  # columns of PolyBeast
    *("reconnects", "dropped_steps", "refused", "env_failures", "streams", "queued"),
)
NO_PARTS = {"minibatches": 1}  # each learner would draw parts of its own rollouts


def torchrun(ranks, savedir, xpid, *, max_restarts=0, **flags):
    words = runs.command(savedir, xpid, **flags)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", str(ranks), f"--max_restarts={max_restarts}"),
            *("--monitor_interval", "0.1", *words[1:]),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=runs.environment(),
        start_new_session=True,
    )


def finish(process, seconds=200):
    """Its output, once it has ended; afterwards nothing of it is left."""
    pids = learners(process)  # torchrun starts each in a session of its own
    try:
        return process.communicate(timeout=runs.patience(seconds))[0]
    finally:
        for kill, pid in [(os.killpg, process.pid), *((os.kill, x) for x in pids)]:
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)


def learners(process):
    """The processes of the ranks, in their order."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process.pid:
                variables = (entry / "environ").read_bytes().decode(errors="replace")
                rank = re.search(r"\0RANK=(\d+)\0", variables)
                found.append((int(rank[1]), int(entry.name)))
    return [pid for _, pid in sorted(found)]


def logs(savedir, xpid):
    rows = runs.logs(savedir, xpid)
    for row in rows:
        # With the newest weights all ratios are 1, and rounding says which are above.
        row.pop("frac_rho_above_1")
        for name in STREAMS:
            row.pop(name, None)
    return rows


def meta_of(savedir, xpid):
    return json.loads((savedir / xpid / "meta.json").read_text())


@pytest.mark.parametrize(
    ("ranks", "env", "more"),
    [
        (2, "MinAtar/Breakout-v1", {}),
        (4, "MountainCar-v0", {**WITH_STATE, **NO_PARTS}),
        (2, "CartPole-v1", {"normalize_advantages": True, "max_policy_lag": 0}),
    ],
)
def test_they_make_the_updates_of_one(tmp_path, ranks, env, more):
    flags = {**SYNC, **more, "env": env, "total_steps": 12 * 7 * 30}
    runs.run(tmp_path, "one", **flags | {"num_actors": 4, "batch_size": 12})
    part = {"num_actors": 4 // ranks, "batch_size": 12 // ranks}
    output = runs.run_learners(ranks, tmp_path, "all", **flags | part)
    one, together = logs(tmp_path, "one"), logs(tmp_path, "all")
    assert len(one) == 30, output
    assert int(one[-1]["episodes"]) > 5
    # Advantages of mean 0 nearly cancel in pg_loss: 84 terms of about 1.
    assert_logs_agree(one, together, 1e-3 if "normalize_advantages" in more else 1e-5)


def test_each_learner_has_a_replay(tmp_path):
    """They begin to learn together: an update needs all of them."""
    flags = {**runs.SMALL, "env": "faulty:LongerInRank1", "total_steps": 1500}
    flags |= {"replay_size": 400, "replay_ratio": 1.5, "learn_start": 50}
    flags["replay_file"] = tmp_path / "replay"
    output = runs.run_learners(2, tmp_path, "all", **flags)
    rows = runs.read_logs(tmp_path, "all")
    learned = [bool(row["total_loss"]) for row in rows]
    assert int(rows[-1]["step"]) == 1500, output
    first = learned.index(True)
    # Of rank 1 each episode of one of the six environments takes 8 rollouts.
    assert first >= 8
    assert all(learned[first:])
    assert int(rows[-1]["replayed_steps"]) > 0


@pytest.mark.parametrize("who", [0, 1])
@runs.needs_proc
def test_one_that_is_killed_ends_all_and_nothing_is_lost(tmp_path, who):
    flags = {**runs.SMALL, "total_steps": 10**7, "checkpoint_interval": 0}
    process = torchrun(2, tmp_path, "all", **flags)
    runs.wait_for_rows(process, tmp_path, "all", 100, timeout=120)
    victim = learners(process)[who]
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    output = finish(process, 60)
    assert process.returncode != 0
    assert time.monotonic() - began < runs.patience(45)
    assert "SIGKILL" in output or "waited in vain" in output
    saved = torch.load(tmp_path / "all" / "model.tar", weights_only=False)
    step = saved["stats"]["step"]
    assert step >= 20
    # One learner goes on, with the actors and the batch of both.
    flags["total_steps"] = step + 400
    del flags["num_actors"], flags["batch_size"]
    runs.run(tmp_path, "all", **flags)
    meta = meta_of(tmp_path, "all")
    assert (meta["args"]["num_actors"], meta["args"]["batch_size"]) == (4, 4)
    assert int(runs.read_logs(tmp_path, "all")[-1]["step"]) >= step + 400


@runs.needs_proc
def test_torchrun_restarts_them_from_the_checkpoint(tmp_path):
    flags = {**runs.SMALL, "total_steps": 6000, "checkpoint_interval": 0}
    process = torchrun(2, tmp_path, "all", max_restarts=1, **flags)
    runs.wait_for_rows(process, tmp_path, "all", 50, timeout=120)
    os.kill(learners(process)[1], signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 0, output
    assert "Resuming at step" in output
    steps = [int(row["step"]) for row in runs.read_logs(tmp_path, "all")]
    assert steps == sorted(set(steps))
    assert steps[-1] >= 6000


@runs.needs_proc
def test_a_signal_to_one_ends_all_after_the_same_update(tmp_path):
    process = torchrun(2, tmp_path, "all", **runs.SMALL | {"total_steps": 10**7})
    runs.wait_for_rows(process, tmp_path, "all", 50, timeout=120)
    os.kill(learners(process)[1], signal.SIGTERM)
    output = finish(process, 60)
    assert "waited in vain" not in output, output
    saved = torch.load(tmp_path / "all" / "model.tar", weights_only=False)
    last = runs.read_logs(tmp_path, "all")[-1]
    assert saved["stats"]["step"] == int(last["step"])
    assert meta_of(tmp_path, "all")["exit_status"] == 128 + signal.SIGTERM


def test_sync_resumes_with_another_number_of_learners(tmp_path):
    """Games, weights and schedule go on: as one learner that never stopped."""
    flags = {**SYNC, "env": "CartPole-v1", "disable_checkpoint": None}
    whole = {"num_actors": 4, "batch_size": 12}
    runs.run(tmp_path, "one", **flags | whole | {"total_steps": 12 * 7 * 40})
    part = {"num_actors": 2, "batch_size": 6, "total_steps": 12 * 7 * 20}
    output = runs.run_learners(2, tmp_path, "all", **flags | part)
    assert len(logs(tmp_path, "all")) == 20, output
    more = {"num_actors": None, "batch_size": None, "total_steps": 12 * 7 * 40}
    runs.run(tmp_path, "all", **flags | more)
    rows, one = logs(tmp_path, "all"), logs(tmp_path, "one")
    assert len(rows) == 40
    # The losses differ: until then, another total made another schedule.
    for name in ("step", "learning_rate"):
        assert [x[name] for x in rows[20:]] == [x[name] for x in one[20:]]


def test_polybeasts_servers_live_until_all_learners_have_stopped(tmp_path):
    """torchrun signals process groups, but the last common update needs the servers."""
    flags = {**runs.SMALL, "total_steps": 10**7, "module": "torchbeast.polybeast"}
    flags |= {"batch_size": 3, "pipes_basename": f"unix:{tmp_path}/pipe"}
    process = torchrun(2, tmp_path, "all", **flags)
    runs.wait_for_rows(process, tmp_path, "all", 50, timeout=120)
    os.kill(process.pid, signal.SIGTERM)
    output = finish(process, 60)
    assert "ServerError" not in output, output
    assert "waited in vain" not in output, output
    saved = torch.load(tmp_path / "all" / "model.tar", weights_only=False)
    assert saved["stats"]["step"] == int(runs.read_logs(tmp_path, "all")[-1]["step"])


@pytest.mark.parametrize("given", ["", "--learner_device cuda"])
def test_each_rank_has_a_gpu_of_its_own(given, monkeypatch):
    machine_with(monkeypatch, 2)
    two = several.Several()
    monkeypatch.setattr(two, "size", lambda: 2)
    monkeypatch.setattr(ranks, "learners", two)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert devices.learner_device(parse(given)) == torch.device("cuda:1")
