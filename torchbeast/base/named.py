"""Objects that flags name: MODULE:NAME, with a JSON object of arguments after it."""

import contextlib
import contextvars
import importlib
import inspect
import json
import operator
import re
from typing import Any

from torchbeast.base.errors import FlagError, MissingPackageError


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


def find_object(flag: str, path: str) -> Any:
    """The object package.module:name. `flag` begins the messages of errors.

    Raises:
      FlagError: the module has no such object.
      MissingPackageError: there is no such module.
    """
    module_name, _, name = path.partition(":")
    if not module_name or module_name.startswith(".") or not name:
        raise FlagError(f"{flag}: package.module:Class needs the full module name")
    try:  # in a context of its own, where np.seterr() has no effect outside
        context = contextvars.copy_context()
        module = context.run(importlib.import_module, module_name)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{flag}: {error}. Install its package, or run in the directory of your "
            "own file"
        ) from error
    try:
        return operator.attrgetter(name)(module)
    except AttributeError as error:
        raise FlagError(f"{flag}: {error}") from error


def call_named(flag: str, function: Any, /, *args: Any, **arguments: Any) -> Any:
    """Calls what a flag names. Raises FlagError if it does not take the arguments."""
    try:
        with contextlib.suppress(ValueError):  # some written in C have no signature
            inspect.signature(function).bind(*args, **arguments)
    except TypeError as error:
        raise FlagError(
            f"{flag} can't be made with the arguments {arguments}: {error}. "
            "--env_kwargs passes arguments to --env, a JSON object after the name to "
            "all others"
        ) from None
    return function(*args, **arguments)


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
    """Calls what find_named() finds; None without text. Raises UserError as they do."""
    if not text:
        return None
    flag, function, arguments = find_named(flag, text)
    return call_named(flag, function, *args, **arguments)
