"""Making one environment: from `--env` to a Gymnasium environment.

docs/environments.md is the manual.
"""

import argparse
import contextlib
import difflib
import importlib
import inspect
import json
import operator
import re
from typing import Any

import gymnasium

from torchbeast.base.errors import FlagError, UserError
from torchbeast.envs import atari
from torchbeast.envs.action_masks import MaskFromInfo, check_mask
from torchbeast.envs.checks import (
    InvalidEnvironmentError,
    UnsupportedSpaceError,
    describe,
    raised_by_call,
)
from torchbeast.envs.old_gym import OldGymAdapter, has_old_api, takes
from torchbeast.envs.seeded_games import MinAtarGame
from torchbeast.envs.space_checks import (
    check_action_space,
    check_interface,
    check_observation_space,
    declare_stack,
)


class UnknownEnvironmentError(UserError, ValueError):
    """No environment has this name."""


class MissingPackageError(UserError, ImportError):
    """A required package is missing; the message names it."""


def create_env(
    flags: argparse.Namespace, render_mode: str | None = None
) -> gymnasium.Env:
    """Makes one environment from `flags.env`, which is one of:

        "PongNoFrameskip-v4", "ALE/Pong-v5"  an Atari id, see atari.py
        "CartPole-v1", "MinAtar/Breakout-v1", "package.module:Id-v0"  a Gymnasium id
        "package.module:name"  a class or function; it is called with render_mode if it
                               has that parameter

    It gets the arguments in `flags.env_kwargs`, a JSON object or None. The functions or
    classes in `flags.wrapper`, see parse_wrappers, wrap it one after the other. With
    `flags.mask_actions` the observation gets info["action_mask"].
    Environments of the old Gym API are adapted.

    Raises:
      UnknownEnvironmentError: nothing has this name; the message lists close matches.
      MissingPackageError: the message says what to install.
      UnsupportedSpaceError: the message names the unsupported part of the space.
      InvalidEnvironmentError: the object is not a usable environment.
    """
    name = flags.env
    arguments = json.loads(flags.env_kwargs or "{}")
    if atari.atari_game(name):
        try:
            env = atari.make_atari(flags, render_mode, arguments)
        except TypeError as error:
            if not arguments:
                raise
            raise InvalidEnvironmentError(
                f"--env_kwargs {flags.env_kwargs} of {name}: {error}"
            ) from error
    elif names_python(name):
        env = _from_python_path(name, render_mode, arguments)
    else:
        env = _from_gymnasium(name, render_mode, arguments)
    check_interface(name, env)
    declare_stack(env)
    try:
        for path, wrapper_arguments in parse_wrappers(flags.wrapper or ""):
            env = _wrap(env, path, wrapper_arguments)
            declare_stack(env)
        if flags.mask_actions:
            env = MaskFromInfo(env, name)
        check_mask(env.observation_space, env.action_space)
        check_observation_space(env.observation_space)
        check_action_space(env.action_space)
    except BaseException as error:
        with contextlib.suppress(Exception):  # the first error counts
            env.close()
        if isinstance(error, UnsupportedSpaceError):
            raise UnsupportedSpaceError(f"--env {name}: {error}") from None
        raise
    return env


