import argparse
import logging
import multiprocessing
import pickle

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from small_envs import (
    Counter,
    Echo,
    assert_rows_equal,
    declare,
    echo_box,
    echo_discrete,
    echo_multi_discrete,
    env_flags,
    here,
    short_cart_pole,
)

from torchbeast.core.rollout import observation_spec
from torchbeast.envs import extra_fields
from torchbeast.envs.environment import Environment
from torchbeast.envs.extra_fields import ExtraField
from torchbeast.envs.make_env import create_env, first
from torchbeast.envs.seeded_games import game_seed
from torchbeast.envs.values import FrameStack
from torchbeast.local.env_spec import find_env_spec


def test_rows_against_one_environment_at_a_time():
    """CartPole with terminated and truncated episodes, compared with a plain loop."""
    num_envs, first_index, steps = 3, 5, 90
    envs = Environment(env_flags(here(short_cart_pole)), num_envs, first_index)
    actions = np.random.default_rng(0).integers(0, 2, (steps, num_envs))
    rows = [envs.initial()]
    finals = []
    for action in actions:
        rows.append(envs.step(action))
        finals.append(envs.final_observation)
    assert envs.frames_per_step == 1
    envs.close()

    first = rows[0]
    assert first["done"].all()
    assert first["observation"].shape == (num_envs, 4)
    for name in first.keys() - {"observation", "done"}:
        assert not first[name].any(), name
    expected_dtypes = {
        **{name: np.dtype(dtype) for name, dtype in extra_fields.FIELDS.items()},
        "last_action": np.int64,
        "observation": np.float32,
    }
    for row in rows:
        assert {name: array.dtype for name, array in row.items()} == expected_dtypes

    endings = set()
    for e in range(num_envs):
        env, game = short_cart_pole(), 0
        observation, _ = env.reset(seed=game_seed(3, first_index + e, game))
        np.testing.assert_array_equal(first["observation"][e], observation)
        total, steps = 0.0, 0
        for action, row, final in zip(actions, rows[1:], finals, strict=True):
            observation, reward, terminated, truncated, _ = env.step(action[e])
            total, steps = total + reward, steps + 1
            done = terminated or truncated
            assert row["reward"][e] == reward
            assert row["last_action"][e] == action[e]
            assert row["done"][e] == row["game_over"][e] == done
            assert row["truncated"][e] == (truncated and not terminated)
            assert row["episode_return"][e] == row["game_return"][e] == total
            assert row["episode_step"][e] == row["game_step"][e] == steps
            assert (final is None) == (not row["truncated"].any())
            if row["truncated"][e]:
                np.testing.assert_array_equal(final[e], observation)
            if done:
                endings.add("terminated" if terminated else "truncated")
                game += 1
                observation, _ = env.reset(seed=game_seed(3, first_index + e, game))
                total, steps = 0.0, 0
            np.testing.assert_array_equal(row["observation"][e], observation)
    assert endings == {"terminated", "truncated"}


class Large(Echo):
    """Float32 can not add 1 to the first reward."""

    def __init__(self):
        super().__init__(spaces.Discrete(2))
        self.steps = 0

    def step(self, action):
        self.steps += 1
        return np.float32(0), 1.0 if self.steps > 1 else 2.0**24, False, False, {}


def test_returns_of_long_games_keep_their_digits():
    """In both variants: PolyBeast's servers send these rows."""
    flags = env_flags(here(Large), sync=True)
    envs, resumed = Environment(flags, 1), Environment(flags, 1)
    envs.initial()
    for step in range(1, 100):
        row = envs.step(np.zeros(1, np.int64))
        assert row["game_return"] == row["episode_return"]
        # Above 2 ** 24 float32 has the even numbers only.
        assert abs(float(row["game_return"][0]) - (2**24 + step - 1)) <= 1
    resumed.load_state_dict(envs.state_dict())
    assert_rows_equal(resumed.step(np.zeros(1, int)), envs.step(np.zeros(1, int)))


