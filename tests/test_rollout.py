import os
import shutil

import numpy as np
import pytest
import torch
from gymnasium import spaces
from nets import default_flags, make_net

from torchbeast.base.errors import UserError
from torchbeast.base.nested import flatten, map_nested
from torchbeast.core import counters, rollout
from torchbeast.core.acting import row_spec
from torchbeast.core.buffers import (
    PAGESIZE,
    SHARED_MEMORY,
    SharedMemoryError,
    create_buffers,
)
from torchbeast.core.rollout import Spec
from torchbeast.envs import extra_fields
from torchbeast.envs.extra_fields import ExtraField
from torchbeast.model import Net

T, B, A = 5, 3, 7
SLOTS = 4

FLOAT, INT, BOOL = (Spec((), x) for x in (torch.float32, torch.int64, torch.bool))
ENVIRONMENT_FIELDS = {
    **dict.fromkeys(("reward", "episode_return", "game_return"), FLOAT),
    **dict.fromkeys(("done", "truncated", "game_over"), BOOL),
    **dict.fromkeys(("episode_step", "game_step"), INT),
}
AGENT_FIELDS = {
    "baseline": Spec((), torch.float32),
    "truncation_value": Spec((), torch.float32),
    "policy_version": Spec((), torch.int64),
}
OBSERVATION_SPACE = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (10, 12, 3), np.uint8),
        "body": spaces.Tuple(
            [
                spaces.Box(-np.inf, np.inf, (9,), np.float64),
                spaces.Dict({"holds": spaces.Discrete(5), "on": spaces.MultiBinary(2)}),
                spaces.MultiDiscrete([2, 3, 4]),
            ]
        ),
    }
)
OBSERVATION_SPEC = {
    "camera": Spec((10, 12, 3), torch.uint8),
    "body": (
        Spec((9,), torch.float32),
        {"holds": Spec((), torch.int64), "on": Spec((2,), torch.int8)},
        Spec((3,), torch.int64),
    ),
}


@pytest.mark.parametrize(
    ("action_space", "action", "num_logits"),
    [
        (spaces.Discrete(A), Spec((), torch.int64), A),
        (spaces.MultiDiscrete([2, 4]), Spec((2,), torch.int64), 6),
        (spaces.Box(-1.0, 1.0, (2, 3)), Spec((2, 3), torch.float32), 12),
    ],
)
def test_row_spec(action_space, action, num_logits):
    spec = row_spec(make_net(OBSERVATION_SPACE, action_space))
    assert spec == {
        "observation": OBSERVATION_SPEC,
        **ENVIRONMENT_FIELDS,
        "last_action": action,
        "action": action,
        "policy_logits": Spec((num_logits,), torch.float32),
        **AGENT_FIELDS,
    }


class Surprised(Net):
    """A fork: its surprise is a field, its guess is for a loss alone."""

    def forward(self, rows, state=(), acting=False):
        outputs, state = super().forward(rows, state, acting)
        outputs["baseline"] = outputs["baseline"].unsqueeze(-1).expand(-1, -1, 2)
        outputs["surprise"] = torch.zeros(*rows["reward"].shape, 4, dtype=torch.int32)
        if not acting:
            outputs["guess"] = outputs["baseline"]
        return outputs, state


def test_fields_of_the_model_and_of_the_info_are_part_of_a_row(monkeypatch):
    field = ExtraField((2, 3), np.float64, of="observation")
    monkeypatch.setitem(extra_fields.EXTRA_FIELDS, "goal", field)
    spec = row_spec(Surprised(default_flags(), OBSERVATION_SPACE, spaces.Discrete(A)))
    assert spec["surprise"] == Spec((4,), torch.int32)
    assert spec["baseline"] == spec["truncation_value"] == Spec((2,), torch.float32)
    assert spec["goal"] == Spec((2, 3), torch.float32)
    assert not {"guess", "final_goal"} & spec.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, h: (x | {"reward": x["baseline"]}, h), "outputs reward"),
        (lambda x, h: x, "must return a tuple of two"),
        (
            lambda x, h: ({"policy_logits": x["policy_logits"]}, h),
            r"baseline \[\]; .* its shape must begin \[1, 1\]",
        ),
        (
            lambda x, h: (x | {"policy_logits": x["policy_logits"][..., 1:]}, h),
            rf"policy_logits \[1, 1, {A - 1}\]; .* must begin \[1, 1, {A}\]",
        ),
        (lambda x, h: (x | {"surprise": 3.0}, h), r"surprise \[\]; .* \[1, 1\]"),
        (lambda x, h: (x, h[:1]), r"a state \[\[1, 1, 256\]\]; initial_state\(\)"),
    ],
)
def test_a_model_that_returns_something_else_is_refused(change, message):
    class Wrong(Net):
        def forward(self, rows, state=(), acting=False):
            return change(*super().forward(rows, state, acting))

    flags = default_flags(use_lstm=True)
    with pytest.raises(UserError, match=message):
        row_spec(Wrong(flags, OBSERVATION_SPACE, spaces.Discrete(A)))