def parse_wrappers(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The paths of --wrapper and the arguments of each.

    Such as a:F,b:C{"size": [4, 5]}. Commas separate them; a JSON object may follow.

    Raises:
      FlagError: what follows a path is not a JSON object.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    while text := text.strip(", "):
        path = re.split("[,{]", text)[0]
        text = text[len(path) :]
        arguments: dict[str, Any] = {}
        if text.startswith("{"):
            try:
                arguments, end = json.JSONDecoder().raw_decode(text)
            except (ValueError, RecursionError) as error:
                raise FlagError(
                    f"--wrapper {path} is followed by {text}, which is not a JSON "
                    f"object: {error}"
                ) from None
            text = text[end:].strip()
            if text and not text.startswith(","):
                raise FlagError(f"--wrapper {path}: a comma is missing before {text}")
        found.append((path.strip(), arguments))
    return found


def _wrap(env: gymnasium.Env, wrapper: str, arguments: dict[str, Any]) -> gymnasium.Env:
    """Calls one function or class of --wrapper."""
    wrap = find_object(f"--wrapper {wrapper}", wrapper)
    if not callable(wrap):
        raise InvalidEnvironmentError(
            f"--wrapper {wrapper} names {describe(wrap)}, not a class or function "
            "that wraps an environment"
        )
    try:
        wrapped = wrap(env, **arguments)
    except TypeError as error:
        if not raised_by_call(error):
            raise
        raise InvalidEnvironmentError(
            f"--wrapper {wrapper} is called with the environment and the arguments "
            f"{arguments}: {error}. Arguments follow the name, as a JSON object"
        ) from error
    if not isinstance(wrapped, gymnasium.Env):
        raise InvalidEnvironmentError(
            f"--wrapper {wrapper} returned {describe(wrapped)}, not an environment"
        )
    return wrapped


def _from_gymnasium(
    name: str, render_mode: str | None, arguments: dict[str, Any]
) -> gymnasium.Env:
    if name.startswith("MinAtar/") and "MinAtar/Breakout-v1" not in gymnasium.registry:
        try:
            minatar = importlib.import_module("minatar.gym")
        except ImportError as error:
            raise MissingPackageError(
                f"--env {name} needs: pip install minatar"
            ) from error
        minatar.register_envs()
    try:
        if render_mode:  # some take no render_mode, not even None
            arguments = {"render_mode": render_mode, **arguments}
        env = gymnasium.make(name, disable_env_checker=True, **arguments)
        return MinAtarGame(env) if name.startswith("MinAtar/") else env
    except gymnasium.error.UnregisteredEnv as error:
        close = _close_matches(name)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise UnknownEnvironmentError(
            f"--env {name}: no environment has this name.{hint} Allowed are Atari "
            "and other Gymnasium ids, package.module:Id-v0 for ids that a package "
            "registers (such as minigrid:MiniGrid-Empty-5x5-v0), and "
            "package.module:Class."
        ) from error
    except gymnasium.error.DeprecatedEnv as error:  # names the version to use
        raise UnknownEnvironmentError(f"--env {name}: {error}") from error
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingPackageError(f"--env {name} needs a package: {error}") from error
    except ModuleNotFoundError as error:
        named = name.partition(":")[0]
        raise _missing_module(f"--env {name}", named, error) from error
    except ImportError as error:  # a renamed attribute or a missing system library
        raise MissingPackageError(f"--env {name}: {error}") from error
    except (TypeError, gymnasium.error.Error) as error:
        if render_mode is not None and "render" in str(error):
            raise _cannot_render(name, str(error)) from error
        if raised_by_call(error.__context__ or error):
            raise InvalidEnvironmentError(
                f"--env {name} can't be made: {error}. --env_kwargs passes arguments"
            ) from error
        raise


# Packages whose name differs from the module's.
_PACKAGES = {
    "cv2": "opencv-python-headless",
    "OpenGL": "PyOpenGL",
    "PIL": "pillow",
    "pkg_resources": "'setuptools<81'",
    "yaml": "pyyaml",
}


def _missing_module(flag: str, named: str, error: BaseException) -> MissingPackageError:
    """Finds the missing module, which the module `named` may have tried to import."""
    missing = named
    cause: BaseException | None = error
    while cause is not None:  # Gymnasium's own error does not name the module
        missing = getattr(cause, "name", None) or missing
        cause = cause.__cause__ or cause.__context__
    package = missing.partition(".")[0]
    if named == missing or named.startswith(f"{missing}."):
        what = f"there is no module {missing}"
        hint = "; for your own file: run in its directory or set PYTHONPATH"
    else:
        what, hint = f"it needs the module {missing}, which is missing", ""
    return MissingPackageError(
        f"{flag}: {what}. For a package: pip install "
        f"{_PACKAGES.get(package, package)}{hint}."
    )


def _cannot_render(name: str, why: str) -> InvalidEnvironmentError:
    return InvalidEnvironmentError(
        f"--env {name} can't be rendered: {why}. --video and --mode test_render need "
        "an environment with a parameter render_mode that returns frames"
    )


def _close_matches(name: str) -> list[str]:
    """Up to three known ids that look like `name`."""
    games = atari.game_names()
    known = [f"{game}NoFrameskip-v4" for game in games]
    known += [f"ALE/{game}-v5" for game in games]
    known += list(gymnasium.registry)
    by_lower_case = {id.lower(): id for id in known}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=3, cutoff=0.7)
    return [by_lower_case[id] for id in close]


def names_python(name: str) -> bool:
    """Whether --env is package.module:Class, not an id such as metaworld:Suite/Task."""
    _, colon, rest = name.partition(":")
    return bool(colon) and not set("-/") & set(rest)


def find_object(flag: str, path: str) -> Any:
    """The object package.module:name. `flag` begins the messages of errors."""
    module_name, _, attribute = path.partition(":")
    if not module_name or module_name.startswith(".") or not attribute:
        raise UnknownEnvironmentError(
            f"{flag}: package.module:Class needs the full module name"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _missing_module(flag, module_name, error) from error
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError as error:
        close = difflib.get_close_matches(attribute, dir(module))
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise UnknownEnvironmentError(
            f"{flag}: module {module_name} has no {attribute}.{hint}"
        ) from error


def _from_python_path(
    name: str, render_mode: str | None, arguments: dict[str, Any]
) -> gymnasium.Env:
    make = find_object(f"--env {name}", name)
    takes_mode = takes(make, "render_mode")
    if render_mode is not None and takes_mode:
        arguments = {"render_mode": render_mode, **arguments}
    if error := call_signature_error(name, make, arguments):
        raise error
    env = make(**arguments)
    check_interface(name, env)
    if has_old_api(env):
        return OldGymAdapter(env, render_mode, name)
    if render_mode is not None and env.render_mode != render_mode:
        raise _cannot_render(
            name,
            f"its render_mode is {env.render_mode!r}, not {render_mode!r}"
            if takes_mode
            else f"{name.partition(':')[2]} takes no argument render_mode",
        )
    return env


def call_signature_error(
    name: str, make: Any, arguments: dict[str, Any]
) -> InvalidEnvironmentError | None:
    """Why make(**arguments) can't be called; None if it can."""
    if not callable(make):
        return InvalidEnvironmentError(
            f"--env {name} names {describe(make)}, not a class or function that makes "
            "an environment"
        )
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # written in C, has no signature
        return None
    try:
        signature.bind(**arguments)
    except TypeError as error:
        return InvalidEnvironmentError(
            f"--env {name} is called with the arguments {arguments}, but its signature "
            f"is {signature}: {error}. --env_kwargs passes arguments"
        )
    return None
