"""--launcher: what starts the processes with the environments."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torchbeast.core.flags import FlagError, Flags

# Both variants import this module, and PolyBeast's servers don't load torch.
if TYPE_CHECKING:
    from torchbeast.core.acting import SharedWeights
    from torchbeast.core.nested import Nested


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


def launch_actors(
    act: Callable[..., None],
    flags: Flags,
    buffers: dict[str, Nested],
    weights: SharedWeights,
    saved: Sequence[dict[str, Any]] | None,
) -> Any:
    """Starts MonoBeast's actors: an Actors, or with --launcher ray a RayActors."""
    if flags.launcher == "ray":
        from torchbeast.core.ray_actors import RayActors  # optional

        return RayActors(act, flags, buffers, weights)
    from torchbeast.core.actors import Actors

    return Actors(act, flags, buffers, weights, saved)
