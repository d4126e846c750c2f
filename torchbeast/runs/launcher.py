"""--launcher: what starts the processes with the environments."""

from __future__ import annotations

import importlib.util

from torchbeast.base.errors import FlagError
from torchbeast.runs.flagset import Flags


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
