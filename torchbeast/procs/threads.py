"""Threads that work for one loop and end with it; MonoBeast's learner threads."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Threads:
    """Daemon threads whose `errors` a loop sees; `wake` is called when one ends."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.errors: list[BaseException] = []
        self._wake, self._threads = wake, list[threading.Thread]()
        self._stops: list[Callable[[], None]] = []

    def on_stop(self, stop: Callable[[], None]) -> None:
        """Registers a function that asks threads to return, and does not wait."""
        self._stops.append(stop)

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Starts a thread."""

        def guarded() -> None:
            with contextlib.suppress(OSError):  # for `top`, on Linux
                Path("/proc/thread-self/comm").write_text(name)
            try:
                work()
            except BaseException as error:
                self.errors.append(error)
            finally:
                self._wake()

        self._threads.append(threading.Thread(target=guarded, name=name, daemon=True))
        self._threads[-1].start()

    def end(self, seconds: float) -> list[str]:
        """Stops the threads. Returns the names of those that are still busy then."""
        for stop in self._stops:
            stop()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return self.busy()

    def busy(self) -> list[str]:
        return [thread.name for thread in self._threads if thread.is_alive()]


class LearnerThreads:
    """Threads that call work(slots, wait_for_turn) for each batch of slots.

    wait_for_turn returns when `work` has returned for all earlier batches. `count` 0:
    the caller's thread works.
    """

    def __init__(self, run: Any, count: int, work: Callable[..., None]) -> None:
        self.waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._last = threading.Event()  # whether the newest batch is learned from
        self._last.set()
        self._run, self._work, self._count, self._stopped = run, work, count, False
        run.on_stop(self._stop)
        for i in range(count):
            run.start_thread(f"learner-{i}", self._loop)

    def put(self, slots: list[int]) -> None:
        if not self._count:  # in this thread
            self._work(slots, lambda: None)
            return self._run.finish_updates()
        before, self._last = self._last, threading.Event()
        return self.waiting.put((slots, before, self._last))

    def _loop(self) -> None:
        while (batch := self.waiting.get()) is not None:
            slots, before, learned = batch
            try:
                if not self._stopped:  # else drop it
                    self._work(slots, before.wait)
            finally:
                learned.set()
            if learned is self._last:  # nothing waits
                self._run.finish_updates()

    def _stop(self) -> None:
        self._stopped = True
        for _ in range(self._count):
            self.waiting.put(None)
