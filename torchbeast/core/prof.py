"""Where a loop spends its time."""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

PROFILE_AFTER, PROFILE_UPDATES = 10, 20  # updates before the trace, and in it


class Timings:
    """Seconds per named section of a loop, for one thread.

        timings = Timings()
        while running:
            timings.reset()
            batch = gather()
            timings.time("gather")
            learn(batch)
            timings.time("learn")

    `time` adds the time since the last `reset` or `time` to the section. The time
    between the last `time` and the next `reset` is not counted. Each call costs well
    under a microsecond. Work on a GPU counts only until it is queued, unless the
    section waits for its result.

    Attributes:
        seconds: total seconds per section, in the order of their first use.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.reset()

    def reset(self) -> None:
        """Start the clock. The time before this call belongs to no section."""
        self._last = time.perf_counter()

    def time(self, name: str) -> None:
        """Add the time since the last `reset` or `time` to section `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def shares(self) -> dict[str, float]:
        """Each section's share of the total time; the shares add up to 1."""
        total = sum(self.seconds.values()) or 1.0
        return {name: s / total for name, s in self.seconds.items()}


def format_shares(shares: dict[str, float]) -> str:
    """Shares as text: wait 20 %, learn 80 %."""
    parts = (f"{name} {100 * share:.0f} %" for name, share in shares.items())
    return ", ".join(parts) or "nothing timed"


class Profile:
    """Writes FOLDER/trace.json for --write_profiler_trace, with torch.profiler.

    The trace skips PROFILE_AFTER updates, then records PROFILE_UPDATES updates of all
    threads of this process. chrome://tracing and Perfetto show it.

    Args:
      version: number of updates when the run begins.
    """

    def __init__(self, flags: argparse.Namespace, version: int) -> None:
        self.begin = version + PROFILE_AFTER if flags.write_profiler_trace else None
        self.profiler: Any = None

    def update(self, version: int, folder: Path) -> None:
        """Begins or ends the trace if this update is its first or last."""
        if self.begin is None:
            return
        if self.profiler is None and version >= self.begin:
            # Imported here: servers use the rest of this file and load no torch.
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
        """Writes the trace, even if the run ended before the trace was complete."""
        if self.profiler is None:
            return
        self.profiler.stop()
        path = folder / "trace.json"
        self.profiler.export_chrome_trace(str(path))
        log.info("Profiler trace in %s", path)
        self.begin = self.profiler = None
