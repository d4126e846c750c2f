"""--launcher: what starts the processes with the environments."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

from torchbeast.base.errors import FlagError
from torchbeast.runs.flagset import Flags


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("launcher").add_argument
    add(
        "--launcher",
        default="processes",
        choices=["processes", "ray"],
        help="what starts the environments; ray: also on other machines",
    )
    add("--ray_address", help="of a Ray cluster, or auto; default: a local one")


def check(flags: Flags) -> None:
    """Raises FlagError if the run can't use Ray."""
    if flags.launcher == "processes":
        if "ray_address" in flags.typed:
            raise FlagError("--ray_address needs --launcher ray")
        flags.ray_address = None  # of a checkpoint
        return
    if flags.sync:
        raise FlagError("--sync needs --launcher processes")
    if importlib.util.find_spec("ray") is None:
        raise FlagError("--launcher ray needs Ray: pip install '.[ray]'")


def actors_class(flags: Flags) -> Any:
    """The class of MonoBeast's actors: Actors, or with --launcher ray RayActors."""
    if flags.launcher == "ray":
        from torchbeast.on_ray.actors import RayActors  # optional

        return RayActors
    from torchbeast.local.actors import Actors  # PolyBeast's servers don't load torch

    return Actors
