"""--init_from: a new run begins with the weights of another one."""

import logging
import pathlib
from typing import Any

from torchbeast.base.errors import CheckpointError, FlagError
from torchbeast.base.flag import Group, flag

log = logging.getLogger(__name__)


class Flags(Group):
    init_from: str | None = flag(None, "run to take weights from", metavar="XPID|FILE")


def initialize(flags: Any, model: Any) -> None:
    if flags.init_from:
        take_over(flags.init_from, flags.savedir, model)


def resume(flags: Any, saved: dict[str, Any]) -> None:
    """The command that has begun the run may be given again."""
    if flags.init_from != saved["flags"].get("init_from"):
        raise FlagError(f"--init_from is for a new run, and {flags.xpid} exists")


def take_over(place: str, savedir: str, model: Any) -> None:
    """Loads the weights of a checkpoint, but no module of which one does not fit."""
    from torchbeast.runs import checkpoint

    path = pathlib.Path(place).expanduser()
    if (run := pathlib.Path(savedir, place)).is_dir():
        path = run
    path = path / "model.tar" if path.is_dir() else path
    found = checkpoint.load(path)["model_state_dict"]
    there, here = (
        {k: x.shape for k, x in y.items()} for y in (found, model.state_dict())
    )
    others = {k for k in there | here if there.get(k) != here.get(k)}
    modules = {name.rpartition(".")[0] for name in others}
    fitting = {k: x for k, x in found.items() if k.rpartition(".")[0] not in modules}
    if not fitting:
        raise CheckpointError(f"--init_from {place}: none of its weights fits")
    model.load_state_dict(fitting, strict=False)
    log.info("Took %d of %d weights from %s.", len(fitting), len(found), path)
    if others:
        log.warning("These do not fit: %s.", ", ".join(sorted(others)))
