"""Making one environment: from `--env` to a Gymnasium environment."""

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
from torchbeast.base.errors import FlagError
from torchbeast.base.named import find_object, parse_paths
from torchbeast.envs.values import (
    InvalidEnvironmentError,
    MaskFromInfo,
    as_stack,
    check_mask,
)

# Parts with some of the functions make, adapt, vector_maker and frames_per_step.
ENVS = "torchbeast.extras.envs"


def create_env(
    flags: argparse.Namespace, render_mode: str | None = None
) -> gymnasium.Env:
    """Makes one environment. docs/environments.md says what `flags.env` may name.

    Raises FlagError if nothing has this name or a package is missing, and
    InvalidEnvironmentError if it is not a usable environment.
    """
    name, flag = flags.env, f"--env {flags.env}"
    arguments = json.loads(flags.env_kwargs or "{}")
    # Some take no render_mode, not even None.
    shown = {"render_mode": render_mode, **arguments} if render_mode else arguments
    env: Any = _first("make", flags, render_mode, arguments)
    if env is None and names_python(name):
        make = find_object(flag, name)
        env = make(**(shown if takes(make, "render_mode") else arguments))
        for part in parts.find(ENVS):
            if hasattr(part, "adapt"):
                env = part.adapt(env, render_mode)
    elif env is None:
        env = _from_gymnasium(name, shown)
    try:
        for path, more in parse_paths("--wrapper", flags.wrapper or ""):
            env = find_object(f"--wrapper {path}", path)(env, **more)
        if not isinstance(env, gymnasium.Env):
            raise InvalidEnvironmentError(
                f"{flag} made {env!r:.200}, which is not a gymnasium.Env with one agent"
            )
        if render_mode and env.render_mode != render_mode:
            raise InvalidEnvironmentError(
                f"{flag} has no parameter render_mode: it can't be rendered"
            )
        inner = env
        while isinstance(inner, gymnasium.Wrapper):  # declares the frames of a stack
            is_box = isinstance(inner.observation_space, gymnasium.spaces.Box)
            if is_box and isinstance(inner, FrameStackObservation):
                inner.observation_space = as_stack(inner.observation_space)
            inner = inner.env
        if flags.mask_actions:
            env = MaskFromInfo(env)
        check_mask(env.observation_space, env.action_space)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error counts
            env.close()
        raise
    return env


def vector_maker(
    flags: argparse.Namespace, render_mode: str | None = None
) -> Callable[[int | None], Any] | None:
    """How a part of extras/envs makes E environments in one object; None: none does."""
    return _first("vector_maker", flags, render_mode)


def frames_per_step(flags: argparse.Namespace) -> int:
    """How many frames a step of --env has, as a part of extras/envs says."""
    return _first("frames_per_step", flags) or 1


def _first(function: str, *args: Any) -> Any:
    """What the first part of extras/envs returns that does not return None."""
    functions = [getattr(x, function) for x in parts.find(ENVS) if hasattr(x, function)]
    found = (f(*args) for f in functions)
    return next((x for x in found if x is not None), None)


def takes(function: Callable, parameter: str) -> bool:
    """Whether `function` has a parameter of this name."""
    try:
        return parameter in inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C, has no signature
        return False


class MinAtarGame(gymnasium.Wrapper):
    """Forgets the last action at reset(): MinAtar would repeat it in the next game."""

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        game: Any = self.get_wrapper_attr("game")
        game.last_action = 0
        return self.env.reset(**arguments)


def _from_gymnasium(name: str, arguments: dict[str, Any]) -> gymnasium.Env:
    try:
        is_minatar = name.startswith("MinAtar/")
        if is_minatar and "MinAtar/Breakout-v1" not in gymnasium.registry:
            importlib.import_module("minatar.gym").register_envs()
        env = gymnasium.make(name, disable_env_checker=True, **arguments)
        return MinAtarGame(env) if is_minatar else env
    except (ImportError, gymnasium.error.Error) as error:
        known = "Gymnasium's ids (install the package), module:Id-v0 and module:Class"
        raise FlagError(f"--env {name}: {error}. Allowed are {known}") from error


def names_python(name: str) -> bool:
    """Whether --env is package.module:Class, not an id such as metaworld:Suite/Task."""
    _, colon, rest = name.partition(":")
    return bool(colon) and not set("-/") & set(rest)
