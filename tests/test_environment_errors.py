"""Environments that can not be made, or that fail."""

from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from small_envs import Counter, Echo, env_flags, here

from torchbeast.base.errors import FlagError, MissingPackageError
from torchbeast.envs.checks import InvalidEnvironmentError, UnsupportedSpaceError
from torchbeast.envs.environment import Environment
from torchbeast.envs.make_env import create_env
from torchbeast.envs.space_checks import check_action_space, check_observation_space
from torchbeast.extras import video

# --- Errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "match"),
    [
        ("PongNoFrameskp-v4", "Did you mean: .PongNoFrameskip"),
        ("CartPoll-v1", "Did you mean: .CartPole"),
        ("cartpole-v7", "Did you mean: .CartPole"),
        ("ALE/Pongg-v5", "in namespace ALE. Did you mean: .Pong"),
        ("MinAtar/Brekout-v1", "in namespace MinAtar. Did you mean: .Breakout"),
        ("Zzyzx/Qqq-v0", "Namespace Zzyzx not found.* Allowed are.* a function does"),
        (f"{__name__}:Countr", "no attribute 'Countr'"),
        (":Counter", "needs the full module name"),
        (".tests:Counter", "needs the full module name"),
    ],
)
def test_unknown_name(env, match):
    if env.startswith("MinAtar"):
        pytest.importorskip("minatar")
    with pytest.raises(FlagError, match=match):
        create_env(env_flags(env))


def test_deprecated_version_names_the_new_one():
    gymnasium.register("OutOfDate-v2", entry_point=Counter)
    with pytest.raises(FlagError, match=r"v1.* Please use .OutOfDate-v2"):
        create_env(env_flags("OutOfDate-v1"))


def test_environment_has_moved_to_another_package():
    """Gymnasium's old MuJoCo environments raise ImportError with the new package."""
    with pytest.raises(MissingPackageError, match=r"Hopper-v3: .* gymnasium-robotics"):
        create_env(env_flags("Hopper-v3"))


class NoOpenGL(Counter):
    """Raises like MuJoCo on a machine without a display."""

    metadata: ClassVar = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        raise OSError("no OpenGL platform library")


def test_a_picture_that_can_not_be_drawn():
    env = Environment(env_flags(here(NoOpenGL)), 2, render_mode="rgb_array")
    env.initial()
    with pytest.raises(RuntimeError, match=r"NoOpenGL .*MUJOCO_GL=egl") as error:
        env.render()
    assert isinstance(error.value.__cause__, OSError)


class NoPicture(NoOpenGL):
    returned: ClassVar = [None]

    def render(self):
        return self.returned[0]


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (None, "returns None"),
        ("text", "returns 'text'"),
        (np.zeros((4, 5), np.uint8), r"returns uint8 \[4, 5\]"),
        (np.zeros((4, 0, 3)), r"returns float64 \[4, 0, 3\]"),
        ([np.zeros((4, 5, 3)), np.zeros((4, 6, 3))], "returns a list of 2 values"),
    ],
)
def test_what_is_no_picture(returned, what):
    env = Environment(env_flags(here(NoPicture)), 1, render_mode="rgb_array")
    env.initial()
    NoPicture.returned[0] = returned
    with pytest.raises(FlagError, match=rf"--video: render\(\) of .*{what}"):
        video.picture(env.render(), env.flags.env)
    NoPicture.returned[0] = np.zeros((4, 5, 3), np.uint8)
    assert video.picture(env.render(), "env").shape == (4, 5, 3)


@pytest.mark.parametrize("env", ["missing_package.envs:Env", "missing_package:Env-v0"])
def test_missing_package(env):
    with pytest.raises(ImportError, match="No module named 'missing_package"):
        create_env(env_flags(env))


def bad_observation():
    env = Counter()
    inner = spaces.Tuple((spaces.Discrete(2), spaces.Text(5)))
    env.observation_space = spaces.Dict({"a": spaces.Discrete(2), "b": inner})
    return env


def bad_action():
    return Echo(spaces.Dict({"move": spaces.Discrete(3)}))


def no_choice():
    return Echo(spaces.MultiDiscrete(np.zeros(0, np.int64)))


def no_dimension():
    return Echo(spaces.Box(-1, 1, (0,)))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            bad_observation,
            r"observation\['b'\]\[1\] .*Text.*allowed are Box, .*environments.md",
        ),
        (bad_action, r"action .*Dict.*allowed are Discrete, MultiDiscrete"),
        (no_choice, r"action .*MultiDiscrete\(\[\]\).*none of them empty"),
        (no_dimension, r"action .*Box.*none of them empty"),
    ],
)
def test_unsupported_space(make, match):
    with pytest.raises(UnsupportedSpaceError, match=match):
        Environment(env_flags(here(make)), 1)


