"""Making one environment: from `--env` to a Gymnasium environment.

docs/environments.md is the manual.
"""

import argparse
import difflib
import importlib
import inspect
import json
import math
import operator
import re
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from torchbeast.core import atari_wrappers
from torchbeast.core.action_masks import MaskFromInfo, check_mask
from torchbeast.core.env_checks import (
    InvalidEnvironmentError,
    UnsupportedSpaceError,
    check_interface,
    describe,
    leaves_of,
    raised_by_call,
)
from torchbeast.core.errors import FlagError, UserError
from torchbeast.core.old_gym import OldGymAdapter, has_old_api, takes
from torchbeast.core.seeded_games import MinAtarGame

_ELEMENTARY_SPACES = (
    spaces.Box,
    spaces.Discrete,
    spaces.MultiDiscrete,
    spaces.MultiBinary,
)


class UnknownEnvironmentError(UserError, ValueError):
    """No environment has this name."""


class MissingPackageError(UserError, ImportError):
    """A required package is missing; the message names it."""


def create_env(
    flags: argparse.Namespace, render_mode: str | None = None
) -> gymnasium.Env:
    """Makes one environment from `flags.env`, which is one of:

        "PongNoFrameskip-v4", "ALE/Pong-v5"  an Atari id, see atari_wrappers.py
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
    if atari_wrappers.atari_game(name):
        try:
            env = atari_wrappers.make_atari(flags, render_mode, arguments)
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
    try:
        for path, wrapper_arguments in parse_wrappers(flags.wrapper or ""):
            env = _wrap(env, path, wrapper_arguments)
        if flags.mask_actions:
            env = MaskFromInfo(env, name)
        check_mask(env.observation_space, env.action_space)
        check_observation_space(env.observation_space)
        check_action_space(env.action_space)
    except UnsupportedSpaceError as error:
        env.close()
        raise UnsupportedSpaceError(f"--env {name}: {error}") from None
    except BaseException:
        env.close()
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
    games = atari_wrappers.game_names()
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


# The limits of PolyBeast's messages, see libtorchbeast/stream_spec.h. They hold for
# both variants, so that what trains with one also trains with the other.
MAX_ELEMENTS = 2**20
MAX_CHOICES = 2**18
MAX_ACTION_NUMBERS = 2**16
MAX_ARRAYS = 1024
MAX_LEVELS = 16
MAX_DIMENSIONS = 6
MAX_KEY_BYTES = 1024
MAX_START = 2**53
_DTYPES = {"bool", "float16", "float32", "float64"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


def check_observation_space(space: spaces.Space) -> None:
    """Raises UnsupportedSpaceError unless both variants can hold observations."""
    leaves = leaves_of(space)
    fault = _structure_fault(space, "observation", 1)
    for place, leaf in leaves:
        if not fault and (found := _leaf_fault(leaf)):
            fault = f"{place} has the unsupported space {leaf}; {found}"
    if not fault:
        size = sum(math.prod(leaf.shape or ()) for _, leaf in leaves)
        choices = sum(_num_choices(leaf) for _, leaf in leaves)
        for count, what, most in (
            (len(leaves), "parts", MAX_ARRAYS),
            (size, "elements", MAX_ELEMENTS),
            (choices, "choices in Discrete and MultiDiscrete", MAX_CHOICES),
        ):
            if count > most:
                fault = f"{space} has {count:,} {what}; at most {most:,} are allowed"
        if not size:
            fault = f"the observation space {space} has no element"
    if fault:
        raise UnsupportedSpaceError(
            f"{fault}. Wrap the environment in a gymnasium.ObservationWrapper; "
            "docs/environments.md shows how."
        )


def _structure_fault(space: spaces.Space, place: str, level: int) -> str:
    """Why Dicts and Tuples can't be used; "" if they can."""
    if level > MAX_LEVELS:
        return f"{place} is nested too deeply; at most {MAX_LEVELS} levels are allowed"
    parts: Any = ()
    if isinstance(space, spaces.Dict):
        parts = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
    for key, part in parts:
        if isinstance(space, spaces.Dict):
            text = key.encode(errors="ignore") if isinstance(key, str) else b"\0"
            if b"\0" in text or len(text) > MAX_KEY_BYTES or text.decode() != key:
                return (
                    f"{place} is a Dict with the key {key!r:.99}; keys must be str of "
                    f"at most {MAX_KEY_BYTES} bytes of UTF-8, without a zero byte"
                )
        if fault := _structure_fault(part, f"{place}[{key!r}]", level + 1):
            return fault
    return ""


def _leaf_fault(leaf: spaces.Space) -> str:
    """Why an elementary space can't be stored or sent; "" if it can."""
    if not isinstance(leaf, _ELEMENTARY_SPACES):
        return (
            "allowed are Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple "
            "of those"
        )
    dtype = np.dtype(leaf.dtype)
    if not dtype.isnative or dtype.name not in _DTYPES:
        return (
            f"its dtype is {dtype}; allowed are bool, integers of 8 to 64 bits, "
            "float16, float32 and float64, in the byte order of this machine"
        )
    if len(leaf.shape or ()) > MAX_DIMENSIONS:
        return f"at most {MAX_DIMENSIONS} dimensions are allowed"
    if isinstance(leaf, spaces.MultiDiscrete) and (
        leaf.nvec.ndim != 1 or not len(leaf)
    ):
        return "a MultiDiscrete needs one dimension, and at least one element"
    start = np.abs(np.asarray(getattr(leaf, "start", 0), np.float64))
    if start.max(initial=0) + _num_choices(leaf) > MAX_START:
        return "its start is too large: 2**53 is the largest number"
    return ""


def _num_choices(space: spaces.Space) -> int:
    """The sum of all n of a Discrete or MultiDiscrete; else 0."""
    sizes = getattr(space, "nvec", getattr(space, "n", 0))
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return 0
    return sum(map(int, np.ravel(sizes)))


def check_action_space(space: spaces.Space) -> None:
    """Raises UnsupportedSpaceError unless there is a policy for `space`."""
    allowed = isinstance(space, _ELEMENTARY_SPACES) and 0 not in (space.shape or ())
    if isinstance(space, spaces.Box) and not np.issubdtype(space.dtype, np.floating):
        allowed = False
    fault = _leaf_fault(space) if allowed else ""
    count = max(_num_choices(space), math.prod(space.shape or ()))
    if allowed and count > MAX_ACTION_NUMBERS:
        fault = f"it has {count:,} numbers, at most {MAX_ACTION_NUMBERS:,}"
    if not allowed or fault:
        raise UnsupportedSpaceError(
            f"action has the unsupported space {space}{fault and ': '}{fault}; allowed "
            "are Discrete, MultiDiscrete of one dimension, MultiBinary, and Box of "
            "floats, none of them empty. Wrap the environment in a "
            "gymnasium.ActionWrapper."
        )


def policy_space(space: spaces.Space) -> spaces.Space:
    """The action space that a policy sees: a MultiBinary is a choice for each bit."""
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiDiscrete([2] * math.prod(space.shape))
    return space


def plain_space(space: spaces.Space) -> spaces.Space:
    """The same space without what subclasses add, which may not be picklable."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict([(key, plain_space(x)) for key, x in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([plain_space(x) for x in space.spaces])
    if isinstance(space, spaces.Box):
        return spaces.Box(space.low, space.high, space.shape, space.dtype.type)
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n), start=int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec, space.dtype.type, start=space.start)
    assert isinstance(space, spaces.MultiBinary)
    return spaces.MultiBinary(space.shape or ())
