"""A pipe that wakes a thread which waits for file descriptors."""

from __future__ import annotations

import contextlib
import os
import signal


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
        """Lets signals with a handler wake, too. Returns the previous descriptor."""
        return signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.reader, 4096)

    def close(self) -> None:
        os.close(self.reader)
        os.close(self._writer)
