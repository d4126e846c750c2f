"""Threads that work for one loop and end with it."""

import threading
import time
from collections.abc import Callable

from torchbeast.procs import processes


class Threads:
    """Daemon threads whose errors a loop sees.

    Args:
      wake: called when a thread ends.

    Attributes:
      errors: exceptions of threads, in their order.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.errors: list[BaseException] = []
        self._wake = wake
        self._threads: list[threading.Thread] = []
        self._stops: list[Callable[[], None]] = []

    def on_stop(self, stop: Callable[[], None]) -> None:
        """Registers a function that asks threads to return, and does not wait."""
        self._stops.append(stop)

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Starts a thread."""

        def guarded() -> None:
            processes.name_thread(name)
            try:
                work()
            except BaseException as error:
                self.errors.append(error)
            finally:
                self._wake()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

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
