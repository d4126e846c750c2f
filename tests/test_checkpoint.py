import os
import random

import numpy as np
import pytest
import torch
from test_files import names, run_python
from watched_runs import small_disk

from torchbeast.runs import checkpoint


def make_state(version):
    """The parts of a checkpoint: weights, optimizer, schedule, counters, RNG, flags."""
    torch.manual_seed(version)
    model = torch.nn.Linear(5, 7)
    optimizer = torch.optim.RMSprop(model.parameters(), momentum=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    model(torch.ones(3, 5)).sum().backward()
    optimizer.step()
    schedule.step()
    return {
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "scheduler_state_dict": schedule.state_dict(),
        "rng": torch.get_rng_state(),
        "stats": {"step": 15 * version, "mean_episode_return": 0.1, "games": None},
        "flags": {"env": "CartPole-v1", "seed": version, "use_lstm": True},
    }


def assert_equal(left, right):
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right


def test_round_trip_and_previous(tmp_path):
    path = tmp_path / "model.tar"
    checkpoint.save(path, make_state(1))
    assert names(tmp_path) == ["model.tar"]
    for version in (2, 3):
        checkpoint.save(path, make_state(version))
        assert_equal(checkpoint.load(path), make_state(version))
        previous = checkpoint.load(tmp_path / "model.previous.tar")
        assert_equal(previous, make_state(version - 1))
        assert names(tmp_path) == ["model.previous.tar", "model.tar"]


def test_rng_state_goes_on_where_it_was(tmp_path):
    def draw():
        numbers = [random.random(), random.gauss(0, 1)]
        numbers += [np.random.normal(), np.random.random()]  # noqa: NPY002 # the global one is meant
        return [*numbers, *torch.randn(5).tolist()]

    draw()  # The second value of a pair of normals is kept back by then.
    checkpoint.save(
        tmp_path / "model.tar", make_state(1) | {"rng": checkpoint.rng_state()}
    )
    expected = [draw() for _ in range(3)]
    checkpoint.set_rng_state(checkpoint.load(tmp_path / "model.tar")["rng"])
    assert [draw() for _ in range(3)] == expected


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The bytes of a checkpoint."""
    path = tmp_path_factory.mktemp("saved") / "model.tar"
    checkpoint.save(path, make_state(2))
    return path.read_bytes()


@pytest.mark.parametrize("share", [0, 0.0001, 0.01, 0.3, 0.9, 0.9999])
def test_truncated(tmp_path, saved, share):
    path, previous = tmp_path / "model.tar", tmp_path / "model.previous.tar"
    path.write_bytes(saved[: int(share * len(saved))])
    with pytest.raises(checkpoint.CheckpointError, match="There is no"):
        checkpoint.load(path)
    previous.write_bytes(saved)
    with pytest.raises(checkpoint.CheckpointError, match=f"copy {previous} to model"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("flags", None),
        ("model_state_dict", [1]),
    ],
)
def test_contents_that_can_not_be_used(tmp_path, name, value):
    torch.save(make_state(1) | {name: value}, tmp_path / "model.tar")
    with pytest.raises(checkpoint.CheckpointError, match="has no attribute 'items'"):
        checkpoint.load(tmp_path / "model.tar")


def test_flipped_bits_never_change_what_is_loaded(tmp_path, saved):
    path = tmp_path / "model.tar"
    refused = 0
    positions = range(0, len(saved), 41)
    for position in positions:
        data = bytearray(saved)
        data[position] ^= 4
        path.write_bytes(data)
        try:
            state = checkpoint.load(path)
        except checkpoint.CheckpointError:
            refused += 1
        else:  # Padding, or a date
            assert_equal(state, make_state(2))
    assert refused > len(positions) / 3


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_is_refused(tmp_path):
    path, target = tmp_path / "model.tar", tmp_path / "owned"
    torch.save({"x": Attack(target)}, path)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.load(path)
    assert not target.exists()
    assert "refers to the code GLOBAL posix.mkdir" in str(caught.value)
    assert "weights_only" not in str(caught.value)  # No advice to run it after all.


# Saves version 1, then a version 2 that is too large, and prints the error.
TOO_LARGE = """
import pathlib, sys, torch
from torchbeast.runs import checkpoint
PARTS = {"model_state_dict": {}, "flags": {}}
path = pathlib.Path(sys.argv[1]) / "model.tar"
checkpoint.save(path, {"version": 1, **PARTS})
before = path.read_bytes()
for _ in range(2):
    try:
        checkpoint.save(path, {"version": 2, "w": torch.ones(1_000_000), **PARTS})
    except checkpoint.CheckpointError as error:
        print(error)
    names = [p.name for p in path.parent.iterdir() if p.name != "model.previous.tar"]
    assert names == ["model.tar"], names
    assert path.read_bytes() == before
    assert checkpoint.load(path)["version"] == 1
checkpoint.save(path, {"version": 3, **PARTS})
assert checkpoint.load(path)["version"] == 3
"""


def test_full_disk(tmp_path):
    result = run_python(TOO_LARGE, tmp_path, prefix=small_disk(tmp_path, "1m"))
    assert result.returncode == 0, result.stderr
    messages = result.stdout.splitlines()
    assert len(messages) == 2, result.stdout
    for message in messages:
        assert f"bytes to {tmp_path}/model.tar: " in message
        assert "No space left on device" in message or "File too large" in message


# Kills a process that replaces version 1 by version 2, right before its first, second,
# … file operation.
KILL_AT_EACH_OPERATION = """
import os, pathlib, signal, sys
from torchbeast.runs import checkpoint
PARTS = {"model_state_dict": {}, "flags": {}}
folder = pathlib.Path(sys.argv[1])
path, previous = folder / "model.tar", folder / "model.previous.tar"
OPERATIONS = {"open", "os.rename", "os.remove"}

def save_and_die(operation):
    left = operation
    def hook(event, arguments):
        nonlocal left
        if event in OPERATIONS and str(folder) in str(arguments[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    checkpoint.save(path, {"version": 2, **PARTS})

killed = 0
seen = set()
while True:
    checkpoint.save(path, {"version": 0, **PARTS})
    checkpoint.save(path, {"version": 1, **PARTS})
    pid = os.fork()
    if pid == 0:
        save_and_die(killed + 1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    versions = (checkpoint.load(path)["version"], checkpoint.load(previous)["version"])
    assert versions in {(1, 0), (1, 1), (2, 1)}, versions
    seen.add(versions)
    if status == 0:
        assert versions == (2, 1)
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    killed += 1
assert seen == {(1, 0), (1, 1), (2, 1)}, seen
assert sorted(os.listdir(folder)) == ["model.previous.tar", "model.tar"]
print(killed)
"""


def test_killed_at_each_file_operation(tmp_path):
    result = run_python(KILL_AT_EACH_OPERATION, tmp_path)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 4