def test_nested_observations_and_extra_fields(monkeypatch):
    declare(monkeypatch, goal=ExtraField((2,), np.int32, of="step"))
    declare(monkeypatch, absent=ExtraField((), np.float32, of="step"))
    envs = Environment(env_flags(here(Counter)), 2)
    rows = [envs.initial()]
    for _ in range(5):
        assert envs.final_observation is None
        rows.append(envs.step(np.zeros(2, np.int64)))
    # Rows are compared at the end, so that a reused buffer would show.
    for t, row in enumerate(rows):
        count = t % 5
        number, box = row["observation"]["pair"]
        np.testing.assert_array_equal(number, [count, count])
        np.testing.assert_array_equal(box, np.full((2, 2, 3), count, np.float32))
        np.testing.assert_array_equal(
            row["observation"]["bits"], np.full((2, 4), count % 2, np.int8)
        )
        goal = [t, -1] if t else [0, 0]
        np.testing.assert_array_equal(row["goal"], np.array([goal] * 2, np.int32))
        np.testing.assert_array_equal(row["absent"], np.zeros(2, np.float32))
    assert rows[5]["truncated"].all()
    number, box = envs.final_observation["pair"]
    np.testing.assert_array_equal(number, [5, 5])
    np.testing.assert_array_equal(box, np.full((2, 2, 3), 5, np.float32))


def test_extra_fields_belong_to_the_step_or_to_the_observation(monkeypatch):
    """The goal belongs to the observation in the row, the count to the step."""
    declare(monkeypatch, goal=ExtraField((), np.int32, of="observation"))
    declare(monkeypatch, count=ExtraField((), np.int64, of="step"))
    envs = Environment(env_flags("environments:Goals"), 3)
    starts = truncated = 0
    for _game in range(2):  # initial() may be called again
        rows = [envs.initial()]
        for _ in range(40):
            row = envs.step(np.zeros(3, np.int64))
            rows.append(row)
            cut = row["truncated"]
            assert cut.any() == (envs.final_observation is not None)
            if cut.any():
                final = np.where(cut, envs.final_observation[:, 0], 0)
                np.testing.assert_array_equal(row["final_goal"], final)
            else:
                assert not row["final_goal"].any()
            truncated += cut.sum()
        for row in rows:
            np.testing.assert_array_equal(row["goal"], row["observation"][:, 0])
            np.testing.assert_array_equal(row["count"], row["episode_step"])
            starts += row["done"].sum()
    assert starts > 30
    assert truncated > 10


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        (np.float32, None, False),
        (np.int64, 0.7, False),
        (np.uint8, 300, False),
        (np.float32, "x", False),
        (np.float32, [1.0], False),
        (np.int64, 2.0, True),
        (np.uint8, 7, True),
        (np.float32, True, True),
        (np.bool_, 1, True),
    ],
)
def test_an_extra_field_of_another_shape_or_dtype(monkeypatch, dtype, value, fits):
    declare(monkeypatch, goal=ExtraField((), dtype, of="step"))
    if fits:
        assert extra_fields.select({"goal": value}) == {"goal": np.asarray(value)}
    else:
        with pytest.raises(ValueError, match=r"'goal' as .*info holds"):
            extra_fields.select({"goal": value})


def echo_multi_binary():
    return Echo(spaces.MultiBinary((2, 2)))


@pytest.mark.parametrize(
    ("make", "actions", "received"),
    [
        (echo_discrete, np.array([0, 2]), [-1, 1]),
        (echo_multi_discrete, np.array([[0, 4], [1, 0]]), [[10, 24], [11, 20]]),
        (echo_box, np.float32([[-5, -5], [1, 9]]), [[-1, -5], [1, 9]]),
        # The policy has a choice of two for each bit.
        (
            echo_multi_binary,
            np.array([[0, 1, 1, 0], [1, 1, 0, 1]]),
            [[[0, 1], [1, 0]], [[1, 1], [0, 1]]],
        ),
    ],
)
def test_actions(monkeypatch, make, actions, received):
    shape = np.shape(received)[1:]
    declare(monkeypatch, echo=ExtraField(shape, np.float32, of="step"))
    envs, resumed = (Environment(env_flags(here(make), sync=True), 2) for _ in "ab")
    first = envs.initial()["last_action"]
    assert first.shape == actions.shape
    assert first.dtype == actions.dtype
    row = envs.step(actions)
    np.testing.assert_array_equal(row["echo"], received)
    np.testing.assert_array_equal(row["last_action"], actions)
    assert row["last_action"].dtype == actions.dtype
    assert_rows_equal(resumed.load_state_dict(envs.state_dict()), row)


