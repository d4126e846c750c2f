"""Data never chooses what code runs: which values of a file are used.

A checkpoint, a meta.json and a .toml file hold values of flags. Numbers and choices are
harmless. A text may name a module to import, its arguments, a file or a machine. A run
takes a text from a file only if

    the user typed it, or
    the file is signed with the user's own key: then the user typed it for that run, or
    the user typed --trust_checkpoint_env.

Importing this module does not load torch.
"""

import contextlib
import functools
import hashlib
import hmac
import json
import logging
import os
import pathlib
import re
import secrets
import stat
import tempfile
from collections.abc import Mapping
from typing import Any

from torchbeast.base.errors import FlagError
from torchbeast.base.flag import CODE_FLAGS, Flag

log = logging.getLogger(__name__)

KEY_BYTES = 32
# Texts that can only name a run in --savedir or a device of this machine.
HARMLESS = {"xpid", "learner_device", "actor_device"}
SWITCHES = {"insecure"}  # switch off a protection


class UntrustedError(FlagError):
    """A file names code, a file or a machine, and the user has not allowed that."""


def key_path() -> pathlib.Path:
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(folder):
        folder = os.path.expanduser("~/.config")
    return pathlib.Path(folder, "torchbeast", "key")


def sign(values: Mapping[str, Any]) -> str | None:
    """The signature of a run's flags; makes the key at its first use.

    Returns None and logs one warning if there is no key and none can be made.
    """
    try:
        return _signature(values, _read_key(make=True))
    except OSError as error:
        _warn_once(
            f"The run can't be signed with {key_path()}: {error}. If it names code or "
            "files, a resume or a test has to type these flags again, or needs "
            "--trust_checkpoint_env."
        )
        return None


def is_signed(values: Mapping[str, Any], signature: Any) -> bool:
    """Whether `sign` made the signature for these flags, with this user's key."""
    try:
        expected = _signature(values, _read_key())
    except OSError:
        return False
    return isinstance(signature, str) and hmac.compare_digest(
        signature.encode(), expected.encode()
    )


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def _signature(values: Mapping[str, Any], key: bytes) -> str:
    signed = {k: v for k, v in values.items() if not _is_number(v) or k in SWITCHES}
    pairs = sorted((str(k), v) for k, v in signed.items())
    text = f"torchbeast flags\n{json.dumps(pairs, default=str)}"
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _is_number(value: Any) -> bool:
    """Whether it is a number, a switch or None. meta.json has some as texts."""
    return isinstance(value, int | float | None) or value in ("inf", "-inf", "nan")


def _read_key(make: bool = False) -> bytes:
    """Raises OSError if there is no key, or none that only this user can read."""
    path = key_path()
    if not path.is_absolute():
        raise FileNotFoundError("the home folder is unknown")
    if make and not path.exists():
        _make_key(path)
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        key = file.read()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(f"other users can read or change it: chmod 600 {path}")
    if len(key) < KEY_BYTES:
        raise OSError(f"it has {len(key)} bytes, expected {KEY_BYTES}: remove it")
    return key


def _make_key(path: pathlib.Path) -> None:
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # with mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(temporary, path)  # the whole key appears at once
    finally:
        os.unlink(temporary)


def risky(declared: Mapping[str, Flag], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those values of flags that may name code, a file or another machine."""
    return {
        name: value
        for name, value in values.items()
        if name in declared and not _is_harmless(declared[name], value)
    }


def _is_harmless(declared: Flag, value: Any) -> bool:
    name = declared.name
    if value is None or name in HARMLESS or declared.choices:
        return True
    if isinstance(value, int | float):
        return name not in SWITCHES or value == declared.default
    if isinstance(value, str | list | tuple) and value in ("", declared.default):
        return True
    if name in ("env", "core"):  # without a module: what the packages register
        return isinstance(value, str) and ":" not in value
    return name == "env_kwargs" and isinstance(value, str) and value == "{}"


def check(place: str, values: Mapping[str, Any]) -> None:
    """Raises UntrustedError if a file has values that are `risky`."""
    if not values:
        return
    named = " ".join(f"--{name} {value}" for name, value in sorted(values.items()))
    code = ",".join(str(values.get(name)) for name in CODE_FLAGS)
    modules = sorted(set(re.findall(r"(?:^|,)\s*([\w.]+):", code)))
    effect = f", which imports the code of {', '.join(modules)}" if modules else ""
    if values.get("env_kwargs"):
        effect += f", with the arguments {values['env_kwargs']}"
    raise UntrustedError(
        f"{place} names {named}{effect}. You have not typed this, and the file is not "
        f"signed with your key {key_path()}: somebody else may have written or changed "
        "it. If you trust it, add --trust_checkpoint_env (in Python: load_agent(..., "
        "trust_env=True)), or type these flags with the values that you want"
    )
