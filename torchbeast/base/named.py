"""Objects that flags name: MODULE:NAME, with a JSON object of arguments after it."""

import importlib
import inspect
import json
import operator
import re
from typing import Any

from torchbeast.base.errors import FileError, FlagError, MissingPackageError


def parse_paths(flag: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    """The paths of a flag such as a:F,b:C{"size": [4, 5]}, each with its arguments."""
    found: list[tuple[str, dict[str, Any]]] = []
    while text := text.strip(", "):
        path = re.split("[,{]", text)[0]
        text = text[len(path) :]
        arguments: dict[str, Any] = {}
        if text.startswith("{"):
            try:
                arguments, end = json.JSONDecoder().raw_decode(text)
            except (ValueError, RecursionError) as error:
                why = f"{text:.80} is not a JSON object: {error}"
                raise FlagError(f"{flag} {path}: {why}") from None
            text = text[end:]
        found.append((path.strip(), arguments))
    return found


def find_object(flag: str, path: str) -> Any:
    """The object package.module:name. `flag` begins the messages of errors."""
    module_name, _, name = path.partition(":")
    if not module_name or module_name.startswith(".") or not name:
        raise FlagError(f"{flag}: MODULE:NAME needs the full module name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{flag}: {error}. Install it, or run in the directory of your own file"
        ) from error
    try:
        return operator.attrgetter(name)(module)
    except AttributeError as error:
        raise FlagError(f"{flag}: {error}") from error


def find_named(flag: str, text: str) -> tuple[Any, dict[str, Any]]:
    """The one object that text, MODULE:NAME[JSON], names, and its arguments."""
    paths = parse_paths(flag, text)
    if len(paths) != 1:
        raise FlagError(f"{flag} {text}: it may name one MODULE:NAME[JSON]")
    ((path, arguments),) = paths
    return find_object(f"{flag} {path}", path), arguments


def make_named(flag: str, text: str | None, *args: Any) -> Any:
    """Calls what find_named() finds; None without text."""
    if not text:
        return None
    function, arguments = find_named(flag, text)
    return call_named(f"{flag} {text}", function, *args, **arguments)


def call_named(flag: str, function: Any, *args: Any, **arguments: Any) -> Any:
    """Calls it. FileError: it takes no such arguments; or MissingPackageError."""
    check_call(flag, function, *args, **arguments)
    try:
        return function(*args, **arguments)
    except Exception as error:
        if type(error).__name__ in ("ModuleNotFoundError", "DependencyNotInstalled"):
            raise MissingPackageError(f"{flag}: {error}. Install it") from error
        is_theirs = str(getattr(function, "__module__", "")).startswith("gymnasium.")
        if is_theirs and isinstance(error, ValueError):  # a traceback says no more
            raise FileError(f"{flag}: {error}") from error
        raise


def check_call(flag: str, function: Any, *args: Any, **arguments: Any) -> None:
    """Raises FileError if it can't be called with these arguments."""
    try:
        inspect.signature(function, follow_wrapped=False).bind(*args, **arguments)
    except TypeError as error:
        raise FileError(f"{flag}: {error}") from None
    except ValueError:  # written in C: it has no signature
        pass
