"""Addresses, and the flags that PolyBeast's two sides compare. Loads no torch."""

import argparse
import re

from torchbeast.base import parts
from torchbeast.base.errors import FlagError, using
from torchbeast.flags import Atari, Environment, Flags


def environment_settings(flags: argparse.Namespace) -> dict[str, str]:
    """The flags that determine the environments, as text: {name: value}.

    A learner refuses environments with other values. Left out are Atari's flags for
    other games, flags without a value, and those with False if it means the same.
    """
    atari = parts.optional("envs.atari")
    of_atari = Atari.declared() if atari and atari.atari_game(flags.env) else {}
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
        with using("--server_addresses"), open(given[1:], encoding="utf-8") as file:
            given = file.read(2**20)
        if len(given) == 2**20:
            raise FlagError("--server_addresses: the file has 1 MiB or more")
    addresses = []
    for word in given.replace(",", " ").split():
        ports = re.fullmatch(r"(?!unix:)(.+):(\d+)-(\d+)", word)  # host:5000-5007
        if not ports:
            addresses.append(word)
            continue
        first, last = int(ports[2]), int(ports[3])
        if not first <= last < 2**16:
            raise FlagError(f"--server_addresses: {word} is no range of ports")
        addresses += [f"{ports[1]}:{port}" for port in range(first, last + 1)]
    if not addresses:
        raise FlagError("--server_addresses names no address")
    return addresses


def choose_side(flags: Flags) -> None:
    """Drops a saved --listen or --server_addresses. Raises FlagError for two typed."""
    sides = {"listen", "server_addresses"}
    if flags.listen and flags.server_addresses:
        if len(flags.typed & sides) != 1:
            raise FlagError("give one of --listen and --server_addresses, not both")
        (saved,) = sides - flags.typed
        setattr(flags, saved, None)
