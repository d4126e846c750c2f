"""Environments that can not be made, or that return what their space lacks."""

import os
import pathlib
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import runs
from gymnasium import spaces
from small_envs import Counter, Echo, env_flags, here

from torchbeast.base.errors import FlagError, MissingPackageError
from torchbeast.envs.environment import Environment
from torchbeast.envs.make_env import create_env
from torchbeast.envs.seeded_games import check_same_spaces
from torchbeast.envs.values import InvalidEnvironmentError, check_spaces
from torchbeast.local.env_spec import spec_of

# --- What can't be made ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "match"),
    [
        ("PongNoFrameskp-v4", "PongNoFrameskp"),
        ("cartpole-v7", "cartpole"),
        ("Zzyzx/Qqq-v0", "Namespace Zzyzx not found.* Allowed are"),
        (f"{__name__}:Countr", "has no attribute 'Countr'"),
        (f"{__name__}:", "needs the full module name"),
        (":Counter", "needs the full module name"),
        (".tests:Counter", "needs the full module name"),
    ],
)
def test_unknown_name(env, match):
    with pytest.raises(FlagError, match=f"--env {env}: .*{match}"):
        create_env(env_flags(env))


@pytest.mark.parametrize("name", ["pixel_game:Game", "pixel_game:Game-v0", "Hopper-v3"])
def test_the_missing_module_is_named(name, tmp_path, monkeypatch):
    """Gymnasium's old MuJoCo environments raise ImportError with the new package."""
    (tmp_path / "pixel_game.py").write_text("import pixel_game_engine.sprites\n")
    monkeypatch.syspath_prepend(tmp_path)
    missing = "gymnasium-robotics" if name == "Hopper-v3" else "pixel_game_engine"
    with pytest.raises(MissingPackageError, match=f"--env {name}: .*{missing}"):
        create_env(env_flags(name))


def test_a_module_with_an_error_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "pixel_game.py").write_text("raise ValueError('no pixels')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"^no pixels$"):
        create_env(env_flags("pixel_game:Game"))


def several():
    return gymnasium.make_vec("CartPole-v1", num_envs=3)


class Parallel:
    """PettingZoo's parallel API, without its class."""

    possible_agents: ClassVar = ["a", "b"]

    def observation_space(self, agent):
        return spaces.Discrete(2)

    action_space = observation_space

    def reset(self, seed=None, options=None):
        return {}, {}

    step = reset


class DeepMind:
    def observation_spec(self):
        return {}

    action_spec = reset = step = observation_spec


@pytest.mark.parametrize("make", [several, Parallel, DeepMind])
def test_what_is_no_environment(make):
    with pytest.raises(
        InvalidEnvironmentError, match=r"not a gymnasium.Env with one ag"
    ):
        create_env(env_flags(here(make)))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"env_kwargs": '{"length": 1}'}, FlagError, r"'length'"),
        ({"wrapper": "no_such_module:f"}, MissingPackageError, "--wrapper no_such_mod"),
        ({"wrapper": f"{__name__}:Countr"}, FlagError, "--wrapper .*Countr"),
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
    with pytest.raises(error, match=match):
        Environment(flags, 1)


# --- Pictures -------------------------------------------------------------------------


def test_video_of_a_class_without_render_mode():
    with pytest.raises(InvalidEnvironmentError, match="its render_mode is None"):
        create_env(env_flags(here(Counter)), render_mode="rgb_array")


# --- Spaces ---------------------------------------------------------------------------

