"""Making one environment: from `--env` to a Gymnasium environment.

docs/environments.md is the manual.
"""

import argparse
import contextlib
import importlib
import json
from typing import Any

import gymnasium

from torchbeast.base.errors import FlagError, MissingPackageError
from torchbeast.base.named import call_named, find_object, parse_paths
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
        raise MissingPackageError(
            f"--env {name}: {error}. Install its package, or run in the directory of "
            "your own file"
        ) from error
    except (TypeError, gymnasium.error.Error) as error:
        if not checks.raised_by_call(error.__context__ or error):
            raise
        raise checks.InvalidEnvironmentError(
            f"--env {name} can't be made: {error}. --env_kwargs passes arguments, "
            "--video and --mode test_render pass render_mode"
        ) from error


def names_python(name: str) -> bool:
    """Whether --env is package.module:Class, not an id such as metaworld:Suite/Task."""
    _, colon, rest = name.partition(":")
    return bool(colon) and not set("-/") & set(rest)
