"""Stop signals (SIGINT, SIGTERM, SIGHUP), and the standard streams of a process.

During the imports of a script a stop signal ends it at once. After them a signal raises
KeyboardInterrupt, or a loop notes it and ends: StopSignals, Run. The exit status is
always 128 + the signal's number. Importing this module does not load torch.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torchbeast.base.hardware import CORES

# With one of these, OpenMP pins the thread that imports PyTorch to one core.
PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals within this time after the first count as the same request: `timeout` signals
# the process and then its group, and people press Ctrl-C twice.
SAME_REQUEST_SECONDS = 1.0


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def handled_signals() -> list[signal.Signals]:
    """The stop signals, without SIGHUP if this process ignores it (nohup).

    None outside the main thread, where Python can't handle signals.
    """
    if not in_main_thread():
        return []
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [n for n in STOP_SIGNALS if not (ignored and n == signal.SIGHUP)]


def exit_on_stop_signals() -> None:
    """Makes stop signals end the process at once; for the imports of a script.

    Unblocks them: who started the process may have used starting_children().
    """
    for number in handled_signals():
        # Not an exception: an imported module might catch or print it.
        signal.signal(number, lambda number, frame: os._exit(128 + number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Installs a handler for stop signals, and restores the old ones afterwards."""
    old = {number: signal.signal(number, handler) for number in handled_signals()}
    try:
        yield
    finally:
        for number, before in old.items():  # None: a handler of C code
            signal.signal(number, signal.SIG_DFL if before is None else before)


@contextlib.contextmanager
def raise_on_stop_signals() -> Iterator[None]:
    """A stop signal raises KeyboardInterrupt(number); a later one ends the process."""
    first = 0.0

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if not first:
            first = now
            raise KeyboardInterrupt(number)
        if now - first > SAME_REQUEST_SECONDS:  # something has caught the exception
            os._exit(128 + number)

    with handling(handler):
        yield


class WakePipe:
    """One thread waits for `reader`, others call `wake`. Its methods return at once.

    Attributes:
      reader: a file descriptor; it is readable after `wake`, until `drain`.
    """

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)
        self._previous: int | None = None  # the descriptor that signals wrote to before

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the thread is awake
            os.write(self._writer, b"w")

    def wake_on_signals(self) -> None:
        """Lets signals with a handler wake, too, until `close`.

        Python allows it in the main thread only; elsewhere it has no effect.
        """
        if in_main_thread():
            writer = self._writer
            self._previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def drain(self) -> bytes:
        """Empties the pipe. Returns its bytes, among them the numbers of signals."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.reader, 4096)
        return b""

    def close(self) -> None:
        if self._previous is not None:
            signal.set_wakeup_fd(self._previous, warn_on_full_buffer=False)
        os.close(self.reader)
        os.close(self._writer)


class StopSignals(contextlib.ExitStack):
    """Notes stop signals and wakes the main thread.

    Attributes:
      number: the first signal, or 0.
      wake_pipe: its reader is readable after a signal.
    """

    number = 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number

    def __enter__(self) -> StopSignals:
        self.wake_pipe = WakePipe()
        self.callback(self.wake_pipe.close)
        self.wake_pipe.wake_on_signals()
        self.enter_context(handling(self._note))
        return self


def unpin() -> None:
    """Gives this thread all cores again, and all processes that it starts."""
    if sum(os.environ.pop(name, None) is not None for name in PINNING) and CORES:
        os.sched_setaffinity(0, CORES)


def name_thread(name: str) -> None:
    """Names this thread for `top` and tools/trial.py, if the system is Linux.

    Threads that it starts inherit the name.
    """
    with contextlib.suppress(OSError):
        Path("/proc/thread-self/comm").write_text(name)


class _Stream(io.FileIO):
    """A standard stream that drops what can't be written: no reader, a full disk."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            return super().write(data) or len(data)
        return len(data)


def keep_streams_open() -> None:
    """Makes writing to stdout and stderr safe: environments may print at any time.

    Closed streams become /dev/null. Otherwise the next opened file, such as a
    checkpoint, could get the descriptor of stderr, and C code would write into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # the lowest free number is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        # A stream that the caller has replaced is kept.
        if number and (old := getattr(sys, name)) is getattr(sys, f"__{name}__"):
            if old is not None:
                with contextlib.suppress(OSError):
                    old.flush()
            raw = io.BufferedWriter(_Stream(number, "w", closefd=False))
            encoding = getattr(old, "encoding", "utf-8")
            stream = io.TextIOWrapper(raw, encoding, "backslashreplace", None, True)
            setattr(sys, name, stream)
