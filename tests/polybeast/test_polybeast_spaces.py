"""What PolyBeast's learner takes from servers: spaces, fields, bounds."""

import argparse

import numpy as np
import torch
from gymnasium import spaces

from torchbeast.core import rollout
from torchbeast.core.distributions import make_distribution
from torchbeast.envs.extra_fields import EXTRA_FIELDS, ExtraField
from torchbeast.polybeast.remote_envs import make_env_spec, make_space
from torchbeast.polybeast.streams import as_stored

INF = np.inf
INT64 = np.iinfo(np.int64)
BOXES = {
    "finite": spaces.Box(-2, 3, (2, 3), np.float32),
    "scalar": spaces.Box(-0.1, 0.1, (), np.float64),
    "none": spaces.Box(-INF, INF, (3,), np.float32),  # as most of MuJoCo has
    "none, float16": spaces.Box(-INF, INF, (3,), np.float16),
    "none, int32": spaces.Box(-INF, INF, (2,), np.int32),
    "from 0": spaces.Box(0, INF, (2,), np.float64),
    "to 1": spaces.Box(-INF, 1, (2,), np.float32),
    "all int64": spaces.Box(INT64.min, INT64.max, (2,), np.int64),
    "all uint64": spaces.Box(0, 2**64 - 1, (2,), np.uint64),
    "largest float64": spaces.Box(-1.7e308, 1.7e308, (2,), np.float64),
    "bools": spaces.Box(0, 1, (2,), np.bool_),
    "each its own": spaces.Box(
        np.array([0.0, -INF, -0.3]), np.array([1.0, 0.7, INF]), dtype=np.float64
    ),
    "int64 ends differ": spaces.Box(
        np.array([INT64.min, -5]), np.array([7, INT64.max]), dtype=np.int64
    ),
}


def test_spaces_arrive_as_they_are(tmp_path):
    """From Gymnasium over the wire to Gymnasium."""
    from gymnasium.vector.utils import create_empty_array

    import libtorchbeast

    each = np.arange(70_000)  # too many different bounds for the wire
    others = {
        "Discrete": spaces.Discrete(7, start=-2),
        "MultiDiscrete": spaces.MultiDiscrete([3, 4], start=[1, 0]),
        "MultiBinary": spaces.MultiBinary((2, 2)),
        "sorted": spaces.Dict({"z": BOXES["none"], "a": BOXES["to 1"]}),
        "not sorted": spaces.Dict(z=BOXES["none"], a=BOXES["to 1"]),
        "nested": spaces.Tuple(
            [
                BOXES["from 0"],
                spaces.Dict({"b": spaces.Tuple([BOXES["none"]]), "a": BOXES["to 1"]}),
            ]
        ),
    }
    many = {
        "many, some without": spaces.Box(
            np.where(each == 7, -INF, -each - 0.5), each + 0.5, dtype=np.float32
        ),
        "many int64": spaces.Box(-each, each, dtype=np.int64),
    }

    class Many:
        num_envs = 1
        observation_space = spaces.Dict({**BOXES, **others, **many})
        action_space = spaces.Dict({**BOXES, **others})
        final_observation = None

        def initial(self):
            return {
                "observation": create_empty_array(self.observation_space, 1),
                "reward": np.zeros(1, np.float32),
                "done": np.ones(1, bool),
                "episode_step": np.zeros(1, np.int64),
                "episode_return": np.zeros(1, np.float32),
            }

        def step(self, actions):
            raise AssertionError("nobody steps")

    server = libtorchbeast.Server(Many, f"unix:{tmp_path}/s")
    server.start()
    found = libtorchbeast.probe(f"unix:{tmp_path}/s")
    server.stop()

    made = make_space(found["observation_space"])
    for key, space in {**BOXES, **others}.items():
        assert made[key] == space, key
    for key in ("sorted", "not sorted"):
        assert list(made[key].spaces) == list(others[key].spaces)
    # The outermost of too many bounds holds for all.
    top = 69_999
    bound = np.float32(top + 0.5)
    assert made["many int64"] == spaces.Box(-top, 0 + top, (70_000,), np.int64)
    half = spaces.Box(-INF, bound, (70_000,), np.float32)
    assert made["many, some without"] == half

    # A policy writes float32.
    made = make_space(found["action_space"])
    for key, space in BOXES.items():
        if space.dtype.kind == "f":
            with np.errstate(over="ignore"):
                low, high = (x.astype(np.float32) for x in (space.low, space.high))
            space = spaces.Box(low, high, dtype=np.float32)
        assert made[key] == space, key
    for key, space in others.items():
        if key != "nested":
            assert made[key] == space, key


def test_fields_that_other_languages_leave_out():
    space = spaces.Box(0, 9, (2,), np.float64)
    distribution = make_distribution(spaces.MultiDiscrete([3, 4]))
    spec = rollout.env_fields(space, distribution)
    done, step = torch.tensor([[True, False, False]]), torch.tensor([[5, 1, 2]])
    row = dict.fromkeys(("done", "game_over"), done)
    row |= dict.fromkeys(("episode_step", "game_step", "of its own"), step)
    returns = ("reward", "episode_return", "game_return")
    row |= dict.fromkeys(returns, torch.tensor([[1.5, 0.0, 2.0]]))
    row["observation"] = torch.ones(1, 3, 2).double()
    stored = as_stored(row, spec)
    assert stored.keys() == {*spec, "of its own"}
    assert stored["observation"].dtype == torch.float32
    assert not stored["truncated"].any()
    for name in row.keys() - {"observation"}:
        assert stored[name] is row[name]
    assert stored["last_action"].shape == (1, 3, 2)
    assert stored["last_action"].dtype == torch.int64


def test_the_learner_knows_the_stacks_of_atari(monkeypatch, caplog):
    """The wire does not say it. Without it a replay takes four times the memory."""
    flags = argparse.Namespace(
        env="PongNoFrameskip-v4",
        frame_skip=4,
        num_actions=None,
        num_actors=2,
        unroll_length=5,
        batch_size=4,
        sync=False,
    )
    screens = {"type": "Box", "dtype": "uint8", "shape": (4, 84, 84)}
    found = {
        "observation_space": {**screens, "low": 0.0, "high": 255.0},
        "action_space": {"type": "Discrete", "n": 6, "start": 0},
        "num_envs": 2,
        "hello": b"",
        "step_bytes": 100_000,
        "extra_fields": {},
    }
    env = make_env_spec(flags, found, "here")
    assert rollout.observation_spec(env.observation_space).is_stack
    flags.env = "Squares-v0"
    env = make_env_spec(flags, found, "here")
    assert not rollout.observation_spec(env.observation_space).is_stack
    assert not caplog.text
    field = ExtraField((), np.int64, of="step")
    monkeypatch.setitem(EXTRA_FIELDS, "lives", field)  # the servers' copy lacks it
    make_env_spec(flags, found, "here")
    assert "environments at here lack EXTRA_FIELDS: lives" in caplog.text
