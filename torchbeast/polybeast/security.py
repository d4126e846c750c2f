"""TLS, token and private sockets, for both sides of a connection. Loads no torch."""

import argparse
import contextlib
import fcntl
import os
import re
import socket
import stat
import time
from pathlib import Path
from typing import Any

from torchbeast.base.errors import FlagError, UserError, using
from torchbeast.polybeast.flags import PRIVATE_FOLDER, Connection

CONNECT_SECONDS = 5.0  # time limit of a connection, and of each step of a handshake
TLS_FLAGS = [name for name in Connection.declared() if name.startswith("tls")]


class ServerError(UserError, RuntimeError):
    """An environment server did not start, crashed too often, or is refused."""


# --- Token and sockets ----------------------------------------------------------------


def security(flags: argparse.Namespace) -> Any:
    """A libtorchbeast.Security of the flags. Raises FlagError for unusable files."""
    from libtorchbeast_arguments import read_file

    import libtorchbeast  # may not be built

    tls, token = {name: getattr(flags, name) for name in TLS_FLAGS}, b""
    try:
        if flags.token_file:
            token = read_file("token_file", flags.token_file).strip()
            if not re.fullmatch(rb"[!-~]+", token):  # it travels in a header
                raise ValueError("token_file must have printable ASCII, no spaces")
        tls["token"] = token.decode() or None
        return libtorchbeast.Security(**tls, insecure=flags.insecure)
    except ValueError as error:  # begins with an argument's name
        raise FlagError(f"--{error}") from None


def make_private_folder(pipes_basename: str) -> None:
    """Makes PRIVATE_FOLDER for sockets, and removes those that dead servers left there.

    Raises FlagError if it can't be ours.
    """
    if not pipes_basename.startswith(f"unix:{PRIVATE_FOLDER}/"):
        return
    with using(f"--pipes_basename {pipes_basename}"):
        with contextlib.suppress(FileExistsError):
            os.mkdir(PRIVATE_FOLDER, mode=0o700)
        found = os.lstat(PRIVATE_FOLDER)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise FlagError(
            f"{PRIVATE_FOLDER} is not your folder (it belongs to user {found.st_uid}): "
            "give --pipes_basename unix:PATH with a path in your own folder"
        )
    os.chmod(PRIVATE_FOLDER, 0o700)
    for lock in Path(PRIVATE_FOLDER).glob("*.lock"):
        with contextlib.suppress(OSError):
            if time.time() - lock.stat().st_mtime > 60:  # not while its server starts
                remove_socket(str(lock).removesuffix(".lock"))


def remove_socket(path: str) -> None:
    """Removes a socket and its lock, unless a server has the lock."""
    with contextlib.suppress(OSError), open(path + ".lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if Path(path).is_socket():
            os.unlink(path)
        os.unlink(lock.name)


# --- TLS ------------------------------------------------------------------------------


def uses_tls(flags: argparse.Namespace) -> bool:
    return any(getattr(flags, name) for name in TLS_FLAGS)


def tls_context(flags: argparse.Namespace) -> Any:
    """TLS of the side that connects, as gRPC has it."""
    import ssl  # slow

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # accept weak certificates
    context.set_alpn_protocols(["h2"])  # gRPC ends the handshake without it
    # A certificate in --tls_ca is trusted even if another has signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if not uses_tls(flags):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if flags.tls_cert or flags.tls_key:
        # An empty password, so that ssl does not ask for one.
        files = flags.tls_cert or "", flags.tls_key or ""
        context.load_cert_chain(*files, password="")
    if flags.tls_ca:
        context.load_verify_locations(flags.tls_ca)
    return context


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)


def is_off(address: str) -> bool:
    """Whether no connection is possible: asking it would cost a whole timeout."""
    with contextlib.suppress(ValueError, OverflowError):  # no address; probe says so
        try:
            if not address.startswith("unix:"):
                connect(address).close()
        except OSError:
            return True
    return False


def tls_fault(address: str, flags: argparse.Namespace) -> str | None:
    """Why a connection with the listener at `address` can never work, if it is TLS.

    gRPC gives no reason, so this tries a handshake itself. None: it works, nobody
    listens, or there is another reason.
    """
    import ssl  # slow

    encrypts = uses_tls(flags)
    name = flags.tls_server_name or address.rpartition(":")[0].strip("[]")
    try:
        context = tls_context(flags)
        if not flags.tls_ca:
            context.load_default_certs()
        for _ in range(2):  # a listener that just exits also closes, but only once
            with (
                connect(address) as plain,
                context.wrap_socket(plain, server_hostname=name) as encrypted,
            ):
                # With TLS 1.3 the other side refuses our certificate only now.
                if encrypts and encrypted.recv(1):
                    return None
        why = "it ends the connection" if encrypts else "it speaks TLS"
    except ssl.SSLCertVerificationError as error:
        why = f"the certificate of the other side is not valid: {error.verify_message}"
    except ssl.SSLError as error:
        reason = error.reason or ""
        if encrypts and reason in ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG"):
            why = "it speaks plain TCP"
        elif not encrypts and "ALERT" in reason:
            why = "it speaks TLS"
        else:
            return None
    except (OSError, ValueError):  # files may just be renewed
        return None
    return (
        f"both sides do not agree on TLS: {why.rstrip('.')}. Give both the --tls flags "
        "or none; --tls_ca asks the other side for a valid certificate of that signer. "
        f"This side trusts --tls_ca {flags.tls_ca}, expects the name {name} "
        f"(--tls_server_name), and has --tls_cert {flags.tls_cert}"
    )
