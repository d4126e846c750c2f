"""The progress of a run: the live line."""

import contextlib
import datetime
import logging
import sys
import time
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

log = logging.getLogger(__name__)

STATUS_SECONDS = 5.0  # between two status lines, if there is no terminal
MOST_SECONDS_LEFT = 1e9  # to show; timedelta can't hold any number


class Status:
    """A live line on a terminal; log lines if there is none. One thread at a time.

    Args:
      step: the first step of this start.
      total_steps: the last step of the run.
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
        """Shows the state of the run, at most 5 times per second.

        Args:
          step: environment steps learned from.
          sps: steps per second; None until it is known.
          mean_return: of the last games; None before the first.
          games: number of finished games.
          policy_lag: updates between acting and learning.
          queued: rollouts that wait for the learner.
          acted: environment steps taken since the start; shown until sps is known.
          streams: connected and expected streams, such as "3/4"; None in MonoBeast.
        """
        interval = 0.2 if self.bar else STATUS_SECONDS
        if time.monotonic() - self.last < interval:
            return
        self.last = time.monotonic()
        if sps is None:
            numbers, rest = {"actors' steps": f"{acted:,}"}, "waiting for an update"
        else:
            numbers = {
                "SPS": f"{sps:,.0f}",
                "return": format_return(mean_return),
                "games": str(games),
                "lag": f"{policy_lag:.1f}",
                "queued": str(queued),
            }
            numbers |= {"streams": streams} if streams else {}
            left = min(max(0, self.total_steps - step) / sps, MOST_SECONDS_LEFT)
            rest = f"{datetime.timedelta(seconds=int(left))} left"
        if self.bar:
            self.bar.n = min(step, self.total_steps)
            try:
                self.bar.set_postfix(numbers)
            except OSError:  # the terminal has closed, but the run continues
                self.bar = None
            return
        parts = [*(f"{k} {v}" for k, v in numbers.items()), rest]
        log.info(
            "Step %s of %s, %s",
            *(f"{step:,}", f"{self.total_steps:,}", ", ".join(parts)),
        )

    def close(self) -> None:
        if self._lines_above:
            self._lines_above.__exit__(None, None, None)
        if self.bar:
            with contextlib.suppress(OSError):
                self.bar.close()


def format_return(mean_return: float | None) -> str:
    return "-" if mean_return is None else f"{mean_return:.2f}"