class Scaled(spaces.Box):
    """A subclass that can't be pickled."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.scale = lambda x: 2 * x


class OfScaled(Echo):
    observation_space = spaces.Dict({"a": Scaled(0, 1, (2,), np.float64)})

    def __init__(self):
        super().__init__(Scaled(-1, 1, (2,)))


def test_a_space_that_can_not_be_pickled():
    with pytest.raises(Exception, match=r"(?i)pickle"):
        pickle.dumps(OfScaled.observation_space)
    context = multiprocessing.get_context("spawn")
    spec = find_env_spec(env_flags(here(OfScaled)), context, 60)
    assert spec.observation_space == OfScaled.observation_space
    assert spec.action_space == spaces.Box(-1, 1, (2,))


def test_wrong_actions():
    envs = Environment(env_flags(here(echo_discrete)), 2)
    envs.initial()
    with pytest.raises(ValueError, match=r"must be int64 \[2\] .* float32 \[2\]"):
        envs.step(np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=r"must be int64 \[2\] .* int64 \[3\]"):
        envs.step(np.zeros(3, np.int64))
    with pytest.raises(ValueError, match=r"\[0, 3\] are not in 0 to Discrete\(3"):
        envs.step(np.array([0, 3]))


@pytest.mark.parametrize("of", ["step", "observation"])
@pytest.mark.parametrize("path", ["native", "python"])
def test_atari_lives_and_games(monkeypatch, path, of):
    """A game of Breakout has five training episodes; its return counts all of them."""
    declare(monkeypatch, lives=ExtraField((), np.int64, of=of))
    envs = Environment(env_flags("BreakoutNoFrameskip-v4", atari_backend=path), 2)
    assert envs.frames_per_step == 4
    assert envs.exact_resume == (path == "python")
    rng = np.random.default_rng(1)
    rows, kept = [envs.initial()], []
    while sum(row["game_over"].sum() for row in rows) < 2:
        rows.append(envs.step(rng.integers(0, 4, 2)))
        kept.append(rows[-1]["observation"].copy())
    envs.close()
    for row, observation in zip(rows[1:], kept, strict=True):
        np.testing.assert_array_equal(row["observation"], observation)
    assert (rows[0]["lives"] == (5 if of == "observation" else 0)).all()

    names = "episode_return", "episode_step", "game_return", "game_step"
    for e in range(2):
        totals, lives = np.zeros(4), 5
        for row in rows[1:]:
            totals += [row["reward"][e], 1, row["reward"][e], 1]
            assert [row[name][e] for name in names] == totals.tolist()
            lives -= int(row["done"][e])
            # At the end of a game the observation is of the next, which has 5.
            assert row["lives"][e] == (lives or 5 if of == "observation" else lives)
            assert row["game_over"][e] == (lives == 0)
            assert not row["truncated"][e]
            totals[: 4 if lives == 0 else 2 if row["done"][e] else 0] = 0
            lives = lives or 5
    assert max(row["game_return"].max() for row in rows) > 0


def test_atari_truncation_on_both_paths(monkeypatch):
    """The same first game on both paths: rows, last observations, lives."""
    declare(monkeypatch, lives=ExtraField((), np.int64, of="observation"))
    flags = env_flags("BreakoutNoFrameskip-v4", noop_max=0, max_episode_frames=300)
    python, native = (
        Environment(argparse.Namespace(**{**vars(flags), "atari_backend": path}), 2)
        for path in ("python", "native")
    )
    assert_rows_equal(native.initial(), python.initial())
    for t in range(75):
        assert python.final_observation is None
        action = np.array([1, 2 + t % 2])
        row = python.step(action)
        assert_rows_equal(native.step(action), row)
        assert row["final_lives"].any() == (t == 74)
    assert row["truncated"].all()
    assert row["game_over"].all()
    assert row["lives"].tolist() == [5, 5]
    assert row["final_lives"].min() < 5
    np.testing.assert_array_equal(native.final_observation, python.final_observation)
    assert not np.array_equal(native.final_observation, row["observation"])
    python.step(action)
    assert python.final_observation is None


@pytest.mark.parametrize("name", ["Suite-A/Task", "Suite-A/Task-v2", "Task-B-v3"])
def test_an_id_that_a_module_registers(name):
    """With a version or, as Meta-World's, without."""
    gymnasium.register(name, entry_point=Counter, order_enforce=False)
    try:
        flags = env_flags(f"{__name__}:{name}")
        assert isinstance(create_env(flags).unwrapped, Counter)
        assert first("vector_maker", flags, None, 0) is None
    finally:
        del gymnasium.registry[name]


