"""Reads meta.json, and completes that of a run that was killed at its end.

file_writer.py writes it.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import pathlib
from typing import Any

from torchbeast.records.folder import atomic_write, writing

log = logging.getLogger(__name__)

DEEPEST = 100  # levels of meta.json
# The types of what is used of meta.json, and those of a list's items.
_OPTIONAL_DICT, _OPTIONAL_STR = (dict | None, None), (str | None, None)
OF_FLAGS = ("args", "flags", "preset_changes")
META_TYPES: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(OF_FLAGS, (dict, None)),
    **dict.fromkeys(("git", "hardware", "protocol"), _OPTIONAL_DICT),
    **dict.fromkeys(("date_start", "date_end", "preset"), _OPTIONAL_STR),
    **dict.fromkeys(("first_step", "last_step"), (int | None, None)),
    "starts": (list, dict),
    "resumed": (list, str),
    "flags_left_open": (list, str),
}


def strict_json(nested: Any) -> Any:
    """Infinity and NaN, which JSON lacks, as "inf", "-inf" and "nan"."""
    if isinstance(nested, dict):
        return {k: strict_json(x) for k, x in nested.items()}
    if isinstance(nested, list | tuple):
        return [strict_json(x) for x in nested]
    is_number = isinstance(nested, float)
    return str(nested) if is_number and not math.isfinite(nested) else nested


def _with_infinities(nested: Any, of_flags: bool = False, depth: int = 0) -> Any:
    """The reverse of strict_json, for the values of flags."""
    if depth > DEEPEST:
        raise ValueError("it is nested too deeply")
    if isinstance(nested, dict):
        return {
            k: _with_infinities(x, of_flags or k in OF_FLAGS, depth + 1)
            for k, x in nested.items()
        }
    if isinstance(nested, list):
        return [_with_infinities(x, of_flags, depth + 1) for x in nested]
    return float(nested) if of_flags and nested in ("inf", "-inf") else nested


def read_meta(folder: pathlib.Path) -> dict[str, Any]:
    """The content of meta.json; {} if the file is missing or damaged.

    Its values have the types in META_TYPES. Those of flags may have any.
    """
    path = folder / "meta.json"
    try:
        return parse_meta(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is damaged and is ignored: %s", path, error)
        return {}


def parse_meta(text: str) -> dict[str, Any]:
    """The content of a meta.json.

    Raises:
      ValueError, RecursionError: this is not the content of one.
    """
    meta = _with_infinities(json.loads(text))
    if not isinstance(meta, dict):
        raise ValueError(f"it is no object, but {str(meta)[:80]}")
    _check_types(meta)
    for start in meta.get("starts", ()):
        _check_types(start)
    return meta


def _check_types(part: dict[str, Any]) -> None:
    for name, value in part.items():
        kind, of = META_TYPES.get(name, (object, None))
        if not isinstance(value, kind) or (
            of and not all(isinstance(item, of) for item in value)
        ):
            raise ValueError(f"{name} is {json.dumps(value)[:80]}")


def complete_meta(folder: pathlib.Path, last_step: int) -> None:
    """Completes the meta.json of a run that was killed after its last work.

    Raises:
      RunFileError: it can't be written.
    """
    if not (meta := read_meta(folder)):
        return
    end = {"successful": True, "date_end": now()}
    meta |= end
    if starts := meta.get("starts"):
        starts[-1] |= end | {"last_step": last_step}
    path = folder / "meta.json"
    with writing(path), atomic_write(path) as file:
        file.write(f"{json.dumps(strict_json(meta), indent=2)}\n".encode())


def now() -> str:
    """The date in UTC, for meta.json and test.json."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
