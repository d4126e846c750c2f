"""The old Gym API, and spaces and classes that look like it."""

from typing import NamedTuple

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from small_envs import Counter, env_flags, here

from torchbeast.envs.environment import Environment
from torchbeast.envs.make_env import create_env
from torchbeast.envs.seeded_games import game_seed
from torchbeast.extras.envs.old_gym import OldGymAdapter, to_gymnasium


def gym_time_limit():
    gym = pytest.importorskip("gym")
    classic = pytest.importorskip("gym.envs.classic_control")
    return gym.wrappers.TimeLimit(classic.CartPoleEnv(), max_episode_steps=12)


@pytest.mark.filterwarnings("ignore")
def test_environment_of_the_gym_package():
    """CartPole of the old gym package: seeds, four-tuples, truncation by its info."""
    oracle = gym_time_limit()
    assert not isinstance(oracle, gymnasium.Env)
    envs = Environment(env_flags(here(gym_time_limit)), 1)
    assert isinstance(envs.observation_space, spaces.Box)
    assert envs.action_space == spaces.Discrete(2)
    rng = np.random.default_rng(0)
    row, game, endings = envs.initial(), 0, set()
    oracle.seed(game_seed(3, 0, 0))
    observation = oracle.reset()
    for _ in range(80):
        np.testing.assert_array_equal(row["observation"][0], np.float32(observation))
        action = rng.integers(0, 2, 1)
        observation, reward, done, info = oracle.step(action[0])
        row = envs.step(action)
        assert row["reward"] == reward
        assert row["done"] == done
        assert row["truncated"] == info.get("TimeLimit.truncated", False)
        if done:
            if row["truncated"]:
                np.testing.assert_array_equal(
                    envs.final_observation[0], np.float32(observation)
                )
            endings.add(bool(row["truncated"]))
            game += 1
            oracle.seed(game_seed(3, 0, game))
            observation = oracle.reset()
    assert endings == {True, False}


class OldStyle:
    """The old API without any base class; the observation looks like (obs, info)."""

    observation_space = spaces.Tuple(
        (spaces.Discrete(99), spaces.Dict({"x": spaces.Discrete(5)}))
    )
    action_space = spaces.Discrete(4)

    def seed(self, seed=None):
        self.start = seed % 7

    def reset(self):
        self.count = self.start
        return (self.count, {"x": 3})

    def step(self, action):
        assert type(action) is int
        self.count += action
        return (self.count, {"x": 3}), 1, self.count > 9, {}

    def render(self, mode="human"):
        return np.full((1, 1, 3), 7, np.uint8) if mode == "rgb_array" else None


class OldStyleOnGymnasium(gymnasium.Env):
    """An old environment, ported by changing only the import."""

    observation_space = spaces.Box(0, 1, (2,))
    action_space = spaces.Discrete(2)

    def reset(self, seed=None, return_info=False, options=None):
        super().reset(seed=seed)
        return self.np_random.random(2, np.float32)

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, True, {"TimeLimit.truncated": True}


def test_old_class_without_gym():
    envs = Environment(env_flags(here(OldStyle)), 1, render_mode="rgb_array")
    row = envs.initial()
    start = game_seed(3, 0, 0) % 7
    np.testing.assert_array_equal(row["observation"][0], [start])
    np.testing.assert_array_equal(row["observation"][1]["x"], [3])
    row = envs.step(np.array([2]))
    np.testing.assert_array_equal(row["observation"][0], [start + 2])
    np.testing.assert_array_equal(envs.render(), np.full((1, 1, 3), 7))
    envs.close()


def test_old_api_on_gymnasium_class():
    flags = env_flags(here(OldStyleOnGymnasium))
    assert isinstance(create_env(flags), OldGymAdapter)
    envs = Environment(flags, 1)
    first = envs.initial()["observation"]
    rng, _ = gymnasium.utils.seeding.np_random(game_seed(3, 0, 0))
    np.testing.assert_array_equal(first[0], rng.random(2, np.float32))
    row = envs.step(np.array([0]))
    assert row["truncated"]
    np.testing.assert_array_equal(envs.final_observation, np.zeros((1, 2), np.float32))


class BoxSpace(NamedTuple):
    """As Crafter has it without the gym package."""

    low: float
    high: float
    shape: tuple
    dtype: type


class DiscreteSpace(NamedTuple):
    n: int


class DictSpace(NamedTuple):
    spaces: dict


def test_spaces_of_other_packages():
    parts = {"x": BoxSpace(0, 255, (2, 3), np.uint8), "y": DiscreteSpace(4)}
    assert to_gymnasium(DictSpace(parts)) == spaces.Dict(
        {"x": spaces.Box(0, 255, (2, 3), np.uint8), "y": spaces.Discrete(4)}
    )


class PassesKeywords(Counter):
    """reset(**kwargs), as wrappers have it."""

    def reset(self, **kwargs):
        return super().reset(**kwargs)


@pytest.mark.parametrize("kind", [Counter, PassesKeywords])
def test_gymnasium_class_is_not_adapted(kind):
    assert isinstance(create_env(env_flags(here(kind))), kind)
