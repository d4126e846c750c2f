"""MonoBeast's learner threads."""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from torchbeast.runs.run import Run


class LearnerThreads:
    """Threads that call work(slots, wait_for_turn) for each batch of slots.

    wait_for_turn returns when `work` has returned for all earlier batches.
    """

    def __init__(self, run: Run, count: int, work: Callable[..., None]) -> None:
        self.waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._last = threading.Event()  # whether the newest batch is learned from
        self._last.set()
        self._run, self._work, self._count = run, work, count
        run.on_stop(self._stop)
        for i in range(count):
            run.start_thread(f"learner-{i}", self._loop)

    def put(self, slots: list[int]) -> None:
        if not self._count:  # --serial: in this thread
            self._work(slots, lambda: None)
            return self._run.finish_updates()
        before, self._last = self._last, threading.Event()
        return self.waiting.put((slots, before, self._last))

    def _loop(self) -> None:
        while (batch := self.waiting.get()) is not None:
            slots, before, learned = batch
            try:
                self._work(slots, before.wait)
            finally:
                learned.set()
            if learned is self._last:  # nothing waits
                self._run.finish_updates()

    def _stop(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:  # drop waiting batches; nobody waits for their turn
                if batch := self.waiting.get_nowait():
                    batch[-1].set()
        for _ in range(self._count):
            self.waiting.put(None)
