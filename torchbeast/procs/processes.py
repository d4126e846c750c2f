"""Stop signals, and the start and the end of a script.

Importing it loads neither torch nor NumPy and has no side effects.

A script handles the stop signals (SIGINT, SIGTERM, SIGHUP) in three ways, one after
another. During its imports a signal ends it at once (exit_on_stop_signals). While it
prepares a run, a signal raises KeyboardInterrupt (raise_on_stop_signals). While it
runs, a signal is noted and wakes the main thread (StopSignals, or Run's handler). The
exit status is always 128 + the signal's number, without a traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torchbeast.base.hardware import num_cpus as num_cpus  # for users of this module
from torchbeast.procs import standard_streams

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals within this time after the first count as the same request: `timeout` signals
# the process and then its group, and people press Ctrl-C twice.
SAME_REQUEST_SECONDS = 1.0


# --- Signals --------------------------------------------------------------------------


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
        signal.signal(number, _exit_at_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def require_native() -> None:
    """Imports libtorchbeast; ends the process with the reason if this can't be done.

    scripts/train_pong sets up a checkout without the C++ part. In the environment of
    such a checkout, this builds it first, which takes about a minute.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("libtorchbeast")
        return
    checkout = Path(__file__).resolve().parents[2]
    in_its_environment = Path(sys.prefix).resolve() == checkout / ".venv"
    if in_its_environment and os.environ.get("TORCHBEAST_NATIVE") != "skip":
        set_up = ["bash", str(checkout / "scripts" / "setup")]
        sys.stderr.write(f"PolyBeast's C++ part is missing: {shlex.join(set_up)}\n")
        subprocess.run(set_up, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
        importlib.invalidate_caches()
    try:
        importlib.import_module("libtorchbeast")
    except ImportError as error:
        sys.exit(str(error))


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    # Not an exception: an imported module might catch or print it.
    name = signal.Signals(number).name
    with contextlib.suppress(OSError):
        os.write(2, f"{name} during the start: no run was started.\n".encode())
    os._exit(128 + number)


def name_thread(name: str) -> None:
    """Names this thread for `top` and tools/trial.py, if the system is Linux.

    Threads that it starts inherit the name.
    """
    with contextlib.suppress(OSError):
        Path("/proc/thread-self/comm").write_text(name)


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Installs a handler for stop signals, and restores the old ones afterwards.

    Exception: after exit_on_stop_signals, signals are ignored afterwards, because the
    script is about to exit with the right status.
    """
    old = {number: signal.signal(number, handler) for number in handled_signals()}
    try:
        yield
    finally:
        for number, old_handler in old.items():
            at_exit = old_handler == _exit_at_once
            if old_handler is not None:  # None: of C code, which can't be restored
                signal.signal(number, signal.SIG_IGN if at_exit else old_handler)


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


def run_script(main: Callable[[], int | None]) -> NoReturn:
    """Exits with the status that `main` returns; None is 0."""
    standard_streams.keep_open()
    sys.exit(main())
