"""Where a loop spends its time."""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

PROFILE_AFTER, PROFILE_UPDATES = 10, 20  # updates before a trace, and in it


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


class Profile:
    """Writes FOLDER/trace.json for --write_profiler_trace, with torch.profiler.

    The trace holds PROFILE_UPDATES updates after the first PROFILE_AFTER, of all
    threads of this process; chrome://tracing and Perfetto show it.

    Args:
      version: number of updates at which the run begins.
    """

    def __init__(self, flags: argparse.Namespace, version: int) -> None:
        self.begin = version + PROFILE_AFTER if flags.write_profiler_trace else None
        self.profiler: Any = None

    def update(self, version: int, folder: Path) -> None:
        """Begins or ends the trace, if it is time to."""
        if self.begin is None:
            return
        if self.profiler is None and version >= self.begin:
            # Not above: servers, which load no torch, use the rest of this file.
            from torch import profiler
            from torch._C._profiler import _ExperimentalConfig

            activities = profiler.supported_activities()
            self.profiler = profiler.profile(
                activities=activities,
                experimental_config=_ExperimentalConfig(profile_all_threads=True),
            )
            self.profiler.start()
        elif self.profiler is not None and version >= self.begin + PROFILE_UPDATES:
            self.close(folder)

    def close(self, folder: Path) -> None:
        """Writes the trace, also one that the run's end has cut short."""
        if self.profiler is None:
            return
        self.profiler.stop()
        path = folder / "trace.json"
        self.profiler.export_chrome_trace(str(path))
        log.info("Profiler trace in %s", path)
        self.begin = self.profiler = None
