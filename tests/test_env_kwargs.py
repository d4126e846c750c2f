"""--env_kwargs and --wrapper, also in whole runs of both variants."""

import gymnasium
import numpy as np
import pytest
import runs
from small_envs import env_flags, here

from torchbeast.base.errors import FlagError
from torchbeast.envs.environment import Environment
from torchbeast.envs.make_env import create_env


class Whole(gymnasium.Env):
    """Episodes of 4 steps; `size` is the reward and the length of an observation."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, size, env_index):
        self.index = env_index
        self.observation_space = gymnasium.spaces.Box(0, 1, (size,))
        self.size = size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.random(self.size, "float32"), {}

    def step(self, action):
        self.steps += 1
        observation = self.np_random.random(self.size, "float32")
        return observation, float(self.size), False, self.steps == 4, {}


def times(env, env_index, factor=10, plus=()):
    assert env_index in (0, getattr(env.unwrapped, "index", 0))
    return gymnasium.wrappers.TransformReward(env, lambda r: r * factor + sum(plus))


@pytest.mark.parametrize("module", ["torchbeast.monobeast", "torchbeast.polybeast"])
def test_they_reach_the_environments_and_a_resumed_run(tmp_path, module, monkeypatch):
    flags = {
        **runs.SMALL,
        "module": module,
        "batch_size": 3,
        "env": "test_env_kwargs:Whole",
        "env_kwargs": '{"size": 7}',
        "wrapper": "test_env_kwargs:times",
    }
    runs.run(tmp_path, "a", **flags)
    runs.run(tmp_path, "a", module=module, total_steps=900)
    rows = runs.read_logs(tmp_path, "a")
    assert int(rows[-1]["step"]) >= 900
    returns = {row["mean_game_return"] for row in rows} - {""}
    assert {float(x) for x in returns} == {4 * 70.0}
    # A checkpoint names code that is not trusted.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # another user's
    flags = {"total_steps": 1200, "env": flags["env"]}
    output = runs.run(tmp_path, "a", module=module, **flags, status=1)
    assert '--env_kwargs {"size": 7} --wrapper test_env_kwargs:times' in output


def first_reward(env, **flags):
    env = Environment(env_flags(env, **flags), 1)
    env.initial()
    return env.step(np.zeros(1, np.int64))["reward"].tolist()


def test_arguments():
    assert first_reward(here(Whole), env_kwargs='{"size": 5}') == [5]
    shaped = '{"sutton_barto_reward": true}'
    assert first_reward("CartPole-v1", env_kwargs=shaped) == [0]
    assert first_reward("CartPole-v1") == [1]
    with pytest.raises(RuntimeError, match=r"(?i)difficult"):
        create_env(env_flags("ALE/Freeway-v5", env_kwargs='{"difficulty": 77}'))


def test_each_environment_gets_its_number():
    env = Environment(env_flags(here(Whole), env_kwargs='{"size": 5}'), 3, 7)
    assert [x.unwrapped.index for x in env.games] == [7, 8, 9]


def test_wrappers_in_their_order_with_arguments():
    """Commas in a JSON object separate no wrappers."""
    wrapper = (
        f'{here(times)}{{"factor": 2, "plus": [1, 2, 0.5]}}, '
        f'{here(times)},{here(times)} {{"factor": 3}},'
    )
    assert first_reward("CartPole-v1", wrapper=wrapper) == [(1 * 2 + 3.5) * 10 * 3]


@pytest.mark.parametrize("text", ['{"factor": 2', '{"factor": __import__("os")}'])
def test_what_is_no_json(text):
    with pytest.raises(FlagError, match="is not a JSON object"):
        create_env(env_flags("CartPole-v1", wrapper=here(times) + text))
