"""--launcher ray: the environments of a run as Ray actors, on one machine or a cluster.

actors.py has MonoBeast's, servers.py PolyBeast's; both call Ray through cluster.py.
"""

import importlib.util
from typing import Any

from torchbeast.base import ranks
from torchbeast.base.errors import FlagError
from torchbeast.base.flag import FREE, Group, flag


# fmt: off
class Flags(Group):
    title = "launcher"
    launcher: str = flag("processes",
        "what starts the environments; ray: also on other machines", FREE,
        choices=["processes", "ray"])
    ray_address: str | None = flag(None,
        "of a Ray cluster, or auto; default: a local one", FREE)
# fmt: on


def check(flags: Any) -> None:
    """Raises FlagError if the run can't use --launcher ray."""
    if flags.sync or ranks.size() > 1:
        raise FlagError("--sync and torchrun need --launcher processes")
    if importlib.util.find_spec("ray") is None:
        raise FlagError("--launcher ray needs Ray: pip install ray")


def actors_class(flags: Any) -> Any:
    """Raises FlagError as `check` does."""
    if flags.launcher == "processes":
        return None
    check(flags)
    from torchbeast.extras.ray.actors import RayActors

    return RayActors