def nested(depth):
    space = spaces.Discrete(2)
    for _ in range(depth):
        space = spaces.Tuple((space,))
    return space


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Box(0, 1, (2,), np.longdouble), "its dtype is"),
        (spaces.Box(0, 1, (2,), ">f4"), "its dtype is >f4; allowed are bool, integers"),
        (spaces.Box(0, 1, (0, 8, 8)), "has no element"),
        (spaces.Dict({}), "has no element"),
        (spaces.Tuple((spaces.Tuple(()), spaces.Box(0, 1, (0,)))), "has no element"),
        (spaces.Dict({0: spaces.Discrete(2)}), "the key 0; keys must be str"),
        (spaces.Dict({(1, "a"): spaces.Discrete(2)}), "keys must be str"),
        (spaces.Dict({"\ud800": spaces.Discrete(2)}), "UTF-8"),
        (spaces.Dict({"k" * 1025: spaces.Discrete(2)}), "at most 1024 bytes"),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), "needs one dimension"),
        (spaces.Discrete(10**6), r"Discrete\(1000000\) has 1,000,000 choices"),
        (spaces.MultiDiscrete([2**17] * 3), "choices"),
        (spaces.Discrete(5, start=2**60), "start is too large"),
        (spaces.Discrete(2**60), r"has 1,152,921,504,606,846,976 choices"),
        (spaces.Box(0, 1, (2**20 + 1,)), "1,048,577 elements; at most 1,048,576"),
        (spaces.Box(0, 1, (1,) * 7), "at most 6 dimensions"),
        (nested(16), "nested too deeply"),
        (spaces.Tuple([spaces.Discrete(2)] * 1025), "1,025 parts"),
        (spaces.Tuple((spaces.Sequence(spaces.Discrete(2)),)), "allowed are Box"),
    ],
    ids=lambda x: str(x)[:40].encode("ascii", "replace").decode(),
)
def test_an_observation_space_that_can_not_be_stored_or_sent(space, words):
    with pytest.raises(UnsupportedSpaceError, match=words):
        check_observation_space(space)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Box(0, 1, (2,), np.longdouble), "its dtype is"),
        (spaces.Box(0, 1, (2,), ">f8"), "its dtype is >f8"),
        (spaces.Box(0, 9, (2,), np.int32), "allowed are Discrete"),
        (spaces.MultiDiscrete([[2, 3]]), "needs one dimension"),
        (spaces.Discrete(10**6), "1,000,000 numbers, at most 65,536"),
        (spaces.Tuple((spaces.Discrete(2),)), "allowed are Discrete.*Several agents"),
    ],
)
def test_an_action_space_without_a_policy(space, words):
    with pytest.raises(UnsupportedSpaceError, match=words):
        check_action_space(space)


class Parallel:
    """PettingZoo's parallel API."""

    possible_agents: ClassVar = ["a", "b"]

    def observation_space(self, agent):
        return spaces.Discrete(2)

    action_space = observation_space

    def reset(self, seed=None, options=None):
        return {}, {}

    def step(self, actions):
        return {}, {}, {}, {}, {}


class InTurn(Parallel):
    """PettingZoo's AEC API."""

    def agent_iter(self):
        yield "a"


class DeepMind:
    def observation_spec(self):
        return {}

    action_spec = reset = step = observation_spec


class Gymnax:
    """As gymnax has it: all state is an argument."""

    default_params = None

    def observation_space(self, params):
        return spaces.Discrete(2)

    action_space = observation_space

    def reset(self, key, params=None):
        return 0, None

    def step(self, key, state, action, params=None):
        return 0, state, 0.0, False, {}


class Brax:
    """As brax has it."""

    observation_size = action_size = 3

    def reset(self, rng):
        return None

    def step(self, state, action):
        return state


class NoSpace(Counter):
    observation_space = (3,)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Parallel, "PettingZoo environment of the parallel API.*one agent.*derived"),
        (InTurn, "PettingZoo environment of the AEC API"),
        (DeepMind, "environment of the dm_env API.*BSuiteCompat"),
        (Gymnax, "environment of gymnax.*GymnaxToGymWrapper"),
        (Brax, "environment of brax.*GymWrapper"),
        (NoSpace, "its observation_space is a tuple of 1 values"),
    ],
)
def test_environments_of_other_interfaces_are_named(make, words):
    with pytest.raises(InvalidEnvironmentError, match=words):
        Environment(env_flags(here(make)), 1)


class Late(Counter):
    """After many calls it returns something else."""

    observation_space = spaces.Box(0, 1, (2,))

    def __init__(self, fault):
        super().__init__()
        self.fault, self.calls = fault, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        import torch

        self.calls += 1
        observation, reward = np.zeros(2, np.float32), 1.0
        if self.calls > 30:
            observation = {
                "shape": np.zeros(3, np.float32),
                "dtype": np.zeros(2, np.complex64),
                "None": None,
                "gradient": torch.zeros(2, requires_grad=True),
            }.get(self.fault, observation)
            reward = [1.0, 2.0] if self.fault == "reward" else reward
        return observation, reward, False, False, {}


@pytest.mark.parametrize("fault", ["shape", "dtype", "None", "gradient", "reward"])
def test_what_changes_late_is_named(fault):
    flags = env_flags(here(Late), env_kwargs=f'{{"fault": "{fault}"}}')
    env = Environment(flags, 2)
    env.initial()
    for _ in range(30):
        env.step(np.zeros(2, np.int64))
    with pytest.raises(InvalidEnvironmentError, match=r"Late: step\(\) returned"):
        env.step(np.zeros(2, np.int64))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"env_kwargs": '{"length": 1}'}, FlagError, r"'length'"),
        ({"env": "CartPole-v1", "env_kwargs": '{"size": 1}'}, None, r"'size'"),
        ({"wrapper": "no_such_module:f"}, MissingPackageError, "--wrapper no_such_mod"),
        ({"wrapper": f"{__name__}:Countr"}, None, "--wrapper .* 'Countr'"),
        (
            {"wrapper": "math:pi"},
            FlagError,
            "--wrapper math:pi .* is not a callable",
        ),
        ({"wrapper": "math"}, FlagError, "full module name"),
        ({"wrapper": "builtins:id"}, InvalidEnvironmentError, "--wrapper builtins:id"),
        (
            {"env": "Pong-v4", "atari_backend": "native", "env_kwargs": '{"mode": 1}'},
            FlagError,
            "--atari_backend python",
        ),
    ],
)
def test_arguments_and_wrappers_that_can_not_work(changes, error, match):
    flags = env_flags(**{"env": here(Counter), **changes})
    with pytest.raises(error or ValueError, match=match):
        Environment(flags, 1)
