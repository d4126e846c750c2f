"""Environments that can not be made, or that return what their space lacks."""

import os
import pathlib
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import runs
import torch
from gymnasium import spaces
from small_envs import Counter, env_flags, here

from torchbeast.base.errors import FileError, FlagError, MissingPackageError
from torchbeast.envs.environment import Environment
from torchbeast.envs.make_env import create_env
from torchbeast.envs.seeded_games import check_same_spaces
from torchbeast.envs.values import InvalidEnvironmentError, plain_space, read
from torchbeast.local.env_spec import spec_of

# --- What can't be made ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "match"),
    [
        ("PongNoFrameskp-v4", "PongNoFrameskp"),
        ("Zzyzx/Qqq-v0", "Namespace Zzyzx not found.* Allowed are"),
        (f"{__name__}:Countr", "has no attribute 'Countr'"),
        (f"{__name__}:", "needs the full module name"),
        (".tests:Counter", "needs the full module name"),
        ("Hopper-v3", "gymnasium-robotics"),  # raises ImportError
    ],
)
def test_unknown_name(env, match):
    with pytest.raises(FlagError, match=f"--env {env}: .*{match}"):
        create_env(env_flags(env))


def test_the_missing_module_is_named(tmp_path, monkeypatch):
    (tmp_path / "pixel_game.py").write_text("import pixel_game_engine.sprites\n")
    monkeypatch.syspath_prepend(tmp_path)
    match = "--env pixel_game:Game: .*pixel_game_engine"
    with pytest.raises(MissingPackageError, match=match):
        create_env(env_flags("pixel_game:Game"))


def test_a_module_with_an_error_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "pixel_game.py").write_text("raise ValueError('no pixels')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"^no pixels$"):
        create_env(env_flags("pixel_game:Game"))


def several():
    return gymnasium.make_vec("CartPole-v1", num_envs=3)


def needs(env):
    import no_package_of_this_name

    return no_package_of_this_name.wrap(env)


def lacks(env):
    raise gymnasium.error.DependencyNotInstalled("moviepy is not installed")


def fails(env):
    raise TypeError("my own")


RECORD = "gymnasium.wrappers:RecordVideo"


def test_what_is_no_environment():
    with pytest.raises(InvalidEnvironmentError, match=r"not a gymnasium.Env with"):
        create_env(env_flags(here(several)))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"env_kwargs": '{"length": 1}'}, FlagError, "--env .*'length'"),
        ({"env": "CartPole-v1", "env_kwargs": '{"x": 1}'}, FlagError, "--env .*'x'"),
        ({"wrapper": here(Counter)}, FlagError, "--wrapper .*too many positional"),
        ({"wrapper": f"{__name__}:needs"}, MissingPackageError, "--wrapper .*no_pack"),
        ({"wrapper": f"{__name__}:lacks"}, MissingPackageError, "--wrapper .*moviepy"),
        ({"wrapper": f"{__name__}:fails"}, TypeError, "^my own$"),
        ({"wrapper": f"{RECORD}{{}}"}, FlagError, "--wrapper .*'video_folder'"),
        ({"wrapper": f'{RECORD}{{"video_folder": "v"}}'}, FileError, "Render mode is"),
        ({"wrapper": "no_such_module:f"}, MissingPackageError, "--wrapper no_such_mod"),
        ({"wrapper": f"{__name__}:Countr"}, FlagError, "--wrapper .*Countr"),
        ({"wrapper": "builtins:id"}, InvalidEnvironmentError, "not a gymnasium.Env"),
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


def test_video_of_a_class_without_render_mode():
    with pytest.raises(InvalidEnvironmentError, match="no parameter render_mode"):
        create_env(env_flags(here(Counter)), render_mode="rgb_array")


# --- Spaces ---------------------------------------------------------------------------

