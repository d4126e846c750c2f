"""TLS, token and private sockets, for both sides of PolyBeast's connections.

Environment machines import this module, so it does not load torch.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from torchbeast.base.errors import FlagError, UserError, using
from torchbeast.flags import Flags
from torchbeast.polybeast.env_connection import connect
from torchbeast.polybeast.flags import PRIVATE_FOLDER, Connection

if TYPE_CHECKING:
    import ssl

    import libtorchbeast

log = logging.getLogger(__name__)

TLS_FLAGS = [name for name in Connection.declared() if name.startswith("tls")]
# Reasons of a TLS handshake that the other side answers in plain TCP.
PLAIN = ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")


class ServerError(UserError, RuntimeError):
    """An environment server did not start, crashed too often, or is refused."""


def choose_side(flags: Flags) -> None:
    """Drops a saved --listen or --server_addresses. Raises FlagError for two typed."""
    sides = {"listen", "server_addresses"}
    if flags.listen and flags.server_addresses:
        if len(flags.typed & sides) != 1:
            raise FlagError(
                "--listen waits for environments, --server_addresses connects to them: "
                "give one"
            )
        (saved,) = sides - flags.typed
        setattr(flags, saved, None)


# --- Token and sockets ----------------------------------------------------------------


def security(flags: argparse.Namespace) -> libtorchbeast.Security:
    """The connection flags for libtorchbeast. Raises FlagError for unusable files."""
    import libtorchbeast  # may not be built

    if uses_tls(flags):
        tls_context(flags)  # raises; gRPC gives no reason
    token = None
    if flags.token_file:
        with using(f"--token_file {flags.token_file}", "is not text in UTF-8"):
            token = Path(flags.token_file).read_text("utf-8").strip()
        if not re.fullmatch("[!-~]+", token):  # it travels in a header
            raise FlagError(
                f"--token_file {flags.token_file} must have printable ASCII, no spaces"
            )
    files = {name: getattr(flags, name) for name in TLS_FLAGS}
    return libtorchbeast.Security(**files, token=token, insecure=flags.insecure)


def warn_of_exposed_token(flags: argparse.Namespace) -> None:
    """Logs a warning if others can read the file of the token."""
    mode = os.stat(flags.token_file).st_mode if flags.token_file else 0
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning(
            "Other users can read --token_file %s (its mode is %03o). Use chmod 600.",
            *(flags.token_file, stat.S_IMODE(mode)),
        )


def make_private_folder(pipes_basename: str) -> None:
    """Makes PRIVATE_FOLDER for sockets. Raises FlagError if it can't be ours."""
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


# --- TLS ------------------------------------------------------------------------------


def uses_tls(flags: argparse.Namespace) -> bool:
    """Whether connections to host:port addresses use TLS."""
    return any(getattr(flags, name) for name in TLS_FLAGS)


def tls_context(flags: argparse.Namespace) -> ssl.SSLContext:
    """TLS of the side that connects, as gRPC has it. Raises FlagError for bad files."""
    import ssl  # slow

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # accept weak certificates
    context.set_alpn_protocols(["h2"])  # gRPC ends the handshake without it
    # A certificate in --tls_ca is trusted even if another has signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if not uses_tls(flags):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if flags.tls_cert or flags.tls_key:
        with using(f"--tls_cert {flags.tls_cert} with --tls_key {flags.tls_key}"):
            # An empty password, so that ssl does not ask for one.
            files = flags.tls_cert or "", flags.tls_key or ""
            context.load_cert_chain(*files, password="")
    if flags.tls_ca:
        with using(f"--tls_ca {flags.tls_ca}"):
            context.load_verify_locations(flags.tls_ca)
    return context


def tls_fault(address: str, flags: argparse.Namespace) -> str | None:
    """Why a connection with the listener at `address` can never work, if it is TLS.

    gRPC gives no reason, so this tries a handshake itself. None: it works, nobody
    listens, or there is another reason.

    Args:
      flags: the --tls flags of the side that connects.
    """
    import ssl  # slow

    try:
        encrypts, context = uses_tls(flags), tls_context(flags)
    except UserError:  # its files may just be renewed
        return None
    if not flags.tls_ca:
        context.load_default_certs()
    name = flags.tls_server_name or address.rpartition(":")[0].strip("[]")
    try:
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
        return (
            "the certificate of the other side is not valid: "
            f"{error.verify_message.rstrip('.')}. This side trusts --tls_ca "
            f"{flags.tls_ca} and expects the name {name} (--tls_server_name)"
        )
    except ssl.SSLError as error:
        reason = error.reason or ""
        if encrypts and reason in PLAIN:
            why = "it speaks plain TCP"
        elif not encrypts and "ALERT" in reason:
            why = "it speaks TLS"
        else:
            return None
    except (OSError, ValueError):
        return None
    return (
        f"both sides do not agree on TLS: {why}. Give both the --tls flags, or none. "
        "If the other side has --tls_ca, this side needs a certificate of that signer "
        f"that has not expired (here: --tls_cert {flags.tls_cert})"
    )
