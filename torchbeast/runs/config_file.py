"""--config: flags from a file."""

import argparse
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchbeast.base.errors import FlagError, using
from torchbeast.presets import BEFORE_THE_FLAG_EXISTED, current_name
from torchbeast.runs import trust

# Flags of a meta.json that name a place, and not what the run does.
OF_ITS_RUN = {
    *("mode", "savedir", "xpid", "config", "video", "checkpoint"),
    *("pipes_basename", "listen", "bind", "join", "server_addresses", "ray_address"),
}


# Only the command line says whether a file is trusted.
NEVER_IN_A_FILE = ("help", "config", "trust_checkpoint_env")


class ConfigFile(NamedTuple):
    """The command line that a file stands for.

    Attributes:
      place: of the file, for messages.
      signed: whether it has the signature of this user, see trust.py.
    """

    words: list[str]
    place: str
    signed: bool


def find(parser: argparse.ArgumentParser, argv: Sequence[str]) -> ConfigFile:
    """The file of --config; without this flag it has no words.

    Raises:
      FlagError: the file can't be read, or names an unknown flag.
    """
    if not any(action.dest == "config" for action in parser._actions):
        return ConfigFile([], "", signed=False)
    only = argparse.ArgumentParser(add_help=False)
    only.add_argument("--config")
    flags, _ = only.parse_known_args(argv)
    if not flags.config:
        return ConfigFile([], "", signed=False)
    return read(parser, Path(flags.config))


def read(parser: argparse.ArgumentParser, path: Path) -> ConfigFile:
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
        words = _command_line(parser, path, values, is_meta)
    return ConfigFile(words, f"--config {path}", signed)


def _command_line(
    parser: argparse.ArgumentParser, path: Path, values: dict[str, Any], is_meta: bool
) -> list[str]:
    actions = {
        action.dest: action
        for action in parser._actions
        if action.option_strings and action.dest not in NEVER_IN_A_FILE
    }
    words = []
    for name, value in values.items():
        if name in actions:
            words += _words(path, actions[name], value)
        elif not is_meta:  # a meta.json may be that of another variant
            close = difflib.get_close_matches(name, actions, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise FlagError(f"--config {path}: there is no flag {name}.{hint}")
    return words


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


def _words(path: Path, action: argparse.Action, value: Any) -> list[str]:
    """The words that set one flag; none if the value is that of a flag left out."""
    option = action.option_strings[0]
    if value is None:
        return []
    if action.nargs != 0:
        if isinstance(value, dict):
            value = json.dumps(value)
        items = value if isinstance(value, list) else [value]
        for item in items:
            if not isinstance(item, str | int | float):  # TOML has dates
                raise FlagError(
                    f"--config {path}: {action.dest} is {str(value)[:80]}, which is "
                    f"of the type {type(item).__name__}. Allowed are texts in quotes "
                    "and numbers"
                )
        value = ",".join(map(str, items))
        return [f"{option}={value}"]
    if not isinstance(value, bool):
        raise FlagError(
            f"--config {path}: {action.dest} must be true or false, got {value!r}"
        )
    if value:
        return [option]
    no = [name for name in action.option_strings if name.startswith("--no-")]
    return no[:1]
