"""--init_from: the weights of another run."""

import shutil

import pytest
import runs
import torch
from gymnasium import spaces
from nets import make_net

from torchbeast.extras import init_from
from torchbeast.runs import checkpoint

FIRST = {**runs.SMALL, "batch_size": 3}
# Too small to change the weights by more than their rounding.
ONE_UPDATE = {**FIRST, "seed": 4, "total_steps": 15, "learning_rate": 1e-12}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A folder with a finished run."""
    folder = tmp_path_factory.mktemp("runs")
    runs.run(folder, "first", **FIRST)
    return folder / "first"


def weights(folder):
    return torch.load(folder / "model.tar", weights_only=True)["model_state_dict"]


@pytest.mark.parametrize(
    ("how", "module"),
    [("name", "torchbeast.monobeast"), ("file", "torchbeast.polybeast")],
)
def test_all_weights_are_taken(first, tmp_path, how, module):
    if how == "name":
        shutil.copytree(first, tmp_path / "first")
    place = "first" if how == "name" else first / "model.tar"
    flags = {**ONE_UPDATE, "module": module, "init_from": place}
    output = runs.run(tmp_path, "a", **flags)
    assert "These do not fit" not in output
    found, expected = weights(tmp_path / "a"), weights(first)
    assert found.keys() == expected.keys()
    assert f"Took {len(found)} of {len(found)} weights" in output
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x)
    # The counters are the new run's, and a resumed run keeps what it has learned.
    assert [int(row["step"]) for row in runs.read_logs(tmp_path, "a")] == [15]
    output = runs.run(tmp_path, "a", module=module, total_steps=30, init_from=place)
    assert "Resuming at step 15" in output
    assert "Took" not in output
    other = tmp_path / "other"
    output = runs.run(tmp_path, "a", module=module, init_from=other, status=1)
    assert "--init_from is for a new run, and a exists" in output


def test_what_does_not_fit_is_named(first, tmp_path):
    flags = {**ONE_UPDATE, "env": "Acrobot-v1", "init_from": first}
    output = runs.run(tmp_path, "a", **flags)
    assert "These do not fit: " in output
    assert "policy.bias, policy.weight" in output
    found, expected = weights(tmp_path / "a"), weights(first)
    name = "vector.layers.2.weight"
    torch.testing.assert_close(found[name], expected[name])


def test_moments_that_do_not_fit_are_not_taken_over_in_part(tmp_path):
    """The count alone would fit, and would make the first mean last."""
    boxes, actions = (spaces.Box(-9, 9, (n,)) for n in (6, 4)), spaces.Discrete(7)
    old, new = (make_net(x, actions, normalize_observations=True) for x in boxes)
    old.update_moments({"observation": torch.randn(8, 3, 6)}, ())
    state = {"model_state_dict": old.state_dict(), "flags": {}}
    checkpoint.save(tmp_path / "model.tar", state)
    init_from.take_over(str(tmp_path), "", new)
    assert new.vector.moments.count == 0
    assert torch.equal(new.policy.bias, old.policy.bias)
    x = 100 + torch.randn(8, 3, 4)
    new.update_moments({"observation": x}, ())
    torch.testing.assert_close(new.vector.moments.mean, x[1:].mean((0, 1)))


def test_what_can_not_be_used(tmp_path):
    output = runs.run(tmp_path, "a", **FIRST, init_from="nobody", status=1)
    assert "Cannot load the checkpoint nobody: FileNotFoundError" in output
    assert "Traceback" not in output
