"""--serial, and debuggers and profilers around a run."""

import pstats
import signal
import subprocess
import sys
import types

import pytest
import runs

from torchbeast.base.errors import FlagError
from torchbeast.extras import serial

ONE = {**runs.SMALL, "num_actors": 1, "batch_size": 3}
BEFORE = {
    "pdb": ["-m", "pdb", "-c", "continue", "-c", "quit"],
    "cProfile": ["-m", "cProfile", "-o", "prof"],
}
PAUSING = """
import faulty

class Environment(faulty.Environment):
    steps = 0
    def step(self, action):
        Environment.steps += 1
        if Environment.steps == 20:
            breakpoint()
        return super().step(action)
"""
PAUSING_LOSS = """
from torchbeast import learner, monobeast
loss = learner.impala_loss
def pausing(*arguments, **more):
    breakpoint()
    return loss(*arguments, **more)
if __name__ == "__main__":
    learner.impala_loss = pausing
    raise SystemExit(monobeast.main())
"""


def test_it_equals_one_actor_and_each_resumes_the_other(tmp_path, monkeypatch):
    slow = tmp_path / "slow"
    monkeypatch.setenv("SLOW_FILE", str(slow))
    flags = {**ONE, "sync": True, "use_lstm": True}
    flags |= {"minibatches": 3, "updates_per_batch": 3}  # of the global generator
    flags["wrapper"] = "environments:SlowWhileMarked"
    runs.run(tmp_path, "whole", **flags)
    slow.touch()
    process = runs.start(tmp_path, "parts", **flags, serial=True)
    runs.wait_for_rows(process, tmp_path, "parts", 7)
    process.send_signal(signal.SIGINT)
    output = runs.finish(process)
    assert process.returncode == 130, output
    slow.unlink()
    assert len(runs.read_logs(tmp_path, "parts")) < 40
    assert "Resuming at step" in runs.run(tmp_path, "parts", total_steps=600)
    runs.run(tmp_path, "serial", **{**flags, "num_actors": 2}, serial=True)
    # Without --sync the actor and the learner take turns, too: no step is too old.
    turns = {**flags, "sync": None, "max_policy_lag": 3}
    runs.run(tmp_path, "turns", **turns, serial=True)
    whole, parts, serial, turns = (
        runs.logs(tmp_path, xpid) for xpid in ("whole", "parts", "serial", "turns")
    )
    assert len(whole) == 40
    assert whole == parts == serial == turns


def test_polybeast_has_no_actors_to_replace():
    with pytest.raises(FlagError, match="--serial is for MonoBeast"):
        serial.resolve(types.SimpleNamespace(serial=True))


def test_without_sync_it_learns_from_all_rollouts(tmp_path):
    """No number of environments has to fit the batches."""
    output = runs.run(tmp_path, "a", **{**ONE, "batch_size": 4, "serial": True})
    assert "Finished at step 600" in output
    runs.run(tmp_path, "a", mode="test", num_test_episodes=2)
    assert "[ERROR" not in runs.run(tmp_path, "a", total_steps=700, serial=True)


@pytest.mark.parametrize("place", ["environment", "loss"])
def test_breakpoints_stop(tmp_path, place):
    flags = {**ONE, "serial": True, "total_steps": 30}
    if place == "environment":
        (tmp_path / "pausing.py").write_text(PAUSING)
        flags["env"] = "pausing:Environment"
    words = runs.command(tmp_path, "a", **flags)
    if place == "loss":
        (tmp_path / "pausing_loss.py").write_text(PAUSING_LOSS)
        words[1:3] = [str(tmp_path / "pausing_loss.py")]
    done = subprocess.run(
        words,
        env={
            **runs.environment(),
            "PYTHONPATH": f"{runs.ROOT}:{runs.ROOT}/tests:{tmp_path}",
        },
        input="p __import__('threading').current_thread().name\nc\n" * 3,
        capture_output=True,
        text=True,
        check=False,
        timeout=runs.patience(100),
    )
    assert done.returncode == 0, done.stderr
    assert "(Pdb) 'MainThread'" in done.stdout
    assert "Finished at step 30" in done.stderr


@pytest.mark.parametrize("program", BEFORE)
def test_a_run_with_processes_under_a_debugger_or_profiler(tmp_path, program):
    words = runs.command(tmp_path, "a", **{**ONE, "total_steps": 30})
    done = subprocess.run(
        [sys.executable, *BEFORE[program], *words[1:]],
        env={**runs.environment(), "PYTHONPATH": str(runs.ROOT)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=runs.patience(100),
    )
    assert "Finished at step 30" in done.stderr, done.stdout + done.stderr
    if program == "cProfile":
        assert pstats.Stats(str(tmp_path / "prof")).total_calls > 1000
