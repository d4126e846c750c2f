"""--wandb: the rows of logs.csv and the videos of tests at Weights & Biases.

A resumed run goes on with the same run there. The variables WANDB_MODE, WANDB_ENTITY
and so on have their effects.
"""

import contextlib
import logging
import pathlib
import secrets
from typing import Any

from torchbeast.base.errors import needing, using
from torchbeast.base.flag import FREE, Group, flag
from torchbeast.runs.files import atomic_write, writing

log = logging.getLogger(__name__)

CLOSE_SECONDS = 60  # for the upload at the end of a run


class Flags(Group):
    wandb: str | None = flag(None, "project at Weights & Biases to log to", FREE)


def attach(run: Any) -> "WeightsAndBiases | None":
    return WeightsAndBiases(run) if run.flags.wandb else None


def begin(flags: Any, folder: pathlib.Path, **own: Any) -> Any:
    """wandb.init() for a run in this folder. Raises FlagError."""
    with needing("--wandb", "wandb"):
        import wandb
    of_all = {"project": flags.wandb, "dir": folder, "config": flags.as_dict()}
    with using(f"--wandb {flags.wandb} (WANDB_MODE=offline needs no network)"):
        bounded = wandb.Settings(finish_timeout=CLOSE_SECONDS, reinit="create_new")
        return wandb.init(**of_all, **own, settings=bounded)


class WeightsAndBiases:
    def __init__(self, run: Any) -> None:
        identity = run.folder / "wandb_id.txt"
        if not run.resumed or not identity.exists():
            with writing(identity), atomic_write(identity) as file:
                file.write(secrets.token_hex(8).encode())
        own = {"id": identity.read_text().strip(), "name": run.flags.xpid}
        self.run = begin(run.flags, run.folder, **own, resume="allow")
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
            import wandb

            self.run = None
            log.error("No more rows are sent to Weights & Biases: %r", error)
            with contextlib.suppress(Exception):  # else it prints a traceback at exit
                wandb.teardown()

    def close(self, status: int) -> None:
        if self.run:
            self.run.finish(exit_code=status)


def tested(flags: Any, folder: pathlib.Path, step: int | None) -> None:
    """Sends the video of a test as a run of its own: the training may still go on."""
    if flags.wandb and (path := getattr(flags, "video", None)):
        name = folder.name
        with begin(flags, folder, group=name, name=f"{name}-video") as run:
            import wandb

            run.log({"video": wandb.Video(path, format="mp4"), "step": step})
