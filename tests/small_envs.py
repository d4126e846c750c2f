"""Small environments with known rows, and the flags that make them."""

import argparse

import gymnasium
import numpy as np
from gymnasium import spaces

from torchbeast import flags as declared_flags
from torchbeast.base.nested import flatten
from torchbeast.envs import extra_fields


def env_flags(env, **changes):
    declared = declared_flags.Environment.declared() | declared_flags.Atari.declared()
    defaults = {name: flag.default for name, flag in declared.items()}
    settings = {"env": env, "atari_backend": "python", "seed": 3, "sync": False}
    return argparse.Namespace(**{**defaults, **settings, **changes})


def here(definition):
    """The value of --env for a name in this file."""
    return f"{definition.__module__}:{definition.__name__}"


def declare(monkeypatch, **fields):
    for name, field in fields.items():
        monkeypatch.setitem(extra_fields.EXTRA_FIELDS, name, field)


def assert_rows_equal(row, expected):
    assert row.keys() == expected.keys()
    for name in row:
        found, wanted = flatten(row[name]), flatten(expected[name])
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert getattr(a, "dtype", None) == getattr(b, "dtype", None)
            np.testing.assert_array_equal(a, b, err_msg=name)


class Counter(gymnasium.Env):
    """Its nested observation is the number of steps, in a buffer that it reuses.

    Truncated after 5 steps.
    """

    observation_space = spaces.Dict(
        {
            "pair": spaces.Tuple((spaces.Discrete(9), spaces.Box(-1, 9, (2, 3)))),
            "bits": spaces.MultiBinary(4),
        }
    )
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.buffer = np.zeros((2, 3), np.float32)

    def observe(self):
        self.buffer[:] = self.count
        bits = np.full(4, self.count % 2, np.int8)
        return {"pair": (self.count, self.buffer), "bits": bits}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        info = {"goal": np.array([self.count, -1]), "rest": "not numeric"}
        return self.observe(), 0.5, False, self.count == 5, info


class Echo(gymnasium.Env):
    """Reports the last action in its info, checked against the space."""

    observation_space = spaces.Box(0, 1, ())

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        return np.float32(0), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return np.float32(0), 0.0, False, False, {"echo": action}


def echo_discrete():
    return Echo(spaces.Discrete(3, start=-1))


def echo_multi_discrete():
    return Echo(spaces.MultiDiscrete([2, 5], start=[10, 20]))


def echo_box():
    return Echo(spaces.Box(np.float32([-1, -np.inf]), np.float32([2, np.inf])))


def short_cart_pole():
    return gymnasium.make("CartPole-v1", max_episode_steps=16)
