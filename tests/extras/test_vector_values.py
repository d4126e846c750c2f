"""Values of vector environments: fields of info, and last observations."""

import json

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from small_envs import env_flags
from test_vector_envs import E, OneSeed

from torchbeast.envs import extra_fields
from torchbeast.envs.environment import Environment
from torchbeast.envs.extra_fields import ExtraField
from torchbeast.envs.values import InvalidEnvironmentError


def make(name, **flags):
    return Environment(env_flags(f"{__name__}:{name}", **flags), E, first_index=4)


class Large(OneSeed):
    def __init__(self, num_envs, numbers=None):
        super().__init__(num_envs)
        self.numbers = numbers or np.array([255, 255, 300])

    def step(self, actions):
        none = np.zeros(self.num_envs, bool)
        return self.reset()[0], np.ones(E), none, none, {"large": self.numbers}


def test_integers_of_info_that_do_not_fit_are_refused(monkeypatch):
    field = ExtraField((), np.uint8, of="step")
    monkeypatch.setitem(extra_fields.EXTRA_FIELDS, "large", field)
    envs = make("Large")
    assert not envs.initial()["large"].any()
    with pytest.raises(
        InvalidEnvironmentError, match=r"'large' as .*uint8.*holds .*300"
    ):
        envs.step(np.zeros(E, int))


def test_values_of_info_are_one_for_each(monkeypatch):
    field = ExtraField((), np.int64, of="step")
    monkeypatch.setitem(extra_fields.EXTRA_FIELDS, "large", field)
    envs = make("Large", env_kwargs='{"numbers": [1, 2, 3]}')  # a list will do
    envs.initial()
    assert envs.step(np.zeros(E, int))["large"].tolist() == [1, 2, 3]


class Buffers(OneSeed):
    """It returns the same arrays each time, as simulators on GPUs do."""

    single_observation_space = gymnasium.spaces.Box(0, 9, (1,))

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.seen, self.reward = np.zeros((E, 1), np.float32), np.zeros(E)
        self.cost = np.zeros(E, np.int64)

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(E, bool))
        self.seen[mask] = self.reward[mask] = self.cost[mask] = 0
        return self.seen, {"cost": self.cost}

    def step(self, actions):
        self.seen += 1
        self.reward[:] = self.cost[:] = 1
        ends = self.seen[:, 0] == 3
        return self.seen, self.reward, ends & False, ends, {"cost": self.cost}


def test_arrays_that_a_reset_changes(monkeypatch):
    field = ExtraField((), np.int64, of="step")
    monkeypatch.setitem(extra_fields.EXTRA_FIELDS, "cost", field)
    env = make("Buffers")
    env.initial()
    for _ in range(3):
        row = env.step(np.zeros(E, int))
    assert row["observation"].tolist() == [[0]] * E
    assert env.final_observation.tolist() == [[3]] * E
    assert row["reward"].tolist() == row["cost"].tolist() == [1] * E
    assert row["episode_return"].tolist() == [3] * E


class Rooms(OneSeed):
    """Environment 1 truncates each game after two steps, in room 4."""

    single_observation_space = gymnasium.spaces.Discrete(5, start=1)

    def __init__(self, num_envs, form):
        super().__init__(num_envs)
        self.form, self.steps = form, 0

    def reset(self, *, seed=None, options=None):
        return np.ones(self.num_envs, np.int64), {}

    def step(self, actions):
        self.steps += 1
        truncated = np.array([False, self.steps % 2 == 0, False])
        filler, dtype = {"array": (0, np.int64), "objects": (None, object)}[self.form]
        final = np.array([filler, 4, filler], dtype)
        none = np.zeros(E, bool)
        return self.reset()[0], np.ones(E), none, truncated, {"final_obs": final}


@pytest.mark.parametrize("form", ["array", "objects"])
def test_only_last_observations_of_truncated_games_count(form):
    env = make("Rooms", env_kwargs=json.dumps({"form": form}))
    env.initial()
    for _ in range(2):
        row = env.step(np.zeros(E, int))
    assert row["truncated"].tolist() == [False, True, False]
    assert env.final_observation.tolist() == [1, 4, 1]
