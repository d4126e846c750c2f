"""--wandb: the rows of logs.csv and the videos of tests at Weights & Biases.

A resumed run goes on with the same run there. The variables WANDB_MODE, WANDB_ENTITY
and so on have their effects.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import secrets
from typing import Any

from torchbeast.base.errors import FlagError, needing
from torchbeast.base.flag import FREE, Group, flag

log = logging.getLogger(__name__)

CLOSE_SECONDS = 60  # for the upload at the end of a run


class Flags(Group):
    wandb: str | None = flag(
        None, "also log to Weights & Biases", FREE, metavar="PROJECT"
    )


def attach(run: Any) -> WeightsAndBiases | None:
    return WeightsAndBiases(run) if run.flags.wandb else None


class WeightsAndBiases:
    def __init__(self, run: Any) -> None:
        from torchbeast.runs.files import atomic_write, writing

        with needing("--wandb", "wandb"):
            import wandb
        flags, identity = run.flags, run.folder / "wandb_id.txt"
        if not run.resumed or not identity.exists():
            with writing(identity), atomic_write(identity) as file:
                file.write(secrets.token_hex(8).encode())
        own = {"id": identity.read_text().strip(), "name": flags.xpid}
        try:
            own |= settings(flags, run.folder)
            self.run: Any = wandb.init(**own, resume="allow")
        except Exception as error:  # of many types
            raise FlagError(
                f"--wandb {flags.wandb}: {str(error).rstrip('.')}. "
                "WANDB_MODE=offline needs no network"
            ) from error
        self.teardown = wandb.teardown
        # W&B's own count of steps only grows, and it would refuse the steps that a run
        # logs again after a crash.
        self.run.define_metric("*", step_metric="step")
        for name in ("eval_step", "eval_return", "eval_length"):
            self.run.define_metric(name, step_metric="eval_step")

    def row(self, row: dict[str, Any]) -> None:
        """If the service has died, logs that once; the run goes on."""
        try:
            if self.run:
                self.run.log({k: x for k, x in row.items() if x is not None})
        except Exception as error:  # of many types
            self.run = None
            log.error("No more rows are sent to Weights & Biases: %r", error)
            with contextlib.suppress(Exception):  # else it prints a traceback at exit
                self.teardown()

    def close(self, status: int) -> None:
        if self.run:
            self.run.finish(exit_code=status)


def settings(flags: Any, folder: pathlib.Path) -> dict[str, Any]:
    """What every wandb.init() gets."""
    import wandb

    bounded = wandb.Settings(finish_timeout=CLOSE_SECONDS)
    more = {"config": flags.as_dict(), "settings": bounded}
    return {"project": flags.wandb, "dir": folder, **more}


def tested(flags: Any, folder: pathlib.Path, step: int | None) -> None:
    """Sends the video of a test as a run of its own: the training may still go on.

    Args:
      folder: of the run of the training.
      step: of the checkpoint.
    """
    video, name = getattr(flags, "video", None), folder.name
    if not flags.wandb or not video:
        return
    try:
        import wandb

        own = {"group": name, "name": f"{name}-video", "job_type": "video"}
        with wandb.init(**settings(flags, folder) | own) as run:
            run.log({"video": wandb.Video(video, format="mp4"), "step": step})
    except Exception as error:  # of the package, the service or the disk
        log.warning("--wandb %s did not get the video: %s", flags.wandb, error)
    else:
        log.info("The video is a run of project %s at Weights & Biases.", flags.wandb)
