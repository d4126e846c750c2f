"""libtorchbeast.Server with vectorised environments."""

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_env_server import T, play, serving

from libtorchbeast import probe
from torchbeast.base.errors import FlagError
from torchbeast.polybeast import learner as polybeast_learner
from torchbeast.polybeast.remote_envs import make_env_spec
from torchbeast.runs import flagset


class Vector:
    """Two environments; `change` changes its rows from the second on."""

    num_envs = 2
    observation_space = spaces.Box(-9, 9, (3,))
    action_space = spaces.Discrete(4, start=2)
    final_observation = None

    def __init__(self, change=(), extra=()):
        self.change = dict(change)
        self.row = {
            "observation": np.zeros((2, 3), np.float32),
            "reward": np.zeros(2),
            "done": np.ones(2, bool),
            "episode_step": np.zeros(2, np.int32),
            "episode_return": np.zeros(2),
            **dict(extra),
        }

    def initial(self):
        return self.row

    def step(self, actions):
        assert actions.dtype == np.int64
        assert actions.tolist() == [3, 3]  # what the policy wrote
        row = {**self.row, **self.change}
        return {key: value for key, value in row.items() if value is not None}


def threes(_):
    return torch.full((1, 2), 3)


def test_vector_hello(address):
    extra = {"z": np.zeros((2, 5), np.int16), "b": np.zeros(2), "truncated": [0, 0]}
    with serving(lambda: Vector(extra=extra), address):
        hello = probe(address)
        env_outputs, _ = play(address, threes, batch=2)
    assert hello["num_envs"] == 2
    fields = {
        "b": {"dtype": "float64", "shape": ()},
        "truncated": {"dtype": "bool", "shape": ()},
        "z": {"dtype": "int16", "shape": (5,)},
    }
    assert list(hello["extra_fields"].items()) == list(fields.items())
    assert env_outputs[5]["z"].shape == (T + 1, 2, 5)


@pytest.mark.parametrize("name", ["replayed", "valid"])
def test_names_of_the_learners_own_fields(address, name):
    """The loss would take them for its mask."""
    words = ["--batch_size", "2", "--num_actors", "1"]
    flags = flagset.parse(polybeast_learner.make_parser(), words)
    with serving(lambda: Vector(extra={name: np.zeros(2, np.int64)}), address):
        found = probe(address)
    with pytest.raises(FlagError, match=name):
        make_env_spec(flags, found, address)
    del found["extra_fields"][name]
    assert make_env_spec(flags, found, address).num_envs == 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"reward": None}, 'no "reward"'),
        ({"reward": np.zeros(3)}, r'"reward".*\[3\], not float32 \[2\]'),
        ({"episode_step": np.zeros(2)}, '"episode_step".*float64.*int64'),
        ({"observation": np.zeros((2, 4))}, r'"observation".*\[2, 4\]'),
    ],
)
def test_vector_rows_that_do_not_fit(change, match, address):
    make = functools.partial(Vector, change)
    with serving(make, address), pytest.raises(RuntimeError, match=match):
        play(address, threes, batch=2)


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"num_envs": 0}, "num_envs.*0"),
        ({"num_envs": 3}, r"\[2, 3\], not float32 \[3, 3\]"),
        ({"initial": lambda self: 3}, "dict, not.*int"),
    ],
)
def test_vector_environments_that_cannot_be_served(attributes, match, address):
    env_class = type("Bad", (Vector,), attributes)
    with serving(env_class, address), pytest.raises(RuntimeError, match=match):
        probe(address)


def test_truncated_needs_the_final_observation(address):
    make = functools.partial(
        Vector, {"truncated": [False, True]}, {"truncated": np.zeros(2, bool)}
    )
    with (
        serving(make, address),
        pytest.raises(RuntimeError, match="final_observation is None"),
    ):
        play(address, threes, batch=2)
