"""Making one environment: from `--env` to a Gymnasium environment."""

import argparse
import contextlib
import inspect
import json
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.wrappers import FrameStackObservation

from torchbeast.base import parts
from torchbeast.base.errors import FlagError
from torchbeast.base.named import call_named, find_object, parse_paths
from torchbeast.envs.values import InvalidEnvironmentError, as_stack, check_mask

# Parts that may have these functions; None: not this kind of environment.
#   make(flags, render_mode, arguments)        makes one
#   vector_maker(flags, render_mode, index)    returns make(num_envs), which makes
#                                              several in one object, from this index on
#   adapt(env, render_mode)                    replaces an object of module:Class
#   frames_per_step(flags)                     of the emulator, if not 1
#   examine(env)                               may warn of an Environment
ENVS = "torchbeast.extras.envs"
MASKS = f"{ENVS}.masks:MaskFromInfo"  # --mask_actions


def create_env(
    flags: argparse.Namespace, render_mode: str | None = None, index: int = 0
) -> gymnasium.Env:
    """Makes environment number `index`. docs/environments.md explains `flags.env`.

    Raises FlagError if nothing has this name or a package is missing, and
    InvalidEnvironmentError if it is not a usable environment.
    """
    name, flag = flags.env, f"--env {flags.env}"
    arguments = json.loads(flags.env_kwargs or "{}")
    env: Any = first("make", flags, render_mode, arguments)
    if env is None and names_python(name):
        make = find_object(flag, name)
        env = call(flag, make, arguments, render_mode=render_mode, env_index=index)
        for part in parts.find(ENVS):
            if hasattr(part, "adapt"):
                env = part.adapt(env, render_mode)
    elif env is None:
        env = from_gymnasium(name, render_mode, arguments)
    try:
        env = wrap(flags, env, index)
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
            env = find_object("--mask_actions", MASKS)(env)
        check_mask(env.observation_space, env.action_space)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error counts
            env.close()
        raise
    return env


def wrap(flags: argparse.Namespace, env: Any, index: int) -> Any:
    """The environment in what --wrapper names."""
    for path, more in parse_paths("--wrapper", flags.wrapper or ""):
        flag = f"--wrapper {path}"
        env = call(flag, find_object(flag, path), more, env, env_index=index)
    return env


def call(
    flag: str, function: Callable, arguments: dict[str, Any], *args: Any, **known: Any
) -> Any:
    """Calls it; also with what is known, not None, and the name of a parameter."""
    given = {k: x for k, x in known.items() if x is not None and takes(function, k)}
    return call_named(flag, function, *args, **(given | arguments))


def takes(function: Callable, parameter: str) -> bool:
    """Whether `function` has a parameter of this name."""
    try:
        return parameter in inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C, has no signature
        return False


def from_gymnasium(
    name: str, render_mode: str | None, arguments: dict[str, Any]
) -> gymnasium.Env:
    """Makes what is registered under this id."""
    # Some take no render_mode, not even None.
    shown = {"render_mode": render_mode} if render_mode else {}
    try:
        return gymnasium.make(name, disable_env_checker=True, **(shown | arguments))
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise FlagError(f"--env {name}: {error}") from None
    except (ImportError, gymnasium.error.Error) as error:
        known = "Gymnasium's ids (install the package), module:Id-v0 and module:Class"
        raise FlagError(f"--env {name}: {error}. Allowed are {known}") from error


def names_python(name: str) -> bool:
    """Whether --env is package.module:Class, not an id such as metaworld:Suite/Task."""
    _, colon, rest = name.partition(":")
    return bool(colon) and not set("-/") & set(rest)


def first(function: str, *args: Any) -> Any:
    """What the first part of extras/envs returns that does not return None."""
    functions = [getattr(x, function) for x in parts.find(ENVS) if hasattr(x, function)]
    found = (f(*args) for f in functions)
    return next((x for x in found if x is not None), None)
