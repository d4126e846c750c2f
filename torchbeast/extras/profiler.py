"""--write_profiler_trace: a trace of some updates in trace.json, by torch.profiler.

chrome://tracing and Perfetto show it. It has all threads of the learner's process.
"""

import logging
import math
from typing import Any

from torchbeast.base.flag import START, Group, flag

log = logging.getLogger(__name__)

SKIPPED, RECORDED = 10, 20  # updates before the trace, and in it


class Flags(Group):
    write_profiler_trace: bool = flag(False, "profile some updates: trace.json", START)


def attach(run: Any) -> "Profiler | None":
    return Profiler(run) if run.flags.write_profiler_trace else None


class Profiler:
    def __init__(self, run: Any) -> None:
        self.run, self.begin = run, float(run.learner.num_updates + SKIPPED)
        self.profiler: Any = None

    def poll(self) -> None:
        """Starts or ends the trace if it is time to."""
        from torch import profiler
        from torch._C._profiler import _ExperimentalConfig

        updates = self.run.learner.num_updates
        if not self.profiler and updates >= self.begin:
            self.profiler = profiler.profile(
                activities=profiler.supported_activities(),
                experimental_config=_ExperimentalConfig(profile_all_threads=True),
            )
            self.profiler.start()
        elif self.profiler and updates >= self.begin + RECORDED:
            self.close(0)

    def close(self, status: int) -> None:
        """Writes the trace, even if the run ended before the trace was complete."""
        if self.profiler:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.run.folder / "trace.json"))
            log.info("Profiler trace in %s", self.run.folder / "trace.json")
            self.profiler, self.begin = None, math.inf