BOX = spaces.Box(0, 1, (2,))


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Box(0, 1, (2,), np.longdouble), "not supported"),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), "MultiDiscrete of one dimension"),
        (spaces.Discrete(10**9), "at most 262144 options"),
        (spaces.MultiDiscrete([2, 10**9]), "at most 262144 options"),
        (spaces.Dict(a=BOX, b=spaces.Tuple([spaces.Text(5)])), r"space Text\("),
        (spaces.Dict({0: BOX}), "Dict by names"),
        (spaces.Dict(), "Dict by names"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_an_observation_space_that_can_not_be_stored(space, words):
    with pytest.raises(InvalidEnvironmentError, match=words):
        plain_space(space)


def test_a_tensor_with_a_gradient_is_an_observation():
    assert read(BOX, torch.ones(2, requires_grad=True)).tolist() == [1, 1]


class Wider(Counter):
    """Once there is a first instance, others have wider bounds."""

    def __init__(self):
        super().__init__()
        made = pathlib.Path(os.environ["MADE"])
        bound = 2.0 if made.exists() else 1.0
        made.touch()
        self.action_space = spaces.Box(-bound, bound, (1,))


@pytest.mark.parametrize("module", ["torchbeast.monobeast", "torchbeast.polybeast"])
def test_actors_with_other_spaces(module, tmp_path, monkeypatch):
    """Their actions would be scaled by other bounds than the learner's."""
    monkeypatch.setenv("MADE", str(tmp_path / "made"))
    flags = {**runs.SMALL, "env": f"{__name__}:Wider", "num_actors": 1}
    flags["module"] = module
    output = runs.run(tmp_path, "a", **flags, status=1)
    assert "all instances need the same spaces, but one has the action_s" in output
    assert "Traceback" not in output


def test_instances_of_one_actor_with_other_spaces(tmp_path, monkeypatch):
    monkeypatch.setenv("MADE", str(tmp_path / "made"))
    with pytest.raises(InvalidEnvironmentError, match=r"action_space=Box\(-2.*Box\(-1"):
        Environment(env_flags(here(Wider)), 2)


class Int32(Counter):
    action_space = spaces.Discrete(3, dtype=np.int32)


def test_what_a_plain_space_drops_is_no_difference():
    env = Environment(env_flags(here(Int32)), 2)
    check_same_spaces("x", spec_of(env), env)


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

    def result(self):
        values = {
            "vector": np.zeros(3),  # float64 may become float32
            "image": np.full((8, 9, 2), 200, np.uint16),  # and this may become uint8
            "numbers": (np.int64(-1), 7.0),
            "unknown": "is left out",
        }
        values |= self.VALUES if self.steps >= self.CALL else {}
        reward = values.pop("reward", 0.5)
        return values.pop("whole", values), reward, False, False, {}

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.result()[0], {}

    def step(self, action):
        self.steps += 1
        return self.result()


def play(monkeypatch, call, **values):
    monkeypatch.setattr(Returns, "VALUES", values)
    monkeypatch.setattr(Returns, "CALL", call)
    env = Environment(env_flags(here(Returns)), 2)
    row = env.initial()
    for _ in range(3):
        row = env.step(np.zeros(2, np.int64))
    return row


@pytest.mark.parametrize("call", [0, 2])
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"image": np.zeros((8, 9, 3), np.uint8)}, r"uint8 \[8, 9, 3\] as .*uint8\)"),
        ({"image": np.full((8, 9, 2), 300, np.uint16)}, r"uint16 \[8, 9, 2\].*uint8\)"),
        ({"image": np.full((8, 9, 2), 0.5)}, r"float64 \[8, 9, 2\].*uint8\)"),
        ({"vector": None}, r"None of type NoneType as .*Box\("),
        ({"numbers": (0,)}, r"\(0,\) of type tuple as .*Tuple\("),
        ({"numbers": (0, "x")}, r"'x' of type str as .*Box\("),
        ({"whole": {"image": 0}}, r"\{'image': 0\} .*Dict\("),
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


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf, None, np.zeros(1)])
def test_a_reward_that_can_not_be_used(monkeypatch, reward):
    words = r"Returns: .*the rewards \[.*\]|reward array.*must be a number"
    with pytest.raises(InvalidEnvironmentError, match=words):
        play(monkeypatch, 1, reward=reward)
