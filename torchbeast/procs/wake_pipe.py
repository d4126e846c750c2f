"""A pipe that wakes a thread which waits for file descriptors."""

from __future__ import annotations

import contextlib
import os
import signal
import threading


class WakePipe:
    """One thread waits for `reader`, others call `wake`. Its methods return at once.

    Attributes:
      reader: a file descriptor; it is readable after `wake`, until `drain`.
    """

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the thread is awake
            os.write(self._writer, b"w")

    def wake_on_signals(self) -> int:
        """Lets signals with a handler wake, too. Returns the previous descriptor.

        Python allows it in the main thread only; elsewhere it has no effect.
        """
        return _set_wakeup_fd(self._writer)

    def stop_waking_on_signals(self, previous: int) -> None:
        _set_wakeup_fd(previous)

    def drain(self) -> bytes:
        """Empties the pipe. Returns its bytes, among them the numbers of signals."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.reader, 4096)
        return b""

    def close(self) -> None:
        os.close(self.reader)
        os.close(self._writer)


def _set_wakeup_fd(descriptor: int) -> int:
    if threading.current_thread() is not threading.main_thread():
        return -1
    return signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
