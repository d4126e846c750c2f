"""Making one environment: from `--env` to a Gymnasium environment.

docs/environments.md is the manual.
"""

import argparse
import contextlib
import importlib
import json
import operator
import pkgutil
import re
import sys
from typing import Any

import gymnasium

from torchbeast.base.errors import FlagError, MissingPackageError, did_you_mean
from torchbeast.envs import atari, checks
from torchbeast.envs.action_masks import MaskFromInfo, check_spaces
from torchbeast.envs.space_checks import check_interface, declare_stack
from torchbeast.extras import old_gym


def create_env(
    flags: argparse.Namespace, render_mode: str | None = None
) -> gymnasium.Env:
    """Makes one environment. docs/environments.md says what `flags.env` may name.

    Of `flags` it takes env, env_kwargs, wrapper (see parse_paths) and mask_actions.
    Environments of the old Gym API are adapted.

    Raises:
      MissingPackageError: the message says what to install.
      UnsupportedSpaceError: the message names the unsupported part of the space.
      FlagError: nothing has this name; the message lists close matches.
      InvalidEnvironmentError: the object is not a usable environment.
    """
    name, flag = flags.env, f"--env {flags.env}"
    arguments = json.loads(flags.env_kwargs or "{}")
    if atari.atari_game(name):
        env = call_named(flag, atari.make_atari, flags, render_mode, **arguments)
    elif names_python(name):
        make = find_object(flag, name)
        if render_mode and old_gym.takes(make, "render_mode"):
            arguments = {"render_mode": render_mode, **arguments}
        env = call_named(flag, make, **arguments)
    else:
        env = _from_gymnasium(name, render_mode, arguments)
    check_interface(flag, env)
    if names_python(name):
        env = old_gym.adapt(env, render_mode)
    if render_mode and env.render_mode != render_mode:
        raise checks.InvalidEnvironmentError(
            f"--env {name} can't be rendered: its render_mode is {env.render_mode!r}. "
            "--video and --mode test_render need an environment with a parameter "
            "render_mode that returns frames"
        )
    declare_stack(env)
    try:
        for path, wrapper_arguments in parse_paths("--wrapper", flags.wrapper or ""):
            flag = f"--wrapper {path}"
            env = call_named(flag, find_object(flag, path), env, **wrapper_arguments)
            check_interface(flag, env)
            if not isinstance(env, gymnasium.Env):
                raise checks.InvalidEnvironmentError(
                    f"{flag} returned {checks.describe(env)}, not a gymnasium.Env"
                )
            declare_stack(env)
        if flags.mask_actions:
            env = MaskFromInfo(env, name)
        check_spaces(env.observation_space, env.action_space)
    except BaseException as error:
        with contextlib.suppress(Exception):  # the first error counts
            env.close()
        if isinstance(error, checks.UnsupportedSpaceError):
            raise checks.UnsupportedSpaceError(f"--env {name}: {error}") from None
        raise
    return env


def parse_paths(flag: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    """The paths that a flag such as --wrapper has, and the arguments of each.

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
                    f"{flag} {path} is followed by {text}, which is not a JSON "
                    f"object: {error}"
                ) from None
            text = text[end:]
        found.append((path.strip(), arguments))
    return found


def find_named(flag: str, text: str) -> tuple[str, Any, dict[str, Any]]:
    """The one class or function of text, MODULE:CLASS[JSON], and its arguments.

    Returns:
      `flag` with the path, the object, the arguments.

    Raises:
      FlagError: there are several, what follows the path is not a JSON object, or
        the module has no such object.
      MissingPackageError: there is no such module.
    """
    paths = parse_paths(flag, text)
    if len(paths) != 1:
        raise FlagError(f"{flag} {text}: it may name one MODULE:CLASS[JSON]")
    ((path, arguments),) = paths
    flag = f"{flag} {path}"
    return flag, find_object(flag, path), arguments


def make_named(flag: str, text: str | None, /, *args: Any) -> Any:
    """Calls what find_named() finds; None without text.

    Raises:
      UserError: as find_named().
      InvalidEnvironmentError: it can't be called with the arguments.
    """
    if not text:
        return None
    flag, function, arguments = find_named(flag, text)
    return call_named(flag, function, *args, **arguments)


def call_named(flag: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls what a flag names, with the arguments that the user gave.

    Raises:
      InvalidEnvironmentError: it can't be called with them.
    """
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        if not checks.raised_by_call(error):
            raise
        raise checks.InvalidEnvironmentError(
            f"{flag} can't be made with the arguments {kwargs}: {error}. --env_kwargs "
            "passes arguments to --env, a JSON object after the name to all others"
        ) from error


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
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        raise FlagError(
            f"--env {name}: {old_gym.advice(name)}no environment has this name. "
            f"{error} Allowed are Atari and other Gymnasium ids, package.module:Id-v0 "
            "for ids that the import registers (such as "
            "minigrid:MiniGrid-Empty-5x5-v0; if a function does it, call it in a "
            "module of your own), and package.module:Class."
        ) from error
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise _missing_package(f"--env {name}", error) from error
    except (TypeError, gymnasium.error.Error) as error:
        if not checks.raised_by_call(error.__context__ or error):
            raise
        raise checks.InvalidEnvironmentError(
            f"--env {name} can't be made: {error}. --env_kwargs passes arguments, "
            "--video and --mode test_render pass render_mode"
        ) from error


def _missing_package(flag: str, error: BaseException) -> MissingPackageError:
    """Says what to install: the missing module, or what the error itself says."""
    missing: str | None = None
    cause: BaseException | None = error  # Gymnasium's own does not name the module
    while isinstance(cause, ModuleNotFoundError) and not missing:
        missing, cause = cause.name, cause.__cause__ or cause.__context__
    if not missing:
        return MissingPackageError(f"{flag}: {error}")
    advice = (
        f"For a package: pip install {missing}, or the package that has this module; "
        "for your own file: run in its directory or set PYTHONPATH."
    )
    package, _, part = missing.rpartition(".")
    if package:  # its import has worked
        parts = pkgutil.iter_modules(getattr(sys.modules.get(package), "__path__", ()))
        advice = (
            f"{package} is installed, so check the name, or whether another version "
            f"has it.{did_you_mean(part, [x.name for x in parts])}"
        )
    return MissingPackageError(f"{flag}: there is no module {missing}. {advice}")


def names_python(name: str) -> bool:
    """Whether --env is package.module:Class, not an id such as metaworld:Suite/Task."""
    _, colon, rest = name.partition(":")
    return bool(colon) and not set("-/") & set(rest)


def find_object(flag: str, path: str) -> Any:
    """The object package.module:name. `flag` begins the messages of errors."""
    module_name, _, attribute = path.partition(":")
    if not module_name or module_name.startswith(".") or not attribute:
        raise FlagError(f"{flag}: package.module:Class needs the full module name")
    try:
        module = checks.own_context()(importlib.import_module, module_name)
    except ModuleNotFoundError as error:
        raise _missing_package(flag, error) from error
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError as error:
        hint = did_you_mean(attribute, dir(module))
        raise FlagError(
            f"{flag}: module {module_name} has no {attribute}.{hint}"
        ) from error
