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
# Reasons of a TLS handshake that the other side answers in plain TCP.
PLAIN = ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")


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
            with socket.create_connection((host, int(port)), CONNECT_SECONDS) as plain:
                fault, works = _try_handshake(plain, host, flags)
                if fault or works:
                    return fault
        # With TLS 1.3 the other side refuses our certificate only after our handshake.
        ours = f"--tls_cert {flags.tls_cert}" if flags.tls_cert else "no --tls_cert"
        return (
            "the other side ends the connection after the TLS handshake. It needs a "
            f"certificate of this side (here: {ours}) that has not expired and whose "
            "signer is in --tls_ca there"
        )
    return None


def _try_handshake(
    plain: socket.socket, host: str, flags: argparse.Namespace
) -> tuple[str | None, bool]:
    """A reason, if there is one, and whether the connection works or may work later."""
    wanted = uses_tls(flags)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])  # gRPC ends the handshake without it
    context.check_hostname = wanted
    if wanted:
        # As gRPC: a certificate in --tls_ca is trusted even if another has signed it.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if flags.tls_ca:
            context.load_verify_locations(flags.tls_ca)
        else:
            context.load_default_certs()
        if flags.tls_cert and flags.tls_key:
            context.load_cert_chain(flags.tls_cert, flags.tls_key)
    else:
        context.verify_mode = ssl.CERT_NONE
    try:
        name = flags.tls_server_name or host
        with context.wrap_socket(plain, server_hostname=name) as encrypted:
            if wanted:
                return None, bool(encrypted.recv(1))  # the first byte of HTTP/2
    except ssl.SSLCertVerificationError as error:
        return (
            "the certificate of the other side is not valid: "
            f"{error.verify_message.rstrip('.')}. This side trusts --tls_ca "
            f"{flags.tls_ca or '(here: the signers of the system)'} and expects the "
            f"name {name} (--tls_server_name)"
        ), False
    except ssl.SSLError as error:
        speaks_tls = "ALERT" in (error.reason or "")
        if error.reason not in PLAIN if wanted else not speaks_tls:
            return None, True
    other, this = ("plain TCP", "TLS") if wanted else ("TLS", "plain TCP")
    return (
        f"the other side speaks {other}, and this side {this}; give both the --tls "
        "flags, or none"
    ), False
