"""Making one environment: from `--env` to a Gymnasium environment.

docs/environments.md is the manual.
"""

import argparse
import difflib
import importlib
import inspect
import operator
import re
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from torchbeast.core import atari_wrappers
from torchbeast.core.env_checks import (
    InvalidEnvironmentError,
    check_interface,
    describe,
    raised_by_call,
)
from torchbeast.core.errors import UserError

_ELEMENTARY_SPACES = (
    spaces.Box,
    spaces.Discrete,
    spaces.MultiDiscrete,
    spaces.MultiBinary,
)


class UnknownEnvironmentError(UserError, ValueError):
    """No environment goes by this name."""


class MissingPackageError(UserError, ImportError):
    """A package that an environment or its server needs is missing; says which."""


class UnsupportedSpaceError(UserError, ValueError):
    """An observation or action space that buffers and policies cannot hold."""


def create_env(
    flags: argparse.Namespace, render_mode: str | None = None
) -> gymnasium.Env:
    """Make the one environment that `flags.env` names.

    It can be an Atari id ("PongNoFrameskip-v4", "ALE/Pong-v5"; the protocol comes from
    the flags, see atari_wrappers.py), any other Gymnasium id ("CartPole-v1",
    "MinAtar/Breakout-v1", "package.module:Id-v0"), or "package.module:name", a class or
    function that is called without arguments (with render_mode, if it takes one).
    Environments of the old Gym API are adapted.

    Raises:
        UnknownEnvironmentError: nothing goes by this name; lists close matches.
        MissingPackageError: a package is missing; says what to install.
        UnsupportedSpaceError: names the offending part of the space.
        InvalidEnvironmentError: what the name makes can't be used as an environment.
    """
    name = flags.env
    if atari_wrappers.atari_game(name):
        env = atari_wrappers.make_atari(flags, render_mode)
    elif ":" in name and not re.search(r"-v\d+$", name):
        env = _from_python_path(name, render_mode)
    else:
        env = _from_gymnasium(name, render_mode)
    check_interface(name, env)
    try:
        check_observation_space(env.observation_space)
        check_action_space(env.action_space)
    except UnsupportedSpaceError as error:
        env.close()
        raise UnsupportedSpaceError(f"--env {name}: {error}") from None
    return env


def _from_gymnasium(name: str, render_mode: str | None) -> gymnasium.Env:
    if name.startswith("MinAtar/") and "MinAtar/Breakout-v1" not in gymnasium.registry:
        try:
            minatar = importlib.import_module("minatar.gym")
        except ImportError as error:
            raise MissingPackageError(
                f"--env {name} needs: pip install minatar"
            ) from error
        minatar.register_envs()
    try:
        # Some take no render_mode, not even None.
        mode: dict[str, Any] = {"render_mode": render_mode} if render_mode else {}
        env = gymnasium.make(name, disable_env_checker=True, **mode)
        return MinAtarGame(env) if name.startswith("MinAtar/") else env
    except gymnasium.error.UnregisteredEnv as error:
        close = _close_matches(name)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise UnknownEnvironmentError(
            f"--env {name}: no environment goes by this name.{hint} Allowed are Atari "
            "and other Gymnasium ids, package.module:Id-v0 for those that a package "
            "registers (such as minigrid:MiniGrid-Empty-5x5-v0), and "
            "package.module:Class."
        ) from error
    except gymnasium.error.DeprecatedEnv as error:  # names the version to take
        raise UnknownEnvironmentError(f"--env {name}: {error}") from error
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingPackageError(f"--env {name} needs a package: {error}") from error
    except ModuleNotFoundError as error:
        raise _missing_module(name, error) from error
    except ImportError as error:  # a name that has moved, a system library
        raise MissingPackageError(f"--env {name}: {error}") from error
    except (TypeError, gymnasium.error.Error) as error:
        if render_mode is not None and "render" in str(error):
            raise _cannot_render(name, str(error)) from error
        if raised_by_call(error.__context__ or error):
            raise InvalidEnvironmentError(
                f"--env {name} can't be made: {error}. If it needs arguments, write a "
                "function that gives them, and name that: package.module:function"
            ) from error
        raise