def test_a_field_belongs_to_the_step_before_its_row_or_after_it():
    """A replay would put one that is in neither set to the wrong step."""
    net = make_net(OBSERVATION_SPACE, spaces.Discrete(A))
    after = {"observation", "action", "policy_logits", "baseline", "policy_version"}
    assert row_spec(net).keys() - after == rollout.RESULTS


def test_fields_of_the_observation_at_the_end_of_a_truncated_episode(monkeypatch):
    """Only a row that shows a final observation, truncated and not done, has them."""
    field = ExtraField((2,), np.int64, of="observation")
    monkeypatch.setitem(extra_fields.EXTRA_FIELDS, "goal", field)
    row = {
        "truncated": torch.tensor([[True, True, False]]),
        "done": torch.tensor([[False, True, False]]),
        "goal": torch.arange(6).view(1, 3, 2),
        "final_goal": 10 + torch.arange(6).view(1, 3, 2),
    }
    shown = rollout.show_final_fields(row)
    assert shown["goal"].tolist() == [[[10, 11], [2, 3], [4, 5]]]
    assert shown.keys() == row.keys() - {"final_goal"}
    assert row["goal"].tolist() == [[[0, 1], [2, 3], [4, 5]]]  # left as it was


@pytest.mark.parametrize(
    "dtype",
    [*("bool", "uint8", "int16", "uint16", "uint32", "uint64", "float16", "float64")],
)
def test_observations_of_every_dtype_go_through_buffers(dtype):
    """The path of an observation: NumPy, a slot's row, a batch, float32."""
    high = 1 if dtype == "bool" else 100
    space = spaces.Box(0, high, (2,), np.dtype(dtype).type)
    buffer = create_buffers(rollout.observation_spec(space), (SLOTS, T + 1))
    slots = torch.tensor([3, 1])
    x = np.array([[1, 0], [high, 1]], dtype)
    buffer[slots, 2] = torch.from_numpy(x).to(buffer.dtype)
    batch = buffer[slots].transpose(0, 1)
    assert batch.shape == (T + 1, 2, 2)
    assert batch[2].float().tolist() == x.astype(np.float32).tolist()


# --- Nested structures ---


def test_map_nested_keeps_structure_and_pairs_leaves():
    nested = {"a": 1, "b": (2, {"c": 3}), "d": ()}
    other = {"d": (), "b": (20, {"c": 30}), "a": 10, "not in the first": 40}
    assert map_nested(lambda x, y: x + y, nested, other) == {
        "a": 11,
        "b": (22, {"c": 33}),
        "d": (),
    }
    assert flatten(nested) == [1, 2, 3]
    for wrong in {"a": 1}, {**other, "b": (2,)}:
        with pytest.raises((KeyError, ValueError)):
            map_nested(lambda x, y: x + y, nested, wrong)


# --- Shared memory ---


def make_buffers():
    spec = row_spec(make_net(OBSERVATION_SPACE, spaces.Discrete(A)))
    return create_buffers(spec, (SLOTS, T + 1))


@pytest.mark.skipif(not os.path.isdir(SHARED_MEMORY), reason="no such file system here")
class TestSharedMemoryFileSystem:
    def test_no_file_is_left_in_it(self):
        def own_files():
            return [x for x in os.listdir(SHARED_MEMORY) if mine in x]

        mine = f"_{os.getpid()}_"
        before = own_files()
        buffers = make_buffers()
        assert own_files() == before
        assert buffers["reward"].is_shared()

    def test_too_much_is_refused_before_it_is_taken(self):
        free = shutil.disk_usage(SHARED_MEMORY).free
        spec = {"a": Spec((3,), torch.float32), "b": Spec((2,), torch.uint8)}
        slots = (2 * free // 14 // PAGESIZE + 1) * PAGESIZE
        with pytest.raises(SharedMemoryError) as error:
            create_buffers(spec, (slots,))
        message = str(error.value)
        assert f"need {slots * 14 / 2**20:,.1f} MiB" in message
        for word in ("MiB free", "--shm-size", "--num_buffers"):
            assert word in message


# --- Episodes ---


def test_ends_of_episodes_and_games():
    place = torch.arange((T + 1) * B).view(T + 1, B)
    batch = {
        "done": torch.zeros(T + 1, B, dtype=torch.bool),
        "game_over": torch.zeros(T + 1, B, dtype=torch.bool),
        "episode_return": place + 0.5,
        "episode_step": place,
        "game_return": place + 100.5,
        "game_step": place + 100,
    }
    for t, b in ((0, 1), (1, 2), (3, 0), (T, 1)):  # row 0 was counted as a row T
        batch["done"][t, b] = True
    batch["game_over"][0] = True
    batch["game_over"][3, 0] = True  # the others lost a life only
    assert counters.episode_ends(batch) == {
        "episode_return": [5.5, 9.5, 16.5],
        "episode_step": [5, 9, 16],
        "game_return": [109.5],
        "game_step": [109],
    }
