"""The time per section of a loop."""

import time
from collections.abc import Mapping


class Timings:
    """Seconds per named section of a loop, for one thread, in the order of first use.

    GPU work counts only until it is queued, unless the section waits for its result.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.reset()

    def reset(self) -> None:
        """Starts the clock; the time since the last `time` is not counted."""
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
    """For example "wait 20 %, learn 80 %"."""
    return ", ".join(f"{name} {100 * x:.0f} %" for name, x in shares.items())
