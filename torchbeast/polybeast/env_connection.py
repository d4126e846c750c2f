"""Addresses, and the flags that PolyBeast's two sides compare.

Environment machines import this module, so it does not load torch.
"""

import argparse
import re
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchbeast.base.errors import FlagError, using
from torchbeast.envs import atari
from torchbeast.flags import Atari, Environment

CONNECT_SECONDS = 5.0  # time limit of a connection, and of each step of a handshake


def environment_settings(flags: argparse.Namespace) -> dict[str, str]:
    """The flags that determine the environments, as text: {name: value}.

    A learner refuses environments with other values. Flags for Atari are left out if
    the environment is not an Atari game, and so are flags without a value, or with
    False where this means the same.
    """
    of_atari = Atari.declared() if atari.atari_game(flags.env) else {}
    settings = {}
    for name, declared in (Environment.declared() | of_atari).items():
        value = getattr(flags, name)
        if value is not None and not (value is False and declared.default is None):
            # A preset may give 0 if the command line gives 0.0.
            settings[name] = str(declared.from_file(value))
    return settings


def server_addresses(flags: argparse.Namespace) -> list[str]:
    """The addresses of --server_addresses, or those of local servers."""
    given = flags.server_addresses
    if not given:
        return [f"{flags.pipes_basename}.{i}" for i in range(flags.num_servers)]
    if given.startswith("@"):
        with using("--server_addresses"):
            given = Path(given[1:]).read_text()
    addresses = []
    for word in given.replace(",", " ").split():
        ports = re.fullmatch(r"(.+):(\d+)-(\d+)", word)  # host:5000-5007
        if ports and not word.startswith("unix:"):
            first, last = int(ports[2]), int(ports[3])
            if not first <= last < 2**16:
                raise FlagError(
                    f"--server_addresses: {word}: {last} is below {first}, or above "
                    "65535, the last port"
                )
            addresses += [f"{ports[1]}:{port}" for port in range(first, last + 1)]
        else:
            addresses.append(word)
    if not addresses:
        raise FlagError("--server_addresses names no address")
    return addresses


def connect(address: str) -> socket.socket:
    """A plain connection. Raises OSError, or ValueError if it is not HOST:PORT."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)


def reachable_first(addresses: Sequence[str]) -> list[str]:
    """Sorts addresses: unreachable ones come last.

    A machine that is off does not refuse, so asking it first would cost a timeout.
    """

    def is_reachable(address: str) -> bool:
        try:
            if not address.startswith("unix:"):
                connect(address).close()
        except (OSError, ValueError):
            return False
        return True

    if len(addresses) < 2:
        return list(addresses)
    with ThreadPoolExecutor(min(len(addresses), 64)) as threads:
        answers = threads.map(is_reachable, addresses)
        reachable = dict(zip(addresses, answers, strict=True))
    return sorted(addresses, key=lambda address: not reachable[address])
