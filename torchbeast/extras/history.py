"""--checkpoint_history: checkpoints that stay, evenly over the run."""

import logging
import pathlib
from typing import Any

from torchbeast.base.flag import COUNT_OR_0, FREE, Group, flag

log = logging.getLogger(__name__)


class Flags(Group):
    checkpoint_history: int = flag(
        0, "checkpoints that stay, evenly, as model.STEP.tar", COUNT_OR_0, FREE
    )


def attach(run: Any) -> "History | None":
    for path in run.folder.glob("model.*.tar") if run.resumed else ():
        step = path.name.split(".")[1]
        if step.isdecimal() and int(step) > run.learner.step:
            log.warning("%s is removed: it is of a later step.", path.name)
            path.unlink()  # the run was killed and repeats these steps
    return History(run) if run.flags.checkpoint_history else None


class History:
    """Copies model.tar to model.STEP.tar when a part of the run is over."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.copied = self.due(run.learner.step)

    def due(self, step: int) -> int:
        """How many parts of the run are over."""
        flags = self.run.flags
        return flags.checkpoint_history * step // flags.total_steps

    def poll(self) -> None:
        if self.due(self.run.learner.step) > self.copied:
            self.run.save_soon = True

    def saved(self, path: pathlib.Path, step: int) -> None:
        from torchbeast.runs import checkpoint, files

        if self.due(step) > self.copied:
            self.copied = self.due(step)
            with files.writing(path):
                checkpoint.copy(path, path.with_name(f"model.{step}.tar"))
