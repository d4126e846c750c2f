"""Where a loop spends its time."""

from __future__ import annotations

import time


class Timings:
    """Seconds per named section of a loop, for one thread.

        timings = Timings()
        while running:
            timings.reset()
            batch = gather()
            timings.time("gather")
            learn(batch)
            timings.time("learn")

    `time` credits the section with what passed since the last `reset` or `time`. The
    work between the last `time` and the next `reset` is not counted. Each call costs
    well under a microsecond. On a GPU it is the time until the work was queued, unless
    the section waits for it.

    Attributes:
        seconds: total seconds per section, in the order of their first use.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.reset()

    def reset(self) -> None:
        """Start the clock: what passed before it belongs to no section."""
        self._last = time.perf_counter()

    def time(self, name: str) -> None:
        """Credit section `name` with the time since the last `reset` or `time`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def shares(self) -> dict[str, float]:
        """Each section's share of the time of all; the shares add up to 1."""
        total = sum(self.seconds.values()) or 1.0
        return {name: s / total for name, s in self.seconds.items()}


def format_shares(shares: dict[str, float]) -> str:
    """Shares as a person reads them: wait 20 %, learn 80 %."""
    parts = (f"{name} {100 * share:.0f} %" for name, share in shares.items())
    return ", ".join(parts) or "nothing timed"
