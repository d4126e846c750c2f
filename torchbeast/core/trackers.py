"""Where the columns of logs.csv also go: TensorBoard, Weights & Biases.

To add another tracker, write a class with `log` and `close` and add it to
`make_trackers`.
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import Any, Protocol

from torchbeast.core.flags import FlagError, Flags
from torchbeast.core.run_folder import writing

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Gets each row of logs.csv."""

    def log(self, row: dict[str, Any]) -> None:
        """Takes the columns of one update; row["step"] never falls. None: no value."""

    def close(self) -> None:
        """Writes what is left. Does not raise."""


def make_trackers(flags: Flags, path: Path, step: int) -> list[Tracker]:
    """The trackers that the flags ask for.

    Args:
      path: the folder of the run.
      step: the first step of this start.

    Raises:
      FlagError: a package is missing.
    """
    trackers: list[Tracker] = []
    if flags.tensorboard:
        trackers.append(TensorBoard(path, step))
    if flags.wandb:
        trackers.append(WeightsAndBiases(flags, path))
    return trackers


class TensorBoard:
    """Event files in the folder of the run.

    Args:
      step: the first step of this start. TensorBoard hides older points beyond it,
        because a resumed run writes them again.

    Raises:
      FlagError: the package is missing.
    """

    def __init__(self, path: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise FlagError(
                "--tensorboard needs the package tensorboard: pip install tensorboard"
            ) from error
        self.path = path
        with writing(path):
            # TensorBoard also hides purge_step itself.
            self.writer = SummaryWriter(str(path), purge_step=step + 1)

    def log(self, row: dict[str, Any]) -> None:
        """Raises RunFileError if the disk is full."""
        with writing(self.path):
            for name, value in row.items():
                if value is not None and name != "step":
                    self.writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        try:
            self.writer.close()
        except OSError as error:
            log.error("Can't write the last TensorBoard events: %s", error)


class WeightsAndBiases:
    """A run at Weights & Biases. A resumed run goes on with the same one there.

    The variables WANDB_MODE, WANDB_ENTITY and so on have their effects.

    Raises:
      FlagError: the package is missing, or the run can't be started.
    """

    def __init__(self, flags: Flags, path: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise FlagError("--wandb needs the package wandb: pip install wandb") from (
                error
            )
        identity = path / "wandb_id.txt"
        if not identity.exists():
            identity.write_text(secrets.token_hex(8))
        try:
            self.run: Any = wandb.init(
                project=flags.wandb,
                id=identity.read_text().strip(),
                name=flags.xpid,
                resume="allow",
                dir=path,
                config=flags.as_dict(),
            )
        except (wandb.Error, OSError) as error:
            raise FlagError(
                f"--wandb {flags.wandb}: {error}. WANDB_MODE=offline needs no network"
            ) from error

    def log(self, row: dict[str, Any]) -> None:
        known = {k: x for k, x in row.items() if x is not None}
        self.run.log(known, step=row["step"])

    def close(self) -> None:
        try:
            self.run.finish()
        except Exception as error:  # whatever the service answers, the run has ended
            log.error("Can't finish the run at Weights & Biases: %s", error)
