"""--checkpoint_history: checkpoints that stay, evenly over the run."""

from __future__ import annotations

import logging
import pathlib
import re
from typing import Any

from torchbeast.base.errors import CheckpointError, FlagError
from torchbeast.base.flag import COUNT_OR_0, FREE, Group, flag

log = logging.getLogger(__name__)


class Flags(Group):
    checkpoint_history: int = flag(
        *(0, "checkpoints to keep, evenly over the run, as model.STEP.tar"),
        *(COUNT_OR_0, FREE),
    )


def attach(run: Any) -> History | None:
    for step, path in kept(run.folder).items() if run.resumed else ():
        if step > run.learner.step:  # the run was killed and repeats these steps
            log.warning("%s is removed: it is of a later step.", path.name)
            path.unlink()
    if not run.flags.checkpoint_history:
        return None
    if run.flags.disable_checkpoint:
        raise FlagError("--checkpoint_history has no effect with --disable_checkpoint")
    return History(run)


def kept(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """The checkpoints that stay, by their steps."""
    found = ((x, re.fullmatch(r"model\.(\d+)\.tar", x.name)) for x in folder.iterdir())
    return {int(match[1]): path for path, match in found if match}


class History:
    """Copies model.tar to model.STEP.tar when a part of the run is over.

    If --total_steps was raised, the copies that lie nearest after the new points stay.
    """

    def __init__(self, run: Any) -> None:
        self.run, self.count = run, run.flags.checkpoint_history
        self.copied = self.due(run.learner.step)

    def due(self, step: int) -> int:
        """How many parts of the run are over."""
        total = self.run.flags.total_steps
        return self.count * min(step, total) // total

    def poll(self) -> None:
        if self.due(self.run.learner.step) > self.copied:
            self.run.save_soon = True

    def saved(self, path: pathlib.Path, step: int) -> None:
        """Raises CheckpointError if the copy can't be written."""
        from torchbeast.runs import checkpoint

        if self.due(step) == self.copied:
            return
        self.copied = self.due(step)
        try:
            checkpoint.copy(path, path.with_name(f"model.{step}.tar"))
            files, total = kept(path.parent), self.run.flags.total_steps
            points = [total * k / self.count for k in range(1, self.count + 1)]
            wanted = {min((s for s in files if s >= x), default=0) for x in points}
            others = sorted(files.keys() - wanted)
            for old in others[: max(0, len(files) - self.count)]:
                files[old].unlink()
        except OSError as error:
            raise CheckpointError(f"Can't keep {path}: {error}") from error
