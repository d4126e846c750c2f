"""What else a run feeds: TensorBoard, Weights & Biases, metrics, a mirror; and videos.

To add another tracker, write a class with `log` and `close` and add it to
`make_trackers`.
"""

import contextlib
import logging
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from torchbeast.base.errors import FlagError, needing
from torchbeast.extras.metrics import Metrics, Probe
from torchbeast.extras.mirror import Mirror
from torchbeast.flags import Flags
from torchbeast.runs.files import EVAL_COLUMNS, atomic_write, writing

log = logging.getLogger(__name__)

CLOSE_SECONDS = 60.0  # for the upload at the end of a run


class Tracker(Protocol):
    """Gets each row of logs.csv."""

    def log(self, row: dict[str, Any]) -> None:
        """Takes the columns of one update; row["step"] never falls. None: no value."""

    def close(self, exit_status: int) -> None:
        """Writes what is left, within a bounded time. Does not raise."""


def make_trackers(
    flags: Flags, path: Path, step: int | None, liveness: Probe
) -> Iterator[Tracker]:
    """Makes the trackers that the flags ask for.

    Args:
      path: the folder of the run.
      step: that of the checkpoint; None if the run does not resume.
      liveness: what is wrong with the run's process, or None.

    Raises:
      FlagError: a package is missing, or a place can't be used.
    """
    if flags.tensorboard:
        yield TensorBoard(path, step or 0)
    if flags.wandb:
        yield WeightsAndBiases(flags, path, step is not None)
    mirror = Mirror(flags.mirror, path) if flags.mirror else None
    if mirror:  # after those that write into the folder
        yield mirror
    if flags.metrics_port:
        yield Metrics(flags, liveness, mirror)


class TensorBoard:
    """Event files in the folder of the run.

    Args:
      step: the first step of this start. TensorBoard hides older points beyond it,
        because a resumed run writes them again.

    Raises:
      FlagError: the package is missing.
    """

    def __init__(self, path: Path, step: int) -> None:
        with needing("--tensorboard", "tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self.path = path
        with writing(path):
            # TensorBoard also hides purge_step itself.
            self.writer = SummaryWriter(str(path), purge_step=step + 1)

    def log(self, row: dict[str, Any]) -> None:
        """Raises RunFileError if the disk is full."""
        with writing(self.path):
            for name, value in row.items():
                if value is not None and name != "step":
                    step = row["eval_step" if name in EVAL_COLUMNS else "step"]
                    self.writer.add_scalar(name, value, step)

    def close(self, exit_status: int) -> None:
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

    def __init__(self, flags: Flags, path: Path, resumes: bool) -> None:
        with needing("--wandb", "wandb"):
            import wandb
        identity = path / "wandb_id.txt"
        if not resumes or not identity.exists():
            with writing(identity), atomic_write(identity) as file:
                file.write(secrets.token_hex(8).encode())
        try:
            self.run: Any = wandb.init(
                id=identity.read_text().strip(),
                name=flags.xpid,
                resume="allow",
                **_settings(flags, path),
            )
        except Exception as error:  # of many types
            raise FlagError(
                f"--wandb {flags.wandb}: {str(error).rstrip('.')}. "
                "WANDB_MODE=offline needs no network"
            ) from error
        self._teardown = wandb.teardown
        # With its own count of steps, which only grows, W&B would refuse the steps that
        # a run resumed after a crash logs again.
        self.run.define_metric("*", step_metric="step")
        for name in EVAL_COLUMNS:
            self.run.define_metric(name, step_metric="eval_step")

    def log(self, row: dict[str, Any]) -> None:
        """If its service has died, it logs that once; the run goes on."""
        if self.run is None:
            return
        try:
            self.run.log({k: x for k, x in row.items() if x is not None})
        except Exception as error:  # of many types
            self.run = None
            log.error("No more rows are sent to Weights & Biases: %r", error)
            with contextlib.suppress(Exception):  # else it prints a traceback at exit
                self._teardown()

    def close(self, exit_status: int) -> None:
        if self.run is None:
            return
        try:
            self.run.finish(exit_code=exit_status)
        except Exception as error:  # whatever the service answers, the run has ended
            log.error("Can't finish the run at Weights & Biases: %s", error)


def _settings(flags: Flags, folder: Path) -> dict[str, Any]:
    """What every wandb.init() gets."""
    import wandb

    settings = wandb.Settings(finish_timeout=CLOSE_SECONDS)
    more = {"config": flags.as_dict(), "settings": settings}
    return {"project": flags.wandb, "dir": folder, **more}


def send_video(flags: Flags, folder: Path, video: str, step: int | None) -> None:
    """Sends a test's video to Weights & Biases, as a run of its own in a group.

    The run of the training may still go on, and only one process can log to it. What
    fails is only logged: the video lies on the disk.

    Args:
      folder: of the run of the training.
      step: of the checkpoint.
    """
    name = folder.name
    try:
        import wandb

        own = {"group": name, "name": f"{name}-video", "job_type": "video"}
        with wandb.init(**_settings(flags, folder) | own) as run:
            run.log({"video": wandb.Video(video, format="mp4"), "step": step})
    except Exception as error:  # of the package, the service or the disk
        log.warning("--wandb %s did not get the video: %s", flags.wandb, error)
    else:
        log.info("The video is a run of project %s at Weights & Biases.", flags.wandb)
