"""With a GPU the learner does not wait: an update is finished after the next has begun.

Here a CPU stands in for it, see ahead.py.
"""

import os
import re
import signal
import traceback

import pytest
import runs
import test_learner
import torch
from test_polybeast_sync import SYNC, WITH_STATE
from torch.utils._python_dispatch import TorchDispatchMode

from torchbeast.base import devices
from torchbeast.learner import learn

LASER = {
    **{"replay_ratio": 1, "replay_size": 600, "learn_start": 100},
    **{"rollouts": "episode", "use_lstm": True},
}
PASS = 6 * 7  # steps of a round with SYNC


@pytest.mark.parametrize("more", [WITH_STATE, LASER], ids=["state", "laser"])
def test_sync_learns_the_same(tmp_path, more):
    flags = {**SYNC, "env": "MinAtar/Breakout-v1", "total_steps": 20 * PASS, **more}
    runs.run(tmp_path, "waits", **flags)
    runs.run(tmp_path, "ahead", module="ahead", **flags)
    assert len(runs.logs(tmp_path, "ahead")) == 60
    assert runs.logs(tmp_path, "ahead") == runs.logs(tmp_path, "waits")


@pytest.mark.parametrize("variant", ["monobeast", "polybeast.start"])
def test_no_update_is_lost(tmp_path, monkeypatch, variant):
    """Each has its row, in order, also the last one; the weights are those after it."""
    monkeypatch.setenv("VARIANT", f"torchbeast.{variant}")
    flags = {**runs.SMALL, "total_steps": 3000, "checkpoint_interval": 0}
    if variant == "polybeast.start":
        flags |= {"pipes_basename": f"unix:{tmp_path}/pipe", "num_servers": 2}
        flags |= {"envs_per_actor": 2, "num_learner_threads": 3}
    output = runs.run(tmp_path, "a", module="ahead", **flags)
    assert "Finished at step 3000" in output
    assert int(re.search(r"(\d+) updates were finished late", output)[1]) > 0
    rows = runs.read_logs(tmp_path, "a")
    assert [int(row["step"]) for row in rows] == list(range(10, 3001, 10))
    saved = torch.load(tmp_path / "a/model.tar", weights_only=True)["stats"]
    assert saved["num_updates"] == 300
    assert saved["games"] == int(rows[-1]["games"])


def test_a_stopped_run_goes_on_where_it_was(tmp_path):
    flags = {**runs.SMALL, "module": "ahead", "total_steps": 1_000_000}
    process = runs.start(tmp_path, "a", **flags)
    runs.wait_for_rows(process, tmp_path, "a", 30)
    process.send_signal(signal.SIGTERM)
    runs.finish(process)
    rows = runs.read_logs(tmp_path, "a")
    saved = torch.load(tmp_path / "a/model.tar", weights_only=True)["stats"]
    assert saved["step"] == int(rows[-1]["step"])
    assert saved["episodes"] == int(rows[-1]["episodes"])
    flags["total_steps"] = saved["step"] + 100
    runs.run(tmp_path, "a", **flags)
    steps = [int(row["step"]) for row in runs.read_logs(tmp_path, "a")]
    assert steps == list(range(10, saved["step"] + 101, 10))


def test_a_bad_update_ends_the_run_and_is_not_saved(tmp_path, monkeypatch):
    fault = tmp_path / "fault"
    monkeypatch.setenv("FAULT_FILE", str(fault))
    # Forked runs get this variable only if it is in the environment when they start.
    flags = {**runs.SMALL, "total_steps": 1_000_000, "checkpoint_interval": 0}
    process = runs.start(tmp_path, "a", module="ahead", **flags)
    runs.wait_for_rows(process, tmp_path, "a", 30)
    fault.write_text("nan_loss")
    output = runs.finish(process)
    assert process.returncode == 1
    assert output.count("FloatingPointError: loss or gradient are not finite") == 1
    assert "The cause is the update" in output
    saved = torch.load(tmp_path / "a/model.tar", weights_only=True)
    last = runs.read_logs(tmp_path, "a")[-1]
    assert saved["stats"]["step"] <= int(last["step"])
    assert all(x.isfinite().all() for x in saved["model_state_dict"].values())
    assert f"not finite at step {last['step']}:" in output
    os.remove(fault)
    flags["total_steps"] = saved["stats"]["step"] + 100
    runs.run(tmp_path, "a", module="ahead", **flags)


def test_a_bad_update_ends_all_learners(tmp_path, monkeypatch):
    """One that has no next batch finishes an update before it begins the next."""
    fault = tmp_path / "fault"
    fault.write_text("nan_loss")
    monkeypatch.setenv("FAULT_FILE", str(fault))
    flags = {**runs.SMALL, "module": "ahead", "wrapper": "environments:SlowInOne"}
    flags["envs_per_actor"] = 1  # so that no second batch comes with the first
    output = runs.run_learners(2, tmp_path, "a", 1, **flags)
    assert output.count("FloatingPointError: loss or gradient are not finite") == 2
    assert output.count("The cause is the update") == 2


@pytest.mark.parametrize("method", ["Broken", "Steep"])
def test_a_bad_method_ends_the_run_and_is_not_saved(tmp_path, method):
    """Its numbers arrive when the policy has learned from them, and the next update."""
    flags = {**runs.SMALL, "explorer": f"exploring:{method}", "checkpoint_interval": 0}
    process = runs.start(tmp_path, "a", module="ahead", **flags)
    output = runs.finish(process)
    assert process.returncode == 1
    assert output.count("of --explorer are not finite") == 1
    model = tmp_path / "a" / "model.tar"
    if method == "Steep":  # already in the first update
        assert not model.exists()
    else:
        saved = torch.load(model, weights_only=True)
        kept = [saved["model_state_dict"], saved["explorer_state_dict"]["method"]]
        assert all(x.isfinite().all() for state in kept for x in state.values())


class Waits(TorchDispatchMode):
    """Notes operations that need a result of the device, and so would wait for it."""

    ON_THE_CPU = frozenset({"features"})  # F.one_hot checks only the values of a CPU
    NAMES = ("_local_scalar_dense", "nonzero", "item", "equal", "masked_select")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masked = name in ("index", "index_put_") and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        callers = {frame.name for frame in traceback.extract_stack()}
        if (masked or name in self.NAMES) and not callers & self.ON_THE_CPU:
            self.found.append(name)
        return function(*args, **kwargs or {})


def waits_of(argv, monkeypatch, work):
    monkeypatch.setattr(devices, "works_ahead", lambda device: True)
    learner = test_learner.make_learner(*argv)
    batch, state = test_learner.make_batch(learner)
    for _ in range(2):  # its look at the inputs waits, seldom
        learn(learner, batch, state).finish()
    with Waits() as waits:
        work(learner, batch, state)
    return waits.found


OPTIONS = [
    (),
    ("--optimizer", "adam", "--clip_ratio", "0.2", "--normalize_advantages"),
    ("--normalize_observations", "--normalize_rewards"),
]


@pytest.mark.parametrize("argv", OPTIONS, ids=" ".join)
def test_beginning_an_update_waits_for_nothing(argv, monkeypatch):
    assert waits_of(argv, monkeypatch, learn) == []


def test_waits_are_found(monkeypatch):
    """A recurrent core looks where episodes begin. To finish is to read numbers."""
    assert "nonzero" in waits_of(("--use_lstm",), monkeypatch, learn)
    assert "_local_scalar_dense" in waits_of(
        (), monkeypatch, lambda *x: learn(*x).finish()
    )