# --- Exact resume ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "steps", "num_actions"),
    [
        (here(short_cart_pole), 33, 2),
        ("MinAtar/Breakout-v1", 120, 3),
        ("PongNoFrameskip-v4", 40, 6),
        ("BreakoutNoFrameskip-v4", 250, 4),  # past lost lives and the end of a game
        (here(Counter), 5, 2),  # saved in a truncated row
    ],
)
def test_resume_is_exact(tmp_path, env, steps, num_actions):
    if env.startswith("MinAtar"):
        pytest.importorskip("minatar")
    flags = env_flags(env, sync=True, sticky_actions=0.25)
    rng = np.random.default_rng(0)
    actions = rng.integers(0, num_actions, (steps + 200, 2))
    envs = Environment(flags, 2, first_index=4)
    row = envs.initial()
    for action in actions[:steps]:
        row = envs.step(action)
    torch.save(envs.state_dict(), tmp_path / "state")

    resumed = Environment(flags, 2, first_index=4)
    state = torch.load(tmp_path / "state", weights_only=True)
    assert_rows_equal(resumed.load_state_dict(state), row)
    assert_rows_equal(
        {"final": resumed.final_observation}, {"final": envs.final_observation}
    )
    for action in actions[steps:]:
        assert_rows_equal(resumed.step(action), envs.step(action))
    envs.close()
    resumed.close()


class Unseeded(Echo):
    """Draws its observations from a generator that ignores the seed."""

    generator = np.random.default_rng(0)

    def __init__(self):
        super().__init__(spaces.Discrete(2))

    def reset(self, *, seed=None, options=None):
        return self.generator.random((), np.float32), {}


def test_resume_warns_if_not_deterministic(caplog):
    flags = env_flags(here(Unseeded), sync=True)
    envs = Environment(flags, 1)
    envs.initial()
    state = envs.state_dict()
    with caplog.at_level(logging.WARNING):
        Environment(flags, 1).load_state_dict(state)
    assert "not deterministic" in caplog.text


def stacked_squares():
    """Frames of bytes; Gymnasium's own wrapper stacks them, others follow."""
    env = gymnasium.wrappers.FrameStackObservation(Squares(), 3)
    return gymnasium.wrappers.TimeLimit(env, 5)


class Squares(Counter):
    observation_space = spaces.Box(0, 255, (8, 9), np.uint8)

    def observe(self):
        return np.full((8, 9), self.count, np.uint8)


@pytest.mark.parametrize(
    ("env", "changes", "is_stack"),
    [
        ("PongNoFrameskip-v4", {"atari_backend": "native"}, True),
        ("PongNoFrameskip-v4", {"atari_backend": "python"}, True),
        (here(stacked_squares), {}, True),
        (here(Squares), {}, False),
        (
            here(Squares),
            {"wrapper": 'gymnasium.wrappers:FrameStackObservation{"stack_size": 4}'},
            True,
        ),
    ],
)
def test_who_declares_stacks_of_frames(env, changes, is_stack):
    """The replay stores each frame of them once."""
    env = Environment(env_flags(env, **changes), 2)
    assert isinstance(env.observation_space, FrameStack) == is_stack
    assert env.initial()["observation"].shape[1:] == env.observation_space.shape
    env.close()
    space = pickle.loads(pickle.dumps(env.observation_space))
    assert observation_spec(space).is_stack == is_stack
