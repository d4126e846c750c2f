"""Checks of what environments return: errors name the field, warnings are counted."""

import re
import sys
import types
from types import SimpleNamespace

import gymnasium
import misbehaving
import numpy as np
import pytest
import runs
from gymnasium import spaces
from small_envs import env_flags

from torchbeast.base.errors import MissingPackageError, UserError
from torchbeast.envs.checks import CHECK_EVERY, FIRST_CALLS, InvalidEnvironmentError
from torchbeast.envs.environment import Environment
from torchbeast.envs.make_env import create_env


def make(name, num_envs=2, **changes):
    """Returns an Environment, and its warnings {key: message}."""
    envs = Environment(env_flags(name, **changes), num_envs)
    warnings = {}

    def note(key, message):
        assert key not in warnings, "named twice"
        warnings[key] = message

    envs.on_warning = note
    return envs, warnings


def play(envs, steps):
    """Returns the rows of initial() and of some steps."""
    rows = [envs.initial()]
    rows += [envs.step(np.zeros(envs.num_envs, np.int64)) for _ in range(steps)]
    return rows


def test_no_warning_for_a_correct_environment():
    envs, warnings = make("misbehaving:Fine")
    rows = play(envs, 300)
    assert warnings == {}
    assert not any(row["env_warnings"].any() for row in rows)


@pytest.mark.parametrize("name", ["CartPole-v1", "Acrobot-v1", "MinAtar/Breakout-v1"])
def test_no_warning_for_known_environments(name):
    if name.startswith("MinAtar"):
        pytest.importorskip("minatar")
    envs, warnings = make(name)
    play(envs, 300)
    assert warnings == {}


@pytest.mark.parametrize("path", ["native", "python"])
def test_no_warning_for_atari(path):
    envs, warnings = make("BreakoutNoFrameskip-v4", atari_backend=path)
    rows = play(envs, 200)
    assert warnings == {}
    assert not any(row["env_warnings"].any() for row in rows)


# --- Errors at the first reset and step -----------------------------------------------

AT_RESET = {
    "WrongShape": r"uint8 \[8, 9, 3\] as observation\['image'\], but Box.*\(8, 9, 2\)",
    "WrongDtype": r"float64 \[8, 9, 2\] as observation\['image'\], but Box.*uint8\) is",
    "TooLarge": r"uint16 \[8, 9, 2\] as observation\['image'\], .* Among them is 300",
    "WrongKeys": r"a dict of \['picture', 'vector'\] as observation, but Dict\('image'",
    "NoDict": r"float64 \[3\] as observation, but Dict\(.* is declared",
    "TooFewNumbers": r"a tuple of 1 values as observation\['numbers'\], but Tuple\(Dis",
    "NoSuchNumber": r"3 as observation\['numbers'\]\[0\], but Discrete\(4, start=-1\)",
    "Ragged": r"a list of 2 values as observation, but Box.* NumPy can't read it",
    "Many": r"float32 \[4, 3\] as observation, but Box.*\(3,\), float32\) is declared",
    "ThreeFromReset": r"a tuple of 3 values as observation.* must return two values",
    "NoOptions": r"reset\(\) does not follow .* unexpected keyword argument 'options'",
}
AT_STEP = {
    "WrongInStep": r"step\(\) returned float64 \[3\] as observation, but Dict\(",
    "RewardInAList": r"float64 \[1\] as reward; it must be one number \(a --wrapper",
    "RewardNone": r"None as reward; it must be one number",
    "TerminatedInAList": r"a list of 1 values as terminated; it must be one bool",
    "ThreeValues": r"a tuple of 3 values. step\(action\) must return five values",
    "SixValues": r"a tuple of 6 values. step\(action\) must return five values",
    "FourValues": r"a tuple of 4 values. step\(action\) must return five values",
    "InfoIsNone": r"step\(\) returned None as info; it must be a dict",
}


@pytest.mark.parametrize("name", AT_RESET)
def test_first_reset(name):
    envs, _ = make(f"misbehaving:{name}")
    with pytest.raises(InvalidEnvironmentError, match=AT_RESET[name]) as error:
        envs.initial()
    assert str(error.value).startswith(f"--env misbehaving:{name}: reset() ")


@pytest.mark.parametrize("name", AT_STEP)
def test_first_step(name):
    envs, _ = make(f"misbehaving:{name}")
    envs.initial()
    with pytest.raises(InvalidEnvironmentError, match=AT_STEP[name]) as error:
        envs.step(np.zeros(2, np.int64))
    assert str(error.value).startswith(f"--env misbehaving:{name}: step() ")


