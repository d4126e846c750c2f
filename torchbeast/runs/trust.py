"""Data never chooses what code runs: which values of a file are used.

A checkpoint, a meta.json and a .toml file hold values of flags. Numbers and choices are
harmless; a text may name a module to import, its arguments, a file or a machine. It is
used only if the user typed it, or typed --trust_checkpoint_env, or if the file is
signed with the user's own key: then the user typed it for that run.
"""

import contextlib
import hmac
import json
import logging
import os
import secrets
import tempfile
from collections.abc import Mapping
from typing import Any

from torchbeast.base.errors import FlagError
from torchbeast.base.flag import Flag

log = logging.getLogger(__name__)


class UntrustedError(FlagError):
    """A file names code, a file or a machine, and the user has not allowed that."""


def key_path() -> str:
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    folder = folder if os.path.isabs(folder) else os.path.expanduser("~/.config")
    return os.path.join(folder, "torchbeast", "key")


def sign(values: Mapping[str, Any]) -> str | None:
    """The signature of a run's flags; None, and a warning, if there can be no key."""
    path = key_path()
    try:
        if not os.path.exists(path):
            os.makedirs(folder := os.path.dirname(path), 0o700, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder) as file:  # mode 0600
                file.write(secrets.token_bytes(32))
                file.flush()
                with contextlib.suppress(FileExistsError):  # another was faster
                    os.link(file.name, path)  # the whole key appears at once
        with open(path, "rb") as file:
            status, key = os.fstat(file.fileno()), file.read()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077 or len(key) < 32:
            raise OSError("others can read or change it, or it is too short: remove it")
    except OSError as error:
        log.warning("The run can't be signed with %s: %s", path, error)
        return None
    number = int | float | None  # a switch, too, but that of a protection counts
    signed = {
        str(k): x
        for k, x in values.items()
        if k == "insecure" or not (isinstance(x, number) or x in ("inf", "-inf"))
    }
    text = f"torchbeast flags\n{json.dumps(sorted(signed.items()), default=str)}"
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def is_signed(values: Mapping[str, Any], signature: Any) -> bool:
    """Whether `sign` made the signature for these flags, with this user's key."""
    own = sign(values) if os.path.exists(key_path()) else None  # to read makes no key
    return own is not None and own == signature


def is_harmless(flag: Flag, x: Any) -> bool:
    """Whether this value of a flag can name no code, no file and no other machine."""
    if flag.name in ("env", "core"):  # an id of a package, a kind of ours
        return ":" not in x
    # A run in --savedir, a device of this machine.
    is_local = flag.name in ("xpid", "learner_device", "actor_device")
    is_number = isinstance(x, int | float) and flag.name != "insecure"
    return bool(flag.choices) or is_local or is_number or x in ("", "{}", flag.default)


def refuse(place: str, values: Mapping[str, Any]) -> None:
    """Raises UntrustedError for values in a file that are not harmless, if any."""
    if named := " ".join(f"--{name} {x}" for name, x in sorted(values.items())):
        raise UntrustedError(
            f"{place} names {named}, which may run code or open files, and you have "
            "not signed it. Type these flags; or, if you trust it, add "
            "--trust_checkpoint_env (in Python: load_agent(..., trust_env=True))"
        )
