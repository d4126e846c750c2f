"""--tensorboard: event files in the folder of the run."""

from typing import Any

from torchbeast.base.errors import needing
from torchbeast.base.flag import FREE, Group, flag
from torchbeast.runs.files import writing


class Flags(Group):
    tensorboard: bool = flag(False, "also write TensorBoard event files", FREE)


def attach(run: Any) -> "TensorBoard | None":
    return TensorBoard(run) if run.flags.tensorboard else None


class TensorBoard:
    def __init__(self, run: Any) -> None:
        with needing("--tensorboard", "tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self.folder = run.folder
        with writing(self.folder):
            # TensorBoard hides older points of these steps, which are logged again.
            first = run.learner.step + 1
            self.writer = SummaryWriter(str(run.folder), purge_step=first)

    def row(self, row: dict[str, Any]) -> None:
        with writing(self.folder):
            for name, value in row.items():
                if value is not None and name != "step":
                    # An evaluation is of earlier weights than its row.
                    is_eval = name in ("eval_step", "eval_return", "eval_length")
                    step = row["eval_step" if is_eval else "step"]
                    self.writer.add_scalar(name, value, step)

    def close(self, status: int) -> None:
        self.writer.close()
