"""--env_kwargs and --wrapper, also in whole runs of both variants."""

import gymnasium
import numpy as np
import pytest
import runs
from gymnasium import spaces
from small_envs import Counter, env_flags, here

from torchbeast.base.errors import UserError
from torchbeast.envs.environment import Environment
from torchbeast.envs.make_env import create_env


class Whole(gymnasium.Env):
    """Episodes of 4 steps; `size` is the reward and the length of an observation."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, size):
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


def ten_times(env):
    return gymnasium.wrappers.TransformReward(env, lambda reward: 10 * reward)


@pytest.mark.parametrize("module", ["torchbeast.monobeast", "torchbeast.polybeast"])
def test_they_reach_the_environments_and_a_resumed_run(tmp_path, module, monkeypatch):
    if module.endswith("polybeast"):
        pytest.importorskip("libtorchbeast", exc_type=ImportError)
    flags = {
        **runs.SMALL,
        "module": module,
        "batch_size": 3,
        "env": "test_env_kwargs:Whole",
        "env_kwargs": '{"size": 7}',
        "wrapper": "test_env_kwargs:ten_times",
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
    assert '--env_kwargs {"size": 7} --wrapper test_env_kwargs:ten_times' in output


class Sized(Counter):
    """Has a parameter."""

    def __init__(self, size, step=1):
        super().__init__()
        self.observation_space = spaces.Box(-9, 9, (size,))
        self.size, self.by = size, step

    def reset(self, *, seed=None, options=None):
        return np.zeros(self.size, np.float32), {}

    def step(self, action):
        return np.full(self.size, self.by, np.float32), 1.0, False, False, {}


def double(env):
    return gymnasium.wrappers.TransformObservation(
        env, lambda x: x * 2, env.observation_space
    )


def plus_one(env):
    return gymnasium.wrappers.TransformObservation(
        env, lambda x: x + 1, env.observation_space
    )


def test_arguments_of_a_class():
    env = Environment(env_flags(here(Sized), env_kwargs='{"size": 5, "step": 3}'), 2)
    env.initial()
    row = env.step(np.zeros(2, np.int64))
    assert row["observation"].tolist() == [[3.0] * 5] * 2


@pytest.mark.parametrize(
    ("env", "kwargs", "found"),
    [
        ("CartPole-v1", '{"sutton_barto_reward": true}', 0.0),
        ("CartPole-v1", None, 1.0),
    ],
)
def test_arguments_of_an_id(env, kwargs, found):
    env = Environment(env_flags(env, env_kwargs=kwargs), 1)
    env.initial()
    assert env.step(np.zeros(1, np.int64))["reward"] == [found]


def test_arguments_of_an_atari_game():
    create_env(env_flags("ALE/Freeway-v5", env_kwargs='{"difficulty": 1}'))
    with pytest.raises(RuntimeError, match=r"(?i)difficult"):
        create_env(env_flags("ALE/Freeway-v5", env_kwargs='{"difficulty": 77}'))


def times(env, factor, plus=()):
    return gymnasium.wrappers.TransformReward(env, lambda r: r * factor + sum(plus))


def test_wrappers_with_arguments():
    """Commas in a JSON object separate no wrappers."""
    wrapper = (
        f'{here(times)}{{"factor": 2, "plus": [1, 2, 0.5]}}, '
        f'{here(ten_times)},{here(times)} {{"factor": 3}},'
    )
    env = Environment(env_flags("CartPole-v1", wrapper=wrapper), 1)
    env.initial()
    assert env.step(np.zeros(1, np.int64))["reward"] == [(1 * 2 + 3.5) * 10 * 3]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"factor": 2', "is not a JSON object"),
        ("{'factor': 2}", "is not a JSON object"),
        ('{"factor": __import__("os")}', "is not a JSON object"),
        ('{"size": 2}', r"arguments \{'size': 2\}: .*'factor'"),
        ("", "arguments {}.* 'factor'"),
    ],
)
def test_wrong_arguments_of_a_wrapper(text, words):
    with pytest.raises(UserError, match=words):
        create_env(env_flags("CartPole-v1", wrapper=here(times) + text))


@pytest.mark.parametrize(
    ("wrappers", "found"),
    [((double, plus_one), 3.0), ((plus_one, double), 4.0), ((double,), 2.0)],
)
def test_wrappers_in_their_order(wrappers, found):
    wrapper = ",".join(map(here, wrappers))
    flags = env_flags(here(Sized), env_kwargs='{"size": 1}', wrapper=wrapper)
    env = Environment(flags, 1)
    env.initial()
    assert env.step(np.zeros(1, np.int64))["observation"] == [[found]]
