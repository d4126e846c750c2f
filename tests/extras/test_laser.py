"""Runs with replay, in both variants, as a user starts them."""

import math
import re

import pytest
import runs
import torch
from test_flags import resolve

from torchbeast.base.errors import FlagError

LASER = {
    **runs.SMALL,
    "batch_size": 3,
    "use_lstm": True,
    "replay_size": 500,
    "replay_ratio": 1.5,
    "learn_start": 100,
    "total_steps": 1200,
}


def learned(rows):
    return [row for row in rows if row.get("total_loss")]


@pytest.mark.parametrize("variant", ["monobeast", "polybeast"])
@pytest.mark.parametrize("rollouts", ["fixed", "episode"])
def test_a_run_with_replay(tmp_path, variant, rollouts):
    module = f"torchbeast.{variant}"
    output = runs.run(tmp_path, "laser", module=module, rollouts=rollouts, **LASER)
    assert "UserWarning" not in output
    rows = runs.read_logs(tmp_path, "laser")
    steps = LASER["batch_size"] * LASER["unroll_length"]
    assert [int(row["step"]) for row in rows][-1] == LASER["total_steps"]
    first = learned(rows)[0]
    assert not rows[5]["total_loss"]
    # It waits until the complete episodes have 100 steps.
    assert 100 <= float(first["replay_fill"]) * 500 <= 500
    for row in learned(rows):
        assert math.isfinite(float(row["total_loss"]))
        assert 0 <= float(row["frac_rejected"] or 0) <= 1
        assert float(row["replay_age"]) >= 0
    assert max(float(row["replay_fill"]) for row in rows) <= 1
    assert len(rows) * steps == LASER["total_steps"]


@pytest.mark.parametrize("save", [True, False])
def test_a_resumed_run_has_or_refills_its_replay(tmp_path, save):
    runs.run(tmp_path, "laser", save_replay=save or None, **LASER)
    rows = runs.read_logs(tmp_path, "laser")
    before, replayed_before = len(rows), int(rows[-1]["replayed_steps"])
    output = runs.run(tmp_path, "laser", total_steps=1600)
    rows = runs.read_logs(tmp_path, "laser")[before:]
    assert int(rows[-1]["step"]) == 1605
    assert bool(rows[0]["total_loss"]) == save
    assert learned(rows)
    replayed = [int(row["replayed_steps"]) for row in learned(rows)]
    assert replayed[0] > replayed_before > 0
    assert ("Loaded" in output) == save
    assert (tmp_path / "laser" / "replay.zip").exists() == save


@pytest.mark.parametrize("save", [True, False])
def test_starts_that_only_fill_the_replay_are_saved(tmp_path, save):
    """Steps and games count, also without an update."""
    flags = {**LASER, "learn_start": 350, "total_steps": 300}
    flags["save_replay"] = save or None
    assert "Learning begins at 350 steps" in runs.run(tmp_path, "laser", **flags)
    before = runs.read_logs(tmp_path, "laser")
    assert not learned(before)
    path = tmp_path / "laser" / "model.tar"
    saved = torch.load(path, weights_only=True)["stats"]
    assert (saved["step"], saved["num_updates"]) == (300, 0)
    assert saved["games"] == int(before[-1]["games"]) > 0
    runs.run(tmp_path, "laser", total_steps=600)
    rows = runs.read_logs(tmp_path, "laser")
    steps = [int(row["step"]) for row in rows]
    assert steps == list(range(15, 615, 15)), "no step is played again"
    assert bool(learned(rows)) == save


def test_filling_the_replay_keeps_the_previous_weights(tmp_path):
    """The previous checkpoint is the last one with other weights."""
    flags = {**LASER, "total_steps": 300, "checkpoint_interval": 0.001}
    runs.run(tmp_path, "laser", **flags)
    before = (tmp_path / "laser" / "model.previous.tar").read_bytes()
    runs.run(tmp_path, "laser", total_steps=390)
    assert (tmp_path / "laser" / "model.previous.tar").read_bytes() == before


def test_an_old_replay_is_not_loaded(tmp_path):
    """As if a run was killed between model.tar and replay.zip, or kept only one."""
    runs.run(tmp_path, "laser", save_replay=True, **LASER)
    words = {"no-save_replay": True}
    runs.run(tmp_path, "laser", total_steps=1500, **words)
    before = len(runs.read_logs(tmp_path, "laser"))
    output = runs.run(tmp_path, "laser", total_steps=1800)
    rows = runs.read_logs(tmp_path, "laser")[before:]
    assert not rows[0]["total_loss"]
    assert learned(rows)
    assert re.search(r"replay.zip is not loaded.*step 1200.*step 1500", output)


def test_a_replay_that_can_not_be_saved(tmp_path):
    """It ends the run, which does not try to save a second time."""
    (tmp_path / "laser" / "replay.zip").mkdir(parents=True)  # can't be replaced
    words = {"save_replay": True, "checkpoint_interval": 0.01}
    output = runs.run(tmp_path, "laser", status=1, **LASER, **words)
    assert output.count("replay.zip can't be written") == 1
    assert "Traceback" not in output


def test_a_damaged_replay_is_named(tmp_path):
    runs.run(tmp_path, "laser", save_replay=True, **LASER)
    path = tmp_path / "laser" / "replay.zip"
    data = bytearray(path.read_bytes())
    middle = len(data) // 2  # a few bytes there may be of no use
    data[middle : middle + 100] = bytes(x ^ 255 for x in data[middle : middle + 100])
    path.write_bytes(data)
    output = runs.run(tmp_path, "laser", total_steps=1600, status=1)
    assert "replay.zip can't be loaded" in output
    assert "Remove it" in output
    assert "Traceback" not in output
    path.unlink()
    runs.run(tmp_path, "laser", total_steps=1600)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--replay_size 39", "that is 40 steps"),
        ("--replay_size 100 --learn_start 101", "that is 101 steps"),
        ("--replay_size 500 --replay_ratio 1e9", "that is 10,000,000,000 steps"),
        ("--replay_size 500 --sync", "--disable_checkpoint with --sync"),
        ("--replay_size 500 --minibatches 2", "needs .* --minibatches 1"),
    ],
)
def test_what_can_not_work_is_refused(words, message):
    common = "--replay_ratio 1 --batch_size 2 --unroll_length 5 "
    with pytest.raises(FlagError, match=message):
        resolve(common + words)
