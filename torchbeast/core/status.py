"""What a person sees of a run while it goes on."""

import contextlib
import datetime
import logging
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from torchbeast.core.flags import FlagError
from torchbeast.core.run_folder import writing

log = logging.getLogger(__name__)

STATUS_SECONDS = 5.0  # between two status lines where there is no terminal


class Status:
    """A live line on a terminal, plain lines elsewhere.

    Args:
      step: at which the run begins.
      total_steps: at which it ends.
    """

    def __init__(self, step: int, total_steps: int) -> None:
        self.total_steps = total_steps
        self.last = time.monotonic()
        self.bar = None
        self._lines_above: Any = None
        if sys.stderr and sys.stderr.isatty():
            self.bar = tqdm(
                total=total_steps, initial=step, unit=" steps", unit_scale=True
            )
            self._lines_above = logging_redirect_tqdm()  # log lines don't break the bar
            self._lines_above.__enter__()

    def show(
        self,
        step: int,
        sps: float | None,
        mean_return: float | None,
        games: int,
        policy_lag: float,
        queued: int,
        acted: int = 0,
        streams: str | None = None,
    ) -> None:
        """Shows the state of the run, if it is time to.

        Args:
          step: environment steps learned from.
          sps: steps per second; None: not known yet.
          mean_return: of the last games; None before the first.
          games: that ended.
          policy_lag: updates between acting and learning.
          queued: rollouts that wait to be learned from.
          acted: environment steps that the actors have taken since the start; shown
            until the speed is known.
          streams: of environments, connected and expected: "3/4"; None: there are none.
        """
        interval = 0.2 if self.bar else STATUS_SECONDS
        if time.monotonic() - self.last < interval:
            return
        self.last = time.monotonic()
        if sps is None:
            self._show_start(step, acted)
            return
        numbers = {
            "SPS": f"{sps:,.0f}",
            "return": format_return(mean_return),
            "games": str(games),
            "lag": f"{policy_lag:.1f}",
            "queued": str(queued),
        }
        if streams:
            numbers["streams"] = streams
        if self.bar:
            self.bar.n = min(step, self.total_steps)
            self._show_on_bar(numbers)
            return
        left = max(0, self.total_steps - step) / sps
        log.info(
            "Step %s of %s, %s, %s left",
            *(f"{step:,}", f"{self.total_steps:,}"),
            ", ".join(f"{k} {v}" for k, v in numbers.items()),
            datetime.timedelta(seconds=int(left)),
        )

    def _show_start(self, step: int, acted: int) -> None:
        """Shows that the actors work, although nothing is learned yet."""
        if self.bar:
            self._show_on_bar({"actors' steps": f"{acted:,}"})
        else:
            log.info(
                "Step %s of %s: waiting for the first updates, actors have taken %s "
                "steps",
                *(f"{step:,}", f"{self.total_steps:,}", f"{acted:,}"),
            )

    def _show_on_bar(self, numbers: dict[str, str]) -> None:
        assert self.bar
        try:
            self.bar.set_postfix(numbers)
        except OSError:  # the terminal is gone; the run is not
            self.bar = None

    def close(self) -> None:
        if self._lines_above:
            self._lines_above.__exit__(None, None, None)
        if self.bar:
            with contextlib.suppress(OSError):
                self.bar.close()


def format_return(mean_return: float | None) -> str:
    return "-" if mean_return is None else f"{mean_return:.2f}"


class Board:
    """TensorBoard event files, in the folder of the run.

    Args:
      path: the folder.
      step: at which the run begins or goes on; points beyond it are hidden, because
        the run writes them again.

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
            # TensorBoard hides purge_step itself too, which was learned before.
            self.writer = SummaryWriter(str(path), purge_step=step + 1)

    def log(self, row: dict[str, Any]) -> None:
        """Writes the numbers of a row of logs.csv.

        Raises:
          RunFileError: the disk is full.
        """
        with writing(self.path):
            for name, value in row.items():
                if value is not None and name != "step":
                    self.writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Does not raise on a full disk, so that the end of the run is still logged."""
        try:
            self.writer.close()
        except OSError as error:
            log.error("Can't write the last TensorBoard events: %s", error)