@pytest.mark.parametrize(
    ("entry_point", "match"),
    [
        (
            misbehaving.FourValues,
            r"step\(\) does not follow .*expected 5, got 4.*old Gy",
        ),
        (misbehaving.NoOptions, r"reset\(\) does not follow .*argument 'options'"),
        (misbehaving.RewardInAList, r"float64 \[1\] as reward"),
        (
            misbehaving.NeedsArguments,
            r"can't be made: .*missing .*'size'.* --env_kwargs",
        ),
    ],
)
def test_registered_environments(entry_point, match):
    """Gymnasium's own wrappers fail first, but their errors name no environment."""
    gymnasium.register("Misbehaving-v0", entry_point=entry_point, max_episode_steps=9)
    try:
        with pytest.raises(InvalidEnvironmentError, match=f"--env Misb.*{match}"):
            play(make("Misbehaving-v0")[0], 1)
    finally:
        del gymnasium.registry["Misbehaving-v0"]


class Beyond(misbehaving.Fine):
    """It returns a category that its space lacks, once."""

    observation_space = spaces.Dict(
        a=spaces.Discrete(5, start=2), b=spaces.MultiDiscrete([3, 4])
    )
    steps = 0

    def reset(self, *, seed=None, options=None):
        return {"a": 2, "b": np.array([0, 0])}, {}

    def step(self, action):
        type(self).steps += 1
        part = {12: {"a": 7}, 14: {"b": np.array([0, 4])}}.get(self.steps, {})
        return {**self.reset()[0], **part}, 0.0, False, False, {}


def test_each_category_is_looked_at():
    """Not only a sample of the steps: networks can't read it."""
    envs, _ = make(f"{__name__}:Beyond")
    for match in (r"returned 7 as observation\['a'\]", r"\[0, 4\] as obs.*\['b'\]"):
        envs.initial()
        with pytest.raises(InvalidEnvironmentError, match=match):
            play(envs, 16)


OWN_ENVIRONMENT = """
import misbehaving

class Mine(misbehaving.Fine):
    def step(self, action):
        return len(None)
"""


def test_an_error_of_an_environment_beside_ours_is_its_own(monkeypatch):
    """A fork may put its environments into torchbeast/envs."""
    module = types.ModuleType("torchbeast.envs.mine")
    exec(OWN_ENVIRONMENT, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    envs, _ = make("torchbeast.envs.mine:Mine")
    envs.initial()
    with pytest.raises(TypeError, match="has no len") as error:
        envs.step(np.zeros(2, np.int64))
    assert not isinstance(error.value, InvalidEnvironmentError)


class FailsOnce(misbehaving.Fine):
    made = 0

    def reset(self, *, seed=None, options=None):
        type(self).made += 1
        if self.made == 1:
            raise ConnectionError("the simulator is not up yet")
        self.seen = seed
        return super().reset(seed=seed)


def test_a_first_reset_that_fails_costs_no_seeds():
    env = create_env(env_flags(f"{__name__}:FailsOnce"))
    env.reset(seed=37)
    assert env.unwrapped.seen == 37


def test_a_wrapper_that_returns_no_environment():
    flags = env_flags("misbehaving:Fine", wrapper=f"{__name__}:made_of")
    with pytest.raises(InvalidEnvironmentError, match=r"made_of.* not a gym"):
        create_env(flags)


def made_of(env):
    return SimpleNamespace(
        **{name: getattr(env, name) for name in ("observation_space", "action_space")},
        reset=env.reset,
        step=env.step,
        close=env.close,
        render_mode=None,
    )


class RaisesInStep(misbehaving.Fine):
    def step(self, action):
        raise ValueError("not enough values to unpack (expected 5, got 4)")


def test_an_environments_own_errors_stay_as_they_are():
    envs, _ = make(f"{__name__}:RaisesInStep")
    envs.initial()
    with pytest.raises(ValueError, match=r"^not enough values") as error:
        envs.step(np.zeros(2, np.int64))
    assert type(error.value) is ValueError


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("NeedsArguments", r"missing .*'size'.* --env_kwargs passes"),
        ("several", r"CartPoleVectorEnv, which is a vector env.*--envs_per_actor"),
        ("nothing", r"made None, which is no environment: its observation_space is N"),
        ("NoSpaces", r"its observation_space is None, its action_space is None\."),
        ("AN_OBJECT", r"can't be made .*is not a callable"),
    ],
)
def test_what_makes_no_environment(name, match):
    with pytest.raises(UserError, match=f"^--env misb.*{match}"):
        create_env(env_flags(f"misbehaving:{name}"))


