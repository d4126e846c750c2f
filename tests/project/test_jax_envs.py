"""examples/jax_envs: gymnax through the adapter, against gymnax called by hand."""

import json

import numpy as np
import pytest
import runs
from small_envs import env_flags

from torchbeast.envs.environment import Environment
from torchbeast.envs.seeded_games import game_seed

gymnax = pytest.importorskip("gymnax")
jax = pytest.importorskip("jax")

E = 3
NAME = "examples.jax_envs.gymnax_games:GymnaxGames"


def make(**arguments):
    flags = env_flags(NAME, env_kwargs=json.dumps(arguments), seed=5)
    return Environment(flags, E, first_index=4)


class ByHand:
    """E games of gymnax, one after the other, without its own resets."""

    def __init__(self, game, params):
        self.env, default = gymnax.make(game)
        self.params = default.replace(**params)
        self.key = jax.random.key(game_seed(5, 4, 0))

    def keys(self):
        self.key, *keys = jax.random.split(self.key, 1 + E)
        return keys

    def reset(self):
        first = [self.env.reset_env(key, self.params) for key in self.keys()]
        self.states = [state for _, state in first]
        return [np.asarray(observation) for observation, _ in first]

    def step(self, actions):
        """Per game: observation, reward, terminated, truncated, last observation."""
        rows = []
        for e, key in enumerate(self.keys()):
            step_key, reset_key = jax.random.split(key)
            last, state, reward, terminated, _ = self.env.step_env(
                step_key, self.states[e], actions[e], self.params
            )
            truncated = int(state.time) >= self.params.max_steps_in_episode
            observation = last
            if terminated or truncated:
                observation, state = self.env.reset_env(reset_key, self.params)
            self.states[e] = state
            row = observation, reward, terminated, truncated, last
            rows.append([np.asarray(x) for x in row])
        return [np.stack(x) for x in zip(*rows, strict=True)]


@pytest.mark.parametrize(
    ("game", "params"),
    [
        ("Breakout-MinAtar", {"max_steps_in_episode": 7}),
        ("Pendulum-v1", {"max_steps_in_episode": 9}),
    ],
    ids=str,
)
def test_rows_are_those_of_gymnax(game, params):
    envs, twin = make(game=game, params=params), ByHand(game, params)
    rng = np.random.default_rng(1)
    continuous = game.startswith("Pendulum")
    # The compiler may round a product and a sum at once.
    tolerance = {"rtol": 0, "atol": 0} if "MinAtar" in game else {"rtol": 1e-4}
    row = envs.initial()
    np.testing.assert_allclose(row["observation"], twin.reset(), **tolerance)
    ends = {"terminated": 0, "truncated": 0}
    for _ in range(150):
        actions = (
            rng.uniform(-2, 2, (E, 1)).astype(np.float32)
            if continuous
            else rng.integers(2, size=E)
        )
        row = envs.step(actions)
        observation, reward, terminated, truncated, last = twin.step(actions)
        cut = truncated & ~terminated
        np.testing.assert_allclose(row["observation"], observation, **tolerance)
        np.testing.assert_allclose(row["reward"], reward, **tolerance)
        np.testing.assert_array_equal(row["done"], terminated | truncated)
        np.testing.assert_array_equal(row["truncated"], cut)
        if cut.any():
            final = envs.final_observation
            np.testing.assert_allclose(final[cut], last[cut], **tolerance)
        ends["terminated"] += terminated.sum()
        ends["truncated"] += cut.sum()
    assert ends["truncated"] > 3 or not params
    assert ends["terminated"] > 3 or continuous
    envs.close()


@pytest.mark.timeout(500)
def test_monobeast_trains_and_tests_on_it(tmp_path):
    runs.run(tmp_path, "run", **{**runs.SMALL, "env": NAME, "batch_size": 3})
    rows = runs.read_logs(tmp_path, "run")
    assert int(rows[-1]["games"]) > 5
    output = runs.run(tmp_path, "run", mode="test", num_test_episodes=5)
    assert "5 games: mean return" in output
