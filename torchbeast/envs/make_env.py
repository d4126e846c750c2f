"""Making one environment: from `--env` to a Gymnasium environment.

docs/environments.md is the manual.
"""

import argparse
import contextlib
import importlib
import inspect
import json
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.wrappers import FrameStackObservation

from torchbeast.base import parts
from torchbeast.base.errors import FlagError, MissingPackageError
from torchbeast.base.named import call_named, find_object, parse_paths
from torchbeast.envs import atari
from torchbeast.envs.action_masks import MaskFromInfo, check_mask
from torchbeast.envs.values import InvalidEnvironmentError, as_stack, check_spaces

ENVS = "torchbeast.extras.envs"  # parts with `adapt` or `vector_maker`


def create_env(
    flags: argparse.Namespace, render_mode: str | None = None
) -> gymnasium.Env:
    """Makes one environment. docs/environments.md says what `flags.env` may name.

    Of `flags` it takes env, env_kwargs, wrapper (see parse_paths) and mask_actions.
    The parts of extras/envs may adapt what is no gymnasium.Env.

    Raises:
      FlagError: nothing has this name, or a package is missing.
      InvalidEnvironmentError: it is not a usable environment.
    """
    name, flag = flags.env, f"--env {flags.env}"
    arguments = json.loads(flags.env_kwargs or "{}")
    if atari.atari_game(name):
        env: Any = call_named(flag, atari.make_atari, flags, render_mode, **arguments)
    elif names_python(name):
        make = find_object(flag, name)
        if render_mode and takes(make, "render_mode"):
            arguments = {"render_mode": render_mode, **arguments}
        env = call_named(flag, make, **arguments)
        for part in parts.find(ENVS):
            if hasattr(part, "adapt"):
                env = part.adapt(env, render_mode)
    else:
        env = _from_gymnasium(name, render_mode, arguments)
    try:
        for path, more in parse_paths("--wrapper", flags.wrapper or ""):
            _check_interface(flag, env)
            flag = f"--wrapper {path}"
            env = call_named(flag, find_object(flag, path), env, **more)
        _check_interface(flag, env)
        if render_mode and env.render_mode != render_mode:
            raise InvalidEnvironmentError(
                f"--env {name} can't be rendered: its render_mode is "
                f"{env.render_mode!r}. It needs a parameter render_mode"
            )
        _declare_stack(env)
        if flags.mask_actions:
            env = MaskFromInfo(env)
        check_spaces(env.observation_space, env.action_space)
        check_mask(env.observation_space, env.action_space)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error counts
            env.close()
        raise
    return env


def vector_maker(
    flags: argparse.Namespace, render_mode: str | None = None
) -> Callable[[int | None], Any] | None:
    """How a part of extras/envs makes E environments in one object.

    Without E it makes one, or as many as a game has agents. None: `create_env` makes
    each environment.
    """
    for part in parts.find(ENVS):
        has = hasattr(part, "vector_maker")
        if has and (maker := part.vector_maker(flags, render_mode)):
            return maker
    return None


def _check_interface(flag: str, env: Any) -> None:
    if not isinstance(env, gymnasium.Env):
        raise InvalidEnvironmentError(
            f"{flag} made {env!r:.200}, which is not a gymnasium.Env with one agent. "
            "docs/environments.md says how to adapt others"
        )


def _declare_stack(env: gymnasium.Env) -> None:
    """Declares the frames of Gymnasium's FrameStackObservation, which does not say so.

    Wrappers around it may follow if they keep its space.
    """
    space, inner = env.observation_space, env
    while isinstance(inner, gymnasium.Wrapper) and inner.observation_space is space:
        is_box = type(space) is gymnasium.spaces.Box
        if is_box and isinstance(inner, FrameStackObservation):
            env.observation_space = as_stack(space)
        inner = inner.env


def takes(function: Callable, parameter: str) -> bool:
    """Whether `function` has a parameter of this name."""
    try:
        return parameter in inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C, has no signature
        return False


class MinAtarGame(gymnasium.Wrapper):
    """Forgets the last action of the previous game at reset().

    MinAtar repeats the last action with some probability. Without this wrapper, a game
    would depend on the previous one, and not only on its seed and actions.
    """

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        game: Any = self.get_wrapper_attr("game")
        game.last_action = 0
        return self.env.reset(**arguments)


def _from_gymnasium(
    name: str, render_mode: str | None, arguments: dict[str, Any]
) -> gymnasium.Env:
    if render_mode:  # some take no render_mode, not even None
        arguments = {"render_mode": render_mode, **arguments}
    try:
        is_minatar = name.startswith("MinAtar/")
        if is_minatar and "MinAtar/Breakout-v1" not in gymnasium.registry:
            importlib.import_module("minatar.gym").register_envs()
        env = gymnasium.make(name, disable_env_checker=True, **arguments)
        return MinAtarGame(env) if is_minatar else env
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise MissingPackageError(
            f"--env {name}: {error}. Install its package, or run in the directory of "
            "your own file"
        ) from error
    except gymnasium.error.Error as error:
        raise FlagError(
            f"--env {name}: {error} Allowed are Atari and other Gymnasium ids, "
            "package.module:Id-v0 for ids that the import registers, and "
            "package.module:Class."
        ) from error


def names_python(name: str) -> bool:
    """Whether --env is package.module:Class, not an id such as metaworld:Suite/Task."""
    _, colon, rest = name.partition(":")
    return bool(colon) and not set("-/") & set(rest)