def test_video_of_a_class_without_render_mode():
    with pytest.raises(InvalidEnvironmentError, match="its render_mode is None"):
        create_env(env_flags("misbehaving:Fine"), render_mode="rgb_array")
    gymnasium.register("Misbehaving-v0", entry_point=misbehaving.Fine)
    try:
        with pytest.raises(
            InvalidEnvironmentError, match=r"can't be made: .*'render_mode'"
        ):
            create_env(env_flags("Misbehaving-v0"), render_mode="rgb_array")
    finally:
        del gymnasium.registry["Misbehaving-v0"]


@pytest.mark.parametrize("name", ["pixel_game:Game", "pixel_game:Game-v0"])
def test_the_missing_module_is_named(name, tmp_path, monkeypatch):
    """The module named in --env exists; it imports one that does not."""
    (tmp_path / "pixel_game.py").write_text("import pixel_game_engine.sprites\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackageError, match=f"--env {name}") as error:
        create_env(env_flags(name))
    assert "No module named 'pixel_game_engine'" in str(error.value)
    (tmp_path / "pixel_game.py").write_text("raise ImportError('libGL.so.1: no file')")
    with pytest.raises(ImportError, match="libGL"):
        create_env(env_flags(name))


# --- Warnings -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "FarOut",
            [
                r"observation\['numbers'\]\[1\] holds -2.0, far .* 0.0 to inf",
                r"observation\['vector'\] holds -187.5 at \[1\], far .* -1.0 to 1.0",
            ],
        ),
        ("NotFinite", [r"observation\['vector'\] holds nan at \[2\], .* not finite"]),
        ("Integers", [r"observation\['vector'\] holds integers .* declares float32"]),
        ("TerminatedNone", [r"step\(\) returned terminated=None, read as False"]),
        ("InfiniteReward", [r"step\(\) returned the reward inf"]),
    ],
)
def test_suspect_values(name, expected):
    envs, warnings = make(f"misbehaving:{name}")
    rows = play(envs, 30)
    assert len(warnings) == len(expected)
    for message, match in zip(sorted(warnings.values()), expected, strict=True):
        assert re.search(match, message), message
        assert message.startswith(f"--env misbehaving:{name}: ")
    counts = np.array([row["env_warnings"] for row in rows])
    assert (counts.sum(0) >= 3).all()
    assert (counts[:, 0] == counts[:, 1]).all()


def test_every_infinite_reward_is_counted():
    envs, _ = make("misbehaving:InfiniteReward")
    rows = play(envs, 200)
    for row in rows:
        assert (row["env_warnings"] == np.isinf(row["reward"])).all()
    assert sum(row["env_warnings"].sum() for row in rows) == 2 * (200 // 9)


def test_later_calls_are_checked_at_a_low_rate():
    envs, warnings = make("misbehaving:LateFarOut")
    counts = np.array([row["env_warnings"] for row in play(envs, 5 * CHECK_EVERY)])
    assert len(warnings) == 1
    assert not counts[:130].any()
    # With an episode's end, a step takes two calls.
    assert counts.sum(0).tolist() == [5, 5]
    assert FIRST_CALLS < 130


# --- Both variants --------------------------------------------------------------------

VARIANTS = ["torchbeast.monobeast", "torchbeast.polybeast"]


def flags_of(variant, tmp_path):
    flags = {**runs.SMALL, "module": variant, "num_actors": 2, "total_steps": 300}
    if variant == "torchbeast.polybeast":
        pytest.importorskip("libtorchbeast", exc_type=ImportError)
        flags |= {"pipes_basename": f"unix:{tmp_path}/pipe", "batch_size": 6}
    return flags


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_wrong_environment_ends_the_run_with_one_message(tmp_path, variant):
    flags = flags_of(variant, tmp_path) | {"env": "misbehaving:RewardInAList"}
    output = runs.run(tmp_path, "a", **flags, status=1)
    assert "--env misbehaving:RewardInAList: step() returned float64 [1] as" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("variant", VARIANTS)
def test_suspect_values_are_named_once_and_counted(tmp_path, variant):
    flags = flags_of(variant, tmp_path) | {
        "env": "misbehaving:Suspect",
        "reward_clipping": "abs_one",
        "num_servers": 1 if variant == "torchbeast.polybeast" else None,
    }
    output = runs.run(tmp_path, "a", **flags)
    for what in (
        "observation['vector'] holds -187.5 at [1], far outside its bounds",
        "observation['numbers'][1] holds -2.0, far outside its bounds",
        "observation['vector'] holds integers",
        "step() returned terminated=None",
        "step() returned the reward inf",
    ):
        assert output.count(what) == 1, what
    counts = [float(row["env_warnings"]) for row in runs.read_logs(tmp_path, "a")]
    assert sum(counts) > 30