BOX = spaces.Box(0, 1, (2,))


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Box(0, 1, (2,), np.longdouble), "not supported"),
        (spaces.Box(0, 1, (2,), ">f4"), "not supported"),
        (spaces.Box(0, 1, (0, 8, 8)), "has no element"),
        (spaces.Dict({}), "has no element"),
        (spaces.Tuple((spaces.Tuple(()), spaces.Box(0, 1, (0,)))), "has no element"),
        (spaces.Dict({0: spaces.Discrete(2)}), "keys that are str"),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), "MultiDiscrete of one dimension"),
        (spaces.Discrete(10**6), r"1,000,000 choices in Discrete\(1000000\)"),
        (spaces.MultiDiscrete([2**17] * 3), "choices"),
        (spaces.Dict(a=BOX, b=spaces.Tuple([spaces.Text(5)])), r"space Text\("),
    ],
    ids=lambda x: str(x)[:40],
)
def test_an_observation_space_that_can_not_be_stored(space, words):
    with pytest.raises(InvalidEnvironmentError, match=words):
        check_spaces(space, spaces.Discrete(2))


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Box(0, 1, (2,), np.longdouble), "not supported"),
        (spaces.Box(0, 9, (2,), np.int32), "no policy"),
        (spaces.Box(-1, 1, (0,)), "no policy"),
        (spaces.MultiDiscrete([[2, 3]]), "MultiDiscrete of one dimension"),
        (spaces.MultiDiscrete(np.zeros(0, np.int64)), "no policy"),
        (spaces.Discrete(10**6), "1,000,000 choices"),
        (spaces.Tuple((spaces.Discrete(2),)), "no policy"),
        (spaces.Text(3), "no policy"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_an_action_space_without_a_policy(space, words):
    with pytest.raises(InvalidEnvironmentError, match=words):
        check_spaces(BOX, space)
    with pytest.raises(InvalidEnvironmentError, match=words):
        create_env(env_flags(f"{__name__}:wrapped", wrapper=_wrapper(space)))


SPACES = []


def _wrapper(space):
    SPACES[:] = [space]
    return f"{__name__}:with_space"


def wrapped():
    return Echo(spaces.Discrete(2))


def with_space(env):
    return Echo(SPACES[0])


class Numbered(Counter):
    """Each instance has another number of actions, as procedural games may."""

    made = 0

    def __init__(self):
        super().__init__()
        type(self).made += 1
        self.action_space = spaces.Discrete(1 + self.made)


def test_instances_with_other_spaces():
    match = r"same spaces, .* action_space Discrete\(2\), another Discrete\(3\)"
    with pytest.raises(InvalidEnvironmentError, match=match):
        Environment(env_flags(here(Numbered)), 2)


class Int32(Counter):
    action_space = spaces.Discrete(3, dtype=np.int32)


def test_what_a_plain_space_drops_is_no_difference():
    env = Environment(env_flags(here(Int32)), 2)
    check_same_spaces("x", spec_of(env), env)


class Wider(Counter):
    """Once there is a first instance, others have wider bounds."""

    def __init__(self):
        super().__init__()
        made = pathlib.Path(os.environ["MADE"])
        bound = 2.0 if made.exists() else 1.0
        made.touch()
        self.action_space = spaces.Box(-bound, bound, (1,))


def test_actors_with_other_spaces(tmp_path, monkeypatch):
    """Their actions would be scaled by other bounds than the learner's."""
    monkeypatch.setenv("MADE", str(tmp_path / "made"))
    flags = {**runs.SMALL, "env": f"{__name__}:Wider", "num_actors": 1}
    output = runs.run(tmp_path, "a", **flags, status=1)
    assert "all instances need the same spaces, but one has the action_space" in output
    assert "Traceback" not in output


# --- Values ---------------------------------------------------------------------------


class Returns(gymnasium.Env):
    """Returns VALUES from the step CALL on; 0 is reset()."""

    CALL = 0
    VALUES: ClassVar = {}
    action_space = spaces.Discrete(2)
    observation_space = spaces.Dict(
        vector=spaces.Box(-1.0, 1.0, (3,)),
        image=spaces.Box(0, 255, (8, 9, 2), np.uint8),
        numbers=spaces.Tuple((spaces.Discrete(4, start=-1), spaces.Box(0, 9, ()))),
    )

    def result(self, reward=0.5, whole=None, **parts):
        observation = {
            "vector": np.zeros(3),  # float64 may become float32
            "image": np.full((8, 9, 2), 200, np.uint16),  # and this may become uint8
            "numbers": (np.int64(-1), 7.0),
            "unknown": "is left out",
        }
        whole = whole or {**observation, **parts}
        return whole, reward, False, False, {}

    def values(self):
        return self.VALUES if self.steps >= self.CALL else {}

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.result(**self.values())[0], {}

    def step(self, action):
        self.steps += 1
        return self.result(**self.values())


def play(monkeypatch, call, **values):
    monkeypatch.setattr(Returns, "VALUES", values)
    monkeypatch.setattr(Returns, "CALL", call)
    env = Environment(env_flags(here(Returns)), 2)
    row = env.initial()
    for _ in range(3):
        row = env.step(np.zeros(2, np.int64))
    return row


def with_gradient():
    import torch

    return torch.zeros(3, requires_grad=True)


@pytest.mark.parametrize("call", [0, 2])
@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"image": np.zeros((8, 9, 3), np.uint8)},
            r"uint8 \[8, 9, 3\] as .*\['image'\]",
        ),
        ({"image": np.zeros((8, 9, 2))}, r"float64 \[8, 9, 2\] .* Box\(.*uint8"),
        ({"image": np.full((8, 9, 2), 300)}, r"300 does not fit|int64 \[8, 9, 2\]"),
        ({"image": np.full((8, 9, 2), 300, np.uint16)}, "300 does not fit"),
        ({"vector": None}, r"None of type NoneType as observation\['vector'\]"),
        ({"vector": [0.0, [1.0]]}, "a list of 2 values .*inhomogeneous"),
        ({"vector": with_gradient()}, r"of type Tensor as .*requires grad"),
        ({"numbers": (0,)}, r"a tuple of 1 values as observation\['numbers'\]"),
        ({"numbers": (0, "x")}, r"'x' of type str as observation\['numbers'\]\[1\]"),
        ({"whole": {"image": 0}}, r"a dict of \['image'\] as observation, but Dict\("),
        ({"whole": (1, 2)}, "a tuple of 2 values as observation, but Dict"),
    ],
)
def test_an_observation_that_is_not_of_its_space(monkeypatch, call, values, words):
    with pytest.raises(InvalidEnvironmentError, match=f"returned .*{words}"):
        play(monkeypatch, call, **values)


