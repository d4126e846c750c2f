"""The state of a run: a live line on a terminal, else a line in the log every 5 s."""

from __future__ import annotations

import datetime
import logging
import sys
import time
from typing import Any

from torchbeast.base.nested import with_places
from torchbeast.envs.values import parts_of

log = logging.getLogger(__name__)

STATUS_SECONDS = 5.0  # between two status lines, if there is no terminal
MOST_SECONDS_LEFT = 1e9  # to show; timedelta can't hold any number


def attach(run: Any) -> Progress:
    log_encoders(run.learner.model, run.flags.model)
    return Progress(run)


def log_encoders(model: Any, torso: str) -> None:
    """Logs which encoder each observation gets, and the number of weights."""
    is_image = getattr(model, "is_image", [])  # of another model: only the weights
    leaves = with_places(parts_of(model.observation_space), "observation")
    parts = [
        f"{place}: {getattr(leaf, 'shape', None) or leaf} → {torso if image else 'MLP'}"
        for (place, leaf), image in zip(leaves, is_image, strict=False)
    ]
    count = sum(x.numel() for x in model.parameters())
    log.info("The model: %s.", "; ".join([*parts, f"{count:,} weights"]))


class Progress:
    def __init__(self, run: Any) -> None:
        self.run, self.flags, self.learner = run, run.flags, run.learner
        self.last = time.monotonic()
        self.bar: Any = None

    def poll(self) -> None:
        """Begins the live line: only now is out.log open."""
        if not self.bar and sys.stderr and sys.stderr.isatty():
            self.bar = self.begin_line()

    def begin_line(self) -> Any:
        from tqdm import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm

        words: dict[str, Any] = {"unit": " steps", "unit_scale": True}
        total = self.flags.total_steps
        bar = tqdm(total=total, initial=self.learner.step, **words)
        # Its end gives the log its handlers of now: out.log is closed after the stack.
        self.run.stack.callback(bar.close)
        level = logging.root.handlers[0].level  # see print_warnings_only
        self.run.stack.enter_context(logging_redirect_tqdm())  # keeps the line whole
        logging.root.handlers[-1].setLevel(level)
        return bar

    def show(self, queued: int, acted: int, streams: str | None = None) -> None:
        """Shows the state of the run, at most 5 times per second."""
        interval = 0.2 if self.bar else STATUS_SECONDS
        if time.monotonic() - self.last < interval:
            return
        self.last = time.monotonic()
        step, total = self.learner.step, self.flags.total_steps
        counters = self.learner.counters
        if (sps := counters.sps()) is None:
            numbers, rest = {"actors' steps": f"{acted:,}"}, "waiting for an update"
        else:
            mean = counters.mean_return(self.flags.episodes_for_avg)
            numbers = {
                "SPS": f"{sps:,.0f}",
                "return": "-" if mean is None else f"{mean:.2f}",
                "games": str(counters.games),
                "lag": f"{counters.policy_lag:.1f}",
                "queued": str(queued),
            }
            numbers |= {"streams": streams} if streams else {}
            left = min(max(0, total - step) / sps, MOST_SECONDS_LEFT)
            rest = f"{datetime.timedelta(seconds=int(left))} left"
        if self.bar:
            self.bar.n = min(step, total)
            self.bar.set_postfix(numbers)  # nothing raises if the terminal has closed
            return
        parts = [*(f"{k} {v}" for k, v in numbers.items()), rest]
        log.info("Step %s of %s, %s", f"{step:,}", f"{total:,}", ", ".join(parts))
