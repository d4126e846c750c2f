"""--checkpoint_history, in real runs."""

import re
import shutil

import runs
import torch


def load(path):
    return torch.load(path, weights_only=True)


def kept(folder):
    """The steps of the checkpoints that stay."""
    found = [re.fullmatch(r"model\.(\d+)\.tar", p.name) for p in folder.iterdir()]
    return sorted(int(match[1]) for match in found if match)


def test_checkpoints_are_kept(tmp_path):
    runs.run(tmp_path, "a", **runs.SMALL, checkpoint_history=3)  # 600 steps
    folder = tmp_path / "a"
    first = kept(folder)
    assert len(first) == 3
    for wanted, step in zip((200, 400, 600), first, strict=True):
        assert wanted <= step < wanted + 200
        assert load(folder / f"model.{step}.tar")["stats"]["step"] == step
    weights = [load(folder / f"model.{step}.tar")["model_state_dict"] for step in first]
    assert not torch.equal(weights[0]["policy.bias"], weights[1]["policy.bias"])
    runs.run(tmp_path, "a", total_steps=1200)  # now due: 800 and 1200
    extended = kept(folder)
    assert extended[:3] == first
    for wanted, step in zip((800, 1200), extended[3:], strict=True):
        assert wanted <= step < wanted + 200


def test_with_sync_the_games_are_saved_too(tmp_path):
    output = runs.run(tmp_path, "a", **runs.SMALL, sync=True, checkpoint_history=2)
    assert output.count("Saved ") == 2
    folder = tmp_path / "a"
    first = kept(folder)[0]
    assert first < 600
    assert len(load(folder / f"model.{first}.tar")["actors"]) == 2


def test_what_is_of_steps_that_were_cut_off_is_removed(tmp_path):
    """As after a kill: model.tar is older than a kept one."""
    runs.run(tmp_path, "a", **runs.SMALL, checkpoint_history=2)
    folder = tmp_path / "a"
    first = kept(folder)[0]
    shutil.copy(folder / f"model.{first}.tar", folder / "model.tar")
    (folder / "model.599.tar").touch()
    output = runs.run(tmp_path, "a", total_steps=600)
    assert "model.600.tar is removed: it is of a later step" in output
    assert kept(folder) == [first, 600]
