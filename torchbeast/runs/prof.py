"""Time per section of a loop."""

import logging
import time
from collections.abc import Mapping

log = logging.getLogger(__name__)


class Timings:
    """Seconds per named section of a loop, for one thread.

    The time between the last `time` and the next `reset` is not counted. Each call
    costs well under a microsecond. GPU work counts only until it is queued, unless the
    section waits for its result.

    Attributes:
      seconds: total seconds per section, in the order of their first use.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.reset()

    def reset(self) -> None:
        """Starts the clock."""
        self._last = time.perf_counter()

    def time(self, name: str) -> None:
        """Adds the time since the last `reset` or `time` to section `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def shares(self) -> dict[str, float]:
        """Each section's share of the total time; the sum is 1."""
        total = sum(self.seconds.values()) or 1.0
        return {name: s / total for name, s in self.seconds.items()}


def format_shares(shares: Mapping[str, float]) -> str:
    """Formats shares as "wait 20 %, learn 80 %"."""
    parts = (f"{name} {100 * share:.0f} %" for name, share in shares.items())
    return ", ".join(parts) or "nothing timed"