# Modules whose package has another name.
_PACKAGES = {
    "cv2": "opencv-python-headless",
    "OpenGL": "PyOpenGL",
    "PIL": "pillow",
    "pkg_resources": "'setuptools<81'",
    "yaml": "pyyaml",
}


def _missing_module(name: str, error: BaseException) -> MissingPackageError:
    """Names the module that is missing, which may be one that the named one needs."""
    named = missing = name.partition(":")[0]
    cause: BaseException | None = error
    while cause is not None:  # Gymnasium raises one of its own without a name
        missing = getattr(cause, "name", None) or missing
        cause = cause.__cause__ or cause.__context__
    package = missing.partition(".")[0]
    if named == missing or named.startswith(f"{missing}."):
        what = f"there is no module {missing}"
        hint = "; for a file of your own: run in its directory or set PYTHONPATH"
    else:
        what, hint = f"it needs the module {missing}, which is missing", ""
    return MissingPackageError(
        f"--env {name}: {what}. For a package: pip install "
        f"{_PACKAGES.get(package, package)}{hint}."
    )


def _cannot_render(name: str, why: str) -> InvalidEnvironmentError:
    return InvalidEnvironmentError(
        f"--env {name} can't be shown: {why}. --video and --mode test_render need an "
        "environment that takes render_mode and gives pictures"
    )


class MinAtarGame(gymnasium.Wrapper):
    """Begins each game without the last action of the game before.

    MinAtar repeats that one by chance, so that a game would not depend on its seed and
    its actions alone.
    """

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.unwrapped.game.last_action = 0  # type: ignore[attr-defined] # MinAtar's
        return self.env.reset(seed=seed, options=options)


def _close_matches(name: str) -> list[str]:
    """Up to three known ids that look like `name`."""
    games = atari_wrappers.game_names()
    known = [f"{game}NoFrameskip-v4" for game in games]
    known += [f"ALE/{game}-v5" for game in games]
    known += list(gymnasium.registry)
    by_lower_case = {id.lower(): id for id in known}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=3, cutoff=0.7)
    return [by_lower_case[id] for id in close]


