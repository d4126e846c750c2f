"""Stop signals (SIGINT, SIGTERM, SIGHUP), and the standard streams of a process.

During the imports of a script a stop signal ends it at once. After them it raises
KeyboardInterrupt, or a loop notes it and ends, see Run. The exit status is always 128 +
the signal's number. Importing this module does not load torch.
"""

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals within this time after the first count as the same request: `timeout` signals
# the process and then its group, and people press Ctrl-C twice.
SAME_REQUEST_SECONDS = 1.0
# With one of these, OpenMP pins the thread that imports PyTorch to one core.
PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def handled_signals() -> list[signal.Signals]:
    """The stop signals, without SIGHUP under nohup; none outside the main thread."""
    if not in_main_thread():
        return []
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [n for n in STOP_SIGNALS if not (ignored and n == signal.SIGHUP)]


def _exit(number: int, frame: Any) -> None:
    os._exit(128 + number)  # not an exception, which somebody might catch or print


def exit_on_stop_signals() -> None:
    """Makes stop signals end the process at once; for the imports of a script.

    Unblocks them: who started the process may have used starting_children(). Keeps all
    cores for this process and its children.
    """
    for name in PINNING:
        os.environ.pop(name, None)
    for number in handled_signals():
        signal.signal(number, _exit)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextlib.contextmanager
def handling(handler: Any) -> Iterator[None]:
    """Installs a handler for stop signals, and restores the old ones afterwards."""
    old = {number: signal.signal(number, handler) for number in handled_signals()}
    try:
        yield
    finally:
        for number, before in old.items():  # None: a handler of C code
            signal.signal(number, before or signal.SIG_DFL)


@contextlib.contextmanager
def raise_on_stop_signals() -> Iterator[None]:
    """A stop signal raises KeyboardInterrupt(number); a later one ends the process."""

    def handler(number: int, frame: Any) -> None:
        for later in handled_signals():
            signal.signal(later, _exit)
        raise KeyboardInterrupt(number)

    with handling(handler):
        yield


class WakePipe:
    """One thread waits for `reader`, others call `wake`. Its methods return at once.

    `reader` is a file descriptor; it is readable after `wake`, until `drain`.
    """

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)
        self._before: int | None = None  # the descriptor that signals wrote to

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the thread is awake
            os.write(self._writer, b"w")

    def wake_on_signals(self) -> None:
        """Lets signals with a handler wake, too; only in the main thread."""
        if in_main_thread():
            self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def drain(self) -> bytes:
        """Empties the pipe. Returns its bytes, among them the numbers of signals."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.reader, 4096)
        return b""

    def close(self) -> None:
        if self._before is not None:
            signal.set_wakeup_fd(self._before, warn_on_full_buffer=False)
        os.close(self.reader)
        os.close(self._writer)


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
        if number and getattr(sys, name) is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(_Stream(number, "w", closefd=False))
            stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace", None, True)
            setattr(sys, name, stream)
