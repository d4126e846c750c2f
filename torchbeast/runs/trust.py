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
import secrets
import stat
import tempfile
from collections.abc import Mapping
from typing import Any

from torchbeast.base.errors import FlagError
from torchbeast.base.flag import Flag

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
    """The signature of a run's flags; None, and one warning, if there can be no key."""
    try:
        return _signature(values, make_key=True)
    except OSError as error:
        _warn_once(
            f"The run can't be signed with {key_path()}: {error}. If it names code or "
            "files, a resume or a test needs --trust_checkpoint_env."
        )
        return None


def is_signed(values: Mapping[str, Any], signature: Any) -> bool:
    """Whether `sign` made the signature for these flags, with this user's key."""
    with contextlib.suppress(OSError):
        expected = _signature(values).encode()
        return hmac.compare_digest(str(signature).encode(), expected)
    return False


_warn_once = functools.cache(log.warning)


def _signature(values: Mapping[str, Any], make_key: bool = False) -> str:
    """Raises OSError if there is no key, or none that only this user can read."""
    path = key_path()
    if make_key and path.is_absolute() and not path.exists():
        _make_key(path)
    with path.open("rb") as file:
        status, key = os.fstat(file.fileno()), file.read()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(f"other users can read or change it: chmod 600 {path}")
    if len(key) < KEY_BYTES:
        raise OSError(f"it has {len(key)} bytes, expected {KEY_BYTES}: remove it")
    # meta.json has infinite numbers as texts.
    numbers = int | float | None
    signed = {
        str(k): v
        for k, v in values.items()
        if k in SWITCHES or not (isinstance(v, numbers) or v in ("inf", "-inf", "nan"))
    }
    text = f"torchbeast flags\n{json.dumps(sorted(signed.items()), default=str)}"
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


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

    def is_harmless(flag: Flag, value: Any) -> bool:
        if flag.choices or flag.name in HARMLESS or value in (None, "", flag.default):
            return True
        if flag.name in ("env", "core"):  # an id of a package, a kind of ours
            return isinstance(value, str) and ":" not in value
        if flag.name == "env_kwargs":
            return value == "{}"
        return isinstance(value, int | float) and flag.name not in SWITCHES

    known = values.keys() & declared.keys()
    return {k: values[k] for k in known if not is_harmless(declared[k], values[k])}


def check(place: str, values: Mapping[str, Any]) -> None:
    """Raises UntrustedError if a file has values that are `risky`."""
    if values:
        named = " ".join(f"--{name} {value}" for name, value in sorted(values.items()))
        raise UntrustedError(
            f"{place} names {named}, which may run code or open files. You have not "
            f"typed this, and the file is not signed with your key {key_path()}: "
            "somebody else may have written or changed it. If you trust it, add "
            "--trust_checkpoint_env (in Python: load_agent(..., trust_env=True)), or "
            "type these flags with the values that you want"
        )
