"""--tensorboard: the events of real runs."""

import signal
import time
import types

import pytest
import runs

from torchbeast.extras.tensorboard import TensorBoard


def test_tensorboard_gets_the_scalars_of_a_resumed_run(tmp_path, monkeypatch):
    """The events have every step of logs.csv once, also those after the checkpoint."""
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    slow = tmp_path / "slow"
    slow.touch()
    monkeypatch.setenv("SLOW_FILE", str(slow))
    flags = {**runs.SMALL, "wrapper": "environments:SlowWhileMarked"}
    process = runs.start(tmp_path, "a", **flags, tensorboard=True)
    runs.wait_for_rows(process, tmp_path, "a", 7)
    process.send_signal(signal.SIGINT)
    runs.finish(process)
    slow.unlink()
    before = runs.read_logs(tmp_path, "a")
    # Points beyond the checkpoint, as a run leaves them that is killed: written again.
    step = int(before[-1]["step"])
    learner = types.SimpleNamespace(step=step)
    lost = TensorBoard(types.SimpleNamespace(folder=tmp_path / "a", learner=learner))
    lost.row({"step": step + 10, "total_loss": 1e9})
    lost.close(0)
    time.sleep(1.1)  # files are read in the order of their names, which have seconds
    runs.run(tmp_path, "a", **flags, tensorboard=True)
    accumulator = events.EventAccumulator(str(tmp_path / "a"))
    accumulator.Reload()
    losses = accumulator.Scalars("total_loss")
    rows = runs.read_logs(tmp_path, "a")
    assert 7 <= len(before) < len(rows) == 60
    assert [event.step for event in losses] == [int(row["step"]) for row in rows]
    for event, row in zip(losses, rows, strict=True):
        assert event.value == pytest.approx(float(row["total_loss"]), rel=1e-5)