def _from_python_path(name: str, render_mode: str | None) -> gymnasium.Env:
    module_name, _, path = name.partition(":")
    if not module_name or module_name.startswith("."):
        raise UnknownEnvironmentError(
            f"--env {name}: package.module:Class needs the full name of a module"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _missing_module(name, error) from error
    try:
        make = operator.attrgetter(path)(module)
    except AttributeError as error:
        close = difflib.get_close_matches(path, dir(module))
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise UnknownEnvironmentError(
            f"--env {name}: module {module_name} has no {path}.{hint}"
        ) from error
    arguments = {}
    if render_mode is not None and _takes(make, "render_mode"):
        arguments["render_mode"] = render_mode
    _check_arguments(name, make, arguments)
    env = make(**arguments)
    check_interface(name, env)
    if _has_old_api(env):
        return OldGymAdapter(env, render_mode, name)
    if render_mode is not None and env.render_mode != render_mode:
        raise _cannot_render(
            name,
            f"its render_mode is {env.render_mode!r}, not {render_mode!r}"
            if arguments
            else f"{path} takes no argument render_mode",
        )
    return env


def _check_arguments(name: str, make: Any, arguments: dict[str, Any]) -> None:
    """Raise InvalidEnvironmentError unless make(**arguments) can be called."""
    if not callable(make):
        raise InvalidEnvironmentError(
            f"--env {name} names {describe(make)}, not a class or function that makes "
            "an environment"
        )
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # written in C: nothing to inspect
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise InvalidEnvironmentError(
            f"--env {name} is called without arguments, but its own are {signature}: "
            f"{error}. Write a function that makes one, def make(): return "
            f"{name.rpartition(':')[2]}(...), and name that"
        ) from None


def _takes(function: Callable, parameter: str) -> bool:
    """True if `function` accepts this keyword argument by name."""
    try:
        return parameter in inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C: nothing to inspect
        return False


def _has_old_api(env: Any) -> bool:
    """True if `env` does not follow Gymnasium's API; resets it to see."""
    if not isinstance(env, gymnasium.Env):
        return True
    if not _takes(env.unwrapped.reset, "seed") or _takes(env.reset, "return_info"):
        return True
    return not _is_observation_and_info(env.reset(), env.observation_space)


def _is_observation_and_info(result: Any, space: spaces.Space) -> bool:
    """Tells what Gymnasium's reset() returns from a bare observation, even a tuple."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    return (
        is_pair
        and isinstance(result[1], dict)
        and not (isinstance(space, spaces.Tuple) and space.contains(result))
    )


class OldGymAdapter(gymnasium.Env):
    """An environment of the old Gym API, seen through Gymnasium's.

    Understands every mix found in the wild: reset() with or without a seed and an info,
    seed(), step() of four or five values, info["TimeLimit.truncated"], render(mode),
    spaces of the gym package (which is not imported here).
    """

    def __init__(self, env: Any, render_mode: str | None = None, name: str = ""):
        self.env = env
        self.name = name
        self.render_mode = render_mode
        self.metadata = {"render_modes": [render_mode] if render_mode else []}
        self.observation_space = convert_space(env.observation_space)
        self.action_space = convert_space(env.action_space)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        arguments = {}
        if seed is not None and _takes(self.env.reset, "seed"):
            arguments["seed"] = seed
        elif seed is not None and hasattr(self.env, "seed"):
            self.env.seed(seed)
        result = self.env.reset(**arguments)
        if _is_observation_and_info(result, self.observation_space):
            return result
        return result, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if isinstance(self.action_space, spaces.Discrete):
            action = int(action)  # some check the type
        result = self.env.step(action)
        count = len(result) if isinstance(result, tuple | list) else 0
        if count == 5:
            return tuple(result)
        if count != 4:
            raise InvalidEnvironmentError(
                f"--env {self.name}: step() returned {describe(result)}. step(action) "
                "must return observation, reward, terminated, truncated, info, or, in "
                "the old Gym API, observation, reward, done, info"
            )
        observation, reward, done, info = result
        if not isinstance(info, dict):
            raise InvalidEnvironmentError(
                f"--env {self.name}: step() returned {describe(info)} as info; it must "
                "be a dict"
            )
        truncated = bool(info.get("TimeLimit.truncated", False))
        return observation, reward, bool(done) and not truncated, truncated, info

    def render(self) -> Any:
        if self.render_mode is not None and _takes(self.env.render, "mode"):
            return self.env.render(mode=self.render_mode)
        return self.env.render()

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()


def convert_space(space: Any) -> spaces.Space:
    """The Gymnasium space that equals a space of the gym package.

    Raises:
        UnsupportedSpaceError: there is none.
    """
    if isinstance(space, spaces.Space):
        return space
    kind = type(space).__name__
    if kind == "Box":
        return spaces.Box(space.low, space.high, space.shape, space.dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(space.nvec)
    if kind == "MultiBinary":
        return spaces.MultiBinary(space.n)
    if kind == "Dict":
        return spaces.Dict({k: convert_space(s) for k, s in space.spaces.items()})
    if kind == "Tuple":
        return spaces.Tuple([convert_space(s) for s in space.spaces])
    raise UnsupportedSpaceError(
        f"{space!r} of type {type(space)} is none of Box, Discrete, MultiDiscrete, "
        "MultiBinary, Dict, Tuple"
    )


def check_observation_space(space: spaces.Space, place: str = "observation") -> None:
    """Raise UnsupportedSpaceError unless buffers can hold `space`, nested or not."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        children = (
            space.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        )
        for key, child in children:
            check_observation_space(child, f"{place}[{key!r}]")
    elif not isinstance(space, _ELEMENTARY_SPACES):
        raise UnsupportedSpaceError(
            f"{place} has the unsupported space {space}; allowed are Box, Discrete, "
            "MultiDiscrete, MultiBinary, and Dict and Tuple of those. Wrap the "
            "environment in a gymnasium.ObservationWrapper; docs/environments.md "
            "shows how."
        )


def check_action_space(space: spaces.Space) -> None:
    """Raise UnsupportedSpaceError unless a policy can act in `space`."""
    if isinstance(space, spaces.Discrete):
        return
    is_vector = isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1
    is_real = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)
    if (is_vector or is_real) and 0 not in (space.shape or ()):
        return
    raise UnsupportedSpaceError(
        f"action has the unsupported space {space}; allowed are Discrete, "
        "MultiDiscrete of one dimension, and Box of floats, none of them empty. Wrap "
        "the environment in a gymnasium.ActionWrapper."
    )
