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
      flags: total_steps, episodes_for_avg.
      learner: its step and its counters are shown.
    """

    def __init__(self, flags: Any, learner: Any) -> None:
        self.flags, self.learner = flags, learner
        self.last = time.monotonic()
        self.bar: Any = None
        self._stack = contextlib.ExitStack()
        if sys.stderr and sys.stderr.isatty():
            words: dict[str, Any] = {"unit": " steps", "unit_scale": True}
            self.bar = tqdm(total=flags.total_steps, initial=learner.step, **words)
            self._stack.callback(self.bar.close)
            # Log lines don't break the bar.
            self._stack.enter_context(logging_redirect_tqdm())

    def show(self, queued: int, acted: int, streams: str | None = None) -> None:
        """Shows the state of the run, at most 5 times per second.

        Args:
          queued: rollouts that wait for the learner.
          acted: environment steps taken since the start; shown until there is a speed.
          streams: connected and expected streams, such as "3/4"; None in MonoBeast.
        """
        interval = 0.2 if self.bar else STATUS_SECONDS
        if time.monotonic() - self.last < interval:
            return
        self.last = time.monotonic()
        step, total = self.learner.step, self.flags.total_steps
        counters = self.learner.counters
        if (sps := counters.sps()) is None:
            numbers, rest = {"actors' steps": f"{acted:,}"}, "waiting for an update"
        else:
            numbers = {
                "SPS": f"{sps:,.0f}",
                "return": mean_return(counters, self.flags),
                "games": str(counters.games),
                "lag": f"{counters.policy_lag:.1f}",
                "queued": str(queued),
            }
            numbers |= {"streams": streams} if streams else {}
            left = min(max(0, total - step) / sps, MOST_SECONDS_LEFT)
            rest = f"{datetime.timedelta(seconds=int(left))} left"
        if self.bar:
            self.bar.n = min(step, total)
            try:
                self.bar.set_postfix(numbers)
            except OSError:  # the terminal has closed, but the run continues
                self.bar = None
            return
        parts = [*(f"{k} {v}" for k, v in numbers.items()), rest]
        log.info("Step %s of %s, %s", f"{step:,}", f"{total:,}", ", ".join(parts))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the terminal has closed
            self._stack.close()


def mean_return(counters: Any, flags: Any) -> str:
    """Of the last games; "-" before the first."""
    mean = counters.mean_return(flags.episodes_for_avg)
    return "-" if mean is None else f"{mean:.2f}"
