"""Checks the flags that environment servers and learner share: addresses, TLS, token.

Environment machines import this module, so it does not load torch.
"""

from __future__ import annotations

import argparse
import logging
import os
import stat
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchbeast.base.errors import FlagError, UserError
from torchbeast.flags import PRIVATE_FOLDER
from torchbeast.runs.flagset import Flags

if TYPE_CHECKING:
    import libtorchbeast

log = logging.getLogger(__name__)


class ServerError(UserError, RuntimeError):
    """An environment server did not start, crashed too often, or is refused."""


def choose_side(flags: Flags) -> None:
    """Drops a saved --listen or --server_addresses if the other one was typed.

    Raises:
      FlagError: both are given.
    """
    if not (flags.listen and flags.server_addresses):
        return
    typed = flags.typed & {"listen", "server_addresses"}
    if typed == {"listen"}:
        flags.server_addresses = None
    elif typed == {"server_addresses"}:
        flags.listen = None
    else:
        raise FlagError(
            "give --listen, to wait for environments, or --server_addresses, to "
            "connect to them, but not both"
        )


def uses_tls(flags: argparse.Namespace) -> bool:
    """Whether connections to host:port addresses use TLS."""
    names = ("tls", "tls_ca", "tls_cert", "tls_key", "tls_server_name")
    return any(getattr(flags, name) for name in names)


def security(flags: argparse.Namespace) -> libtorchbeast.Security:
    """The connection flags for libtorchbeast.

    Raises:
      FlagError: one of the files can't be used.
    """
    import libtorchbeast  # may not be built

    return libtorchbeast.Security(
        tls=flags.tls,
        tls_ca=flags.tls_ca,
        tls_cert=flags.tls_cert,
        tls_key=flags.tls_key,
        tls_server_name=flags.tls_server_name,
        token=check_security(flags),
        insecure=flags.insecure,
    )


def check_security(flags: argparse.Namespace) -> str | None:
    """Checks the files of the flags. Returns the token, if there is one.

    Raises:
      FlagError: one of the files can't be used.
    """
    check_certificates(flags)
    if not flags.token_file:
        return None
    try:
        with open(flags.token_file, encoding="utf-8") as file:
            token = file.read().strip()
    except OSError as error:
        raise FlagError(f"--token_file {flags.token_file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FlagError(
            f"--token_file {flags.token_file} is not text in UTF-8: {error}"
        ) from error
    if not token:
        raise FlagError(f"--token_file {flags.token_file} is empty")
    return token


def warn_of_exposed_token(flags: argparse.Namespace, addresses: Sequence[str]) -> None:
    """Logs a warning if others can read the token: in its file, or in the network."""
    if not flags.token_file:
        return
    mode = os.stat(flags.token_file).st_mode
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning(
            "Other users can read --token_file %s (its mode is %03o). Use chmod 600.",
            *(flags.token_file, stat.S_IMODE(mode)),
        )
    tcp = [address for address in addresses if not address.startswith("unix:")]
    if tcp and not uses_tls(flags):
        log.warning(
            "The token of --token_file is sent to %s in clear text. Anyone who can "
            "read this traffic, or who listens there first, gets it. Use TLS.",
            ", ".join(dict.fromkeys(tcp)),
        )


def make_private_folder(pipes_basename: str) -> None:
    """Makes PRIVATE_FOLDER, if the sockets are in it.

    Raises:
      FlagError: the folder can't be made, or it belongs to another user.
    """
    if not pipes_basename.startswith(f"unix:{PRIVATE_FOLDER}/"):
        return
    try:
        os.mkdir(PRIVATE_FOLDER, mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise FlagError(
            f"can't make the folder {PRIVATE_FOLDER} for the servers' sockets: "
            f"{error.strerror}; give --pipes_basename unix:PATH with another path"
        ) from error
    found = os.lstat(PRIVATE_FOLDER)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise FlagError(
            f"{PRIVATE_FOLDER} is not your folder (it belongs to user {found.st_uid}), "
            "so sockets there are not safe; give --pipes_basename unix:PATH with a "
            "path in your own folder"
        )
    os.chmod(PRIVATE_FOLDER, 0o700)


def check_certificates(flags: argparse.Namespace) -> None:
    """Raises FlagError if a TLS file can't be used; gRPC gives no reason."""
    if not (flags.tls_cert or flags.tls_key or flags.tls_ca):
        return
    import ssl  # slow

    if bool(flags.tls_cert) != bool(flags.tls_key):
        given, missing = ("cert", "key") if flags.tls_cert else ("key", "cert")
        raise FlagError(f"--tls_{given} has no effect without --tls_{missing}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # accept weak certificates
    checking = f"--tls_cert {flags.tls_cert} and --tls_key {flags.tls_key}"
    try:
        if flags.tls_cert:
            # The lambda gives an empty password, so that ssl does not ask for one.
            context.load_cert_chain(flags.tls_cert, flags.tls_key, lambda: "")
        checking = f"--tls_ca {flags.tls_ca}"
        if flags.tls_ca:
            context.load_verify_locations(flags.tls_ca)
    except OSError as error:  # an SSLError is one, too
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        raise FlagError(
            f"{checking} can't be used: {reason.lower().replace('_', ' ')}. Each must "
            "be a PEM file, and the key that of the certificate"
        ) from error
