"""--config: flags from a file."""

import argparse
import difflib
import json
from pathlib import Path
from typing import Any, NamedTuple

from torchbeast.base.errors import FlagError, using
from torchbeast.base.flag import Flag, FlagParser
from torchbeast.presets import BEFORE_THE_FLAG_EXISTED, current_name
from torchbeast.runs import trust

# Flags of a meta.json that name a place, and not what the run does.
OF_ITS_RUN = {
    *("mode", "savedir", "xpid", "config", "video", "checkpoint"),
    *("pipes_basename", "listen", "bind", "join", "server_addresses", "ray_address"),
}


# Only the command line says whether a file is trusted.
NEVER_IN_A_FILE = ("config", "trust_checkpoint_env")


class ConfigFile(NamedTuple):
    """What a file says, as if it had been typed.

    Attributes:
      place: of the file, for messages.
      signed: whether it has the signature of this user, see trust.py.
    """

    values: dict[str, Any]
    place: str
    signed: bool


def find(parser: FlagParser, path: str | None) -> ConfigFile:
    """The file of --config; without this flag it has no values.

    Raises:
      FlagError: the file can't be read, or names an unknown flag.
    """
    return read(parser, Path(path)) if path else ConfigFile({}, "", signed=False)


def read(parser: FlagParser, path: Path) -> ConfigFile:
    """Reads a TOML file, or a run's meta.json."""
    is_meta, signed = path.suffix == ".json", False
    with using(f"--config {path}"):
        text = path.read_text(encoding="utf-8")
        if is_meta:
            meta = json.loads(text)
            values = _flags_of_run(meta)
            signed = trust.is_signed(meta["args"], meta.get("flags_signature"))
        else:
            values = _parse_toml(text)
        found = {}
        allowed = {k: x for k, x in parser.declared.items() if k not in NEVER_IN_A_FILE}
        for name, value in values.items():
            if name in allowed:
                found[name] = _convert(parser, path, allowed[name], value)
            elif not is_meta:  # a meta.json may be that of another variant
                close = difflib.get_close_matches(name, allowed, n=1)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise FlagError(f"--config {path}: there is no flag {name}.{hint}")
    # None is the value of a flag left out. Some switches can only be left out, too.
    found = {k: v for k, v in found.items() if v is not None}
    return ConfigFile(found, f"--config {path}", signed)


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        import tomllib  # from Python 3.11 on
    except ImportError as error:
        raise FlagError("--config with a .toml file needs Python 3.11") from error
    return tomllib.loads(text)


def _flags_of_run(meta: Any) -> dict[str, Any]:
    if not isinstance(meta, dict) or not isinstance(meta.get("args"), dict):
        raise ValueError("this is not the meta.json of a run: it has no args")
    chosen_there = {*OF_ITS_RUN, *meta.get("flags_left_open", ())}
    args = {**BEFORE_THE_FLAG_EXISTED, **meta["args"]}
    args["preset"] = current_name(args.get("preset"))
    return {k: v for k, v in args.items() if k not in chosen_there}


def _convert(parser: FlagParser, path: Path, declared: Flag, value: Any) -> Any:
    """The value as if it had been typed; None if the flag counts as left out."""
    if value is None:
        return None
    if declared.converter is bool:
        if not isinstance(value, bool):
            raise FlagError(
                f"--config {path}: {declared.name} must be true or false, got {value!r}"
            )
        return value if value or declared.can_be_off else None
    if isinstance(value, dict):
        value = json.dumps(value)
    items = value if isinstance(value, list) else [value]
    for item in items:
        if not isinstance(item, str | int | float):  # TOML has dates
            raise FlagError(
                f"--config {path}: {declared.name} is {str(value)[:80]}, which is "
                f"of the type {type(item).__name__}. Allowed are texts in quotes "
                "and numbers"
            )
    try:
        return declared.convert(",".join(map(str, items)))
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument {'/'.join(declared.options)}: {error}")
