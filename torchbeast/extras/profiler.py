"""--write_profiler_trace: a trace of some updates in trace.json, by torch.profiler.

chrome://tracing and Perfetto show it. It has all threads of the learner's process.
"""

from __future__ import annotations

import logging
from typing import Any

from torchbeast.base.flag import START, Group, flag

log = logging.getLogger(__name__)

SKIPPED, RECORDED = 10, 20  # updates before the trace, and in it


class Flags(Group):
    write_profiler_trace: bool = flag(
        *(False, "profile some updates of the learner process; writes trace.json"),
        START,
    )


def attach(run: Any) -> Profiler | None:
    return Profiler(run) if run.flags.write_profiler_trace else None


class Profiler:
    def __init__(self, run: Any) -> None:
        self.run, self.begin = run, run.learner.num_updates + SKIPPED
        self.profiler: Any = None
        self.is_done = False

    def poll(self) -> None:
        """Starts or ends the trace if it is time to."""
        updates = self.run.learner.num_updates
        if self.profiler and updates >= self.begin + RECORDED:
            self.close(0)
        elif not self.profiler and not self.is_done and updates >= self.begin:
            from torch import profiler
            from torch._C._profiler import _ExperimentalConfig

            self.profiler = profiler.profile(
                activities=profiler.supported_activities(),
                experimental_config=_ExperimentalConfig(profile_all_threads=True),
            )
            self.profiler.start()

    def close(self, status: int) -> None:
        """Writes the trace, even if the run ended before the trace was complete."""
        if not self.profiler:
            return
        self.profiler.stop()
        path = self.run.folder / "trace.json"
        self.profiler.export_chrome_trace(str(path))  # it does not raise if it fails
        if path.is_file():
            log.info("Profiler trace in %s", path)
        else:
            log.warning("The profiler could not write its trace to %s", path)
        self.profiler, self.is_done = None, True