def test_what_can_be_cast_is_allowed(monkeypatch):
    observation = play(monkeypatch, 9)["observation"]
    assert observation.keys() == {"vector", "image", "numbers"}
    assert observation["vector"].dtype == np.float32
    assert observation["image"].dtype == np.uint8
    assert (observation["image"] == 200).all()
    assert observation["numbers"][1].tolist() == [7.0, 7.0]


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf, None])
def test_a_reward_that_is_not_finite(monkeypatch, reward):
    with pytest.raises(InvalidEnvironmentError, match=r"Returns: .*the rewards \[.*\]"):
        play(monkeypatch, 1, reward=reward)


class RaisesInStep(Counter):
    def step(self, action):
        raise ValueError("not enough values to unpack (expected 5, got 4)")


def test_an_environments_own_errors_stay_as_they_are():
    envs = Environment(env_flags(here(RaisesInStep)), 2)
    envs.initial()
    with pytest.raises(ValueError, match=r"^not enough values") as error:
        envs.step(np.zeros(2, np.int64))
    assert type(error.value) is ValueError


class InfiniteReward(Returns):
    observation_space = spaces.Box(0, 1, (2,))

    def result(self, **_):
        return np.zeros(2, np.float32), np.inf, False, False, {}


@pytest.mark.parametrize("variant", ["torchbeast.monobeast", "torchbeast.polybeast"])
def test_a_wrong_environment_ends_the_run_with_one_message(tmp_path, variant):
    """Rewards are clipped, so the loss would be finite."""
    flags = {**runs.SMALL, "module": variant, "num_actors": 2}
    if variant == "torchbeast.polybeast":
        pytest.importorskip("libtorchbeast", exc_type=ImportError)
        flags |= {"pipes_basename": f"unix:{tmp_path}/pipe", "batch_size": 6}
    flags |= {"env": f"{__name__}:InfiniteReward", "reward_clipping": "abs_one"}
    output = runs.run(tmp_path, "a", **flags, status=1)
    assert "InfiniteReward: step() returned the rewards [inf" in output
    assert "Traceback" not in output
