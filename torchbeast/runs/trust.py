"""Data never chooses what code runs: which values of a file are used.

A checkpoint, a meta.json and a .toml file hold values of flags. Numbers and choices are
harmless; a text may name a module to import, its arguments, a file or a machine. A text
of a file is used only if the user typed it, or typed --trust_checkpoint_env, or if the
file is signed with the user's own key: then the user typed it for that run.
"""

import contextlib
import hmac
import json
import logging
import os
import pathlib
import secrets
import tempfile
from collections.abc import Mapping
from typing import Any

from torchbeast.base.errors import FlagError
from torchbeast.base.flag import Flag

log = logging.getLogger(__name__)

# Texts that can only name a run in --savedir or a device of this machine.
HARMLESS = {"xpid", "learner_device", "actor_device"}
SWITCHES = {"insecure"}  # switch off a protection


class UntrustedError(FlagError):
    """A file names code, a file or a machine, and the user has not allowed that."""


def key_path() -> pathlib.Path:
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    folder = folder if os.path.isabs(folder) else os.path.expanduser("~/.config")
    return pathlib.Path(folder, "torchbeast", "key")


def sign(values: Mapping[str, Any]) -> str | None:
    """The signature of a run's flags; None, and a warning, if there can be no key."""
    path = key_path()
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # mode 0600
                file.write(secrets.token_bytes(32))
                file.flush()
                with contextlib.suppress(FileExistsError):  # another was faster
                    os.link(file.name, path)  # the whole key appears at once
        return _signature(values)
    except OSError as error:
        log.warning("The run can't be signed with %s: %s", path, error)
        return None


def is_signed(values: Mapping[str, Any], signature: Any) -> bool:
    """Whether `sign` made the signature for these flags, with this user's key."""
    with contextlib.suppress(OSError):
        return hmac.compare_digest(str(signature).encode(), _signature(values).encode())
    return False


def _signature(values: Mapping[str, Any]) -> str:
    """Raises OSError if there is no key, or none that only this user can read."""
    with key_path().open("rb") as file:
        status, key = os.fstat(file.fileno()), file.read()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or len(key) < 32:
        raise OSError("others can read or change it, or it is too short: remove it")
    harmless = int | float | None
    signed = {
        str(k): x
        for k, x in values.items()
        if k in SWITCHES or not (isinstance(x, harmless) or x in ("inf", "-inf"))
    }
    text = f"torchbeast flags\n{json.dumps(sorted(signed.items()), default=str)}"
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def risky(declared: Mapping[str, Flag], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those values of flags that may name code, a file or another machine."""

    def is_harmless(name: str, x: Any) -> bool:
        flag = declared[name]
        if flag.choices or name in HARMLESS or x in ("", "{}", flag.default):
            return True
        if name in ("env", "core"):
            return ":" not in x  # an id of a package, a kind of ours
        return isinstance(x, int | float) and name not in SWITCHES

    return {k: x for k, x in values.items() if not is_harmless(k, x)}


def check(
    place: str,
    signed: bool,
    declared: Mapping[str, Flag],
    values: Mapping[str, Any],
    typed: Mapping[str, Any],
) -> None:
    """Raises UntrustedError if a file has risky values that were not typed."""
    found = risky(declared, {k: values[k] for k in sorted(values.keys() - typed)})
    if found and not signed:
        named = " ".join(f"--{name} {x}" for name, x in found.items())
        raise UntrustedError(
            f"{place} names {named}, which may run code or open files, and you have "
            "not signed it. Type these flags; or, if you trust it, add "
            "--trust_checkpoint_env (in Python: load_agent(..., trust_env=True))"
        )
