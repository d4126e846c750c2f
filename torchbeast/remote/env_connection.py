"""The flags that PolyBeast's two sides compare, and why a connection can't work.

Environment machines import this module, so it does not load torch.
"""

import argparse
import contextlib
import re
import socket
import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from torchbeast.envs import atari
from torchbeast.flags import environment_flags
from torchbeast.remote.security import uses_tls

CONNECT_SECONDS = 5.0  # time limit of each step of a handshake


def environment_settings(flags: argparse.Namespace) -> dict[str, str]:
    """The flags that determine the environments, as text: {name: value}.

    A learner refuses environments with other values. Flags for Atari are left out if
    the environment is not an Atari game, and so are flags without a value, or with
    False where this means the same.
    """
    is_atari = atari.atari_game(flags.env) is not None
    settings = {}
    for name, declared in environment_flags(is_atari).items():
        value = getattr(flags, name)
        if value is not None and not (value is False and declared.default is None):
            # A preset may give 0 if the command line gives 0.0.
            is_switch = declared.converter is bool
            settings[name] = str(value if is_switch else declared.convert(str(value)))
    return settings


# --- Why a connection can't work ------------------------------------------------------


def plain_reason(error: str) -> str:
    """The reason in an error of the transport, in a few words."""
    for pattern, reason in (
        ("Connection refused", "connection refused"),
        ("No such file or directory", "there is no such socket"),
        ("Domain name not found|DNS resolution failed", "the host name is not known"),
        ("No route to host|[Nn]etwork is unreachable", "the host can't be reached"),
        ("has not answered in time|[Tt]imed? ?out", "no answer in time"),
    ):
        if re.search(pattern, error):
            return reason
    return error.partition(" is lost: ")[2] or error


def reachable_first(addresses: Sequence[str]) -> list[str]:
    """Sorts addresses: unreachable ones come last.

    A machine that is off does not refuse, so asking it first would cost a timeout.
    """
    if len(addresses) < 2:
        return list(addresses)
    with ThreadPoolExecutor(len(addresses)) as threads:
        reachable = list(threads.map(_is_reachable, addresses))
    order = sorted(range(len(addresses)), key=lambda i: not reachable[i])
    return [addresses[i] for i in order]


def _is_reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if address.startswith("unix:"):
        return True
    try:
        place = (host.strip("[]"), int(port))
        socket.create_connection(place, CONNECT_SECONDS).close()
    except (OSError, ValueError):  # ValueError: not an address
        return False
    return True


def tls_fault(address: str, flags: argparse.Namespace) -> str | None:
    """Why TLS with the listener at `address` can never work.

    gRPC gives no reason, so this function tries a handshake itself.

    Args:
      address: host:port.
      flags: the --tls flags of the side that connects.

    Returns:
      None if a handshake works, nobody listens, or there is another reason.
    """
    host, _, port = address.rpartition(":")
    if address.startswith("unix:") or not port.isdigit():
        return None
    host = host.strip("[]")
    with contextlib.suppress(OSError, UnicodeError):  # UnicodeError: no host name
        for _ in range(2):  # a listener that just exits also closes, but only once
            plain = socket.create_connection((host, int(port)), CONNECT_SECONDS)
            with plain:
                if not uses_tls(flags):
                    return _tls_unwanted(plain)
                try:
                    name = flags.tls_server_name or host
                    with _context(flags).wrap_socket(plain, server_hostname=name) as s:
                        if s.recv(1):  # the first byte of HTTP/2
                            return None
                except ssl.SSLCertVerificationError as error:
                    return _bad_certificate(error, flags)
                except ssl.SSLError as error:
                    return _failed_handshake(error)
        # With TLS 1.3 the other side refuses our certificate only after our handshake.
        return _refused_certificate(flags)
    return None


def _context(flags: argparse.Namespace) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # As gRPC: a certificate in --tls_ca is trusted even if another has signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if flags.tls_ca:
        context.load_verify_locations(flags.tls_ca)
    else:
        context.load_default_certs()
    if flags.tls_cert and flags.tls_key:
        context.load_cert_chain(flags.tls_cert, flags.tls_key)
    context.set_alpn_protocols(["h2"])  # gRPC ends the handshake without it
    return context


def _tls_unwanted(plain: socket.socket) -> str | None:
    """A reason if the other side speaks TLS and this side plain TCP."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(plain):
            pass
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return None
    return (
        "the other side speaks TLS, and this side plain TCP; give --tls, and --tls_ca "
        "with the signer of its certificate"
    )


def _bad_certificate(
    error: ssl.SSLCertVerificationError, flags: argparse.Namespace
) -> str:
    why = error.verify_message.rstrip(".")
    if "mismatch" in why:
        help = "give the name in it with --tls_server_name"
    elif "expired" in why:
        help = "the side that listens needs a new one"
    else:
        ca = flags.tls_ca or "(here: the system's)"
        help = f"its signer is not in --tls_ca {ca}"
    return f"the certificate of the other side is not valid: {why}; {help}"


def _refused_certificate(flags: argparse.Namespace) -> str:
    if not flags.tls_cert:
        return (
            "the other side ends the connection after the TLS handshake: it needs a "
            "certificate of this side; give --tls_cert and --tls_key"
        )
    why = (
        _why_invalid(flags) or "its signer is not in --tls_ca there, or it has expired"
    )
    return (
        "the other side ends the connection after the TLS handshake: it refuses "
        f"--tls_cert {flags.tls_cert}; {why}"
    )


def _why_invalid(flags: argparse.Namespace) -> str:
    """What is wrong with our own certificate, apart from its signer: its dates."""
    shows = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shows.load_cert_chain(flags.tls_cert, flags.tls_key)
    checks = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    checks.check_hostname = False
    checks.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    checks.load_verify_locations(flags.tls_cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = checks.wrap_bio(to_client, to_server)
    server = shows.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
    return ""


def _failed_handshake(error: ssl.SSLError) -> str | None:
    reason = error.reason or ""
    if reason in ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"):
        return (
            "the other side speaks plain TCP, and this side TLS; give --tls_cert and "
            "--tls_key there, or no --tls flag here"
        )
    return None
