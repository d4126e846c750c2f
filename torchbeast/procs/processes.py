"""Stop signals, and starting and ending child processes.

The learner and the environment servers use this. Importing it loads neither torch nor
NumPy and has no side effects.

A script handles the stop signals (SIGINT, SIGTERM, SIGHUP) in three ways, one after
another. During its imports a signal ends it at once (exit_on_stop_signals). While it
prepares a run, a signal raises KeyboardInterrupt (raise_on_stop_signals). While it
runs, a signal is noted and wakes the main thread (StopSignals, or Run's handler). The
exit status is always 128 + the signal's number, without a traceback.

Each process that runs an environment leads a process group, so that programs which the
environment has started can be killed with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from torchbeast.base.errors import UserError
from torchbeast.base.hardware import num_cpus as num_cpus  # for users of this module
from torchbeast.procs import standard_streams
from torchbeast.procs.wake_pipe import WakePipe

if TYPE_CHECKING:
    from multiprocessing import connection

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals within this time after the first count as the same request: `timeout` signals
# the process and then its group, and people press Ctrl-C twice.
SAME_REQUEST_SECONDS = 1.0

# Bytes of TMPDIR. A socket's path may have 103, and multiprocessing adds 32.
LONGEST_TMPDIR = 70


class ProcessError(UserError, RuntimeError):
    """A child process died, raised or got stuck."""


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


@contextlib.contextmanager
def handling(
    handler: Callable[[int, FrameType | None], Any],
) -> Iterator[None]:
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


class StopSignals:
    """Notes stop signals and wakes the main thread.

    Attributes:
      number: the first signal, or 0.
      wake_pipe: its reader is readable after a signal.
    """

    def __init__(self) -> None:
        self.number = 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number

    def __enter__(self) -> StopSignals:
        self.wake_pipe = WakePipe()
        self._old_wakeup = self.wake_pipe.wake_on_signals()
        self._handling = handling(self._note)
        self._handling.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handling.__exit__(None, None, None)
        self.wake_pipe.stop_waking_on_signals(self._old_wakeup)
        self.wake_pipe.close()


def run_script(main: Callable[[], int | None]) -> NoReturn:
    """Exits with the status that `main` returns; None is 0."""
    standard_streams.keep_open()
    sys.exit(main())


# --- Child processes ------------------------------------------------------------------


@contextlib.contextmanager
def starting_children() -> Iterator[None]:
    """Blocks stop signals in child processes that start inside this block.

    begin_child() unblocks them, and exit_on_stop_signals() in a script. So a signal
    can't hit a child while Python starts. The parent gets the signal after this block.
    Other programs don't unblock them, so don't start them inside.
    """
    from multiprocessing import resource_tracker  # slow

    _choose_folder_of_sockets()
    old = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # first, because it unblocks signals
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def _choose_folder_of_sockets() -> None:
    """Lets multiprocessing use /tmp if TMPDIR is too long for the path of a socket."""
    import tempfile  # slow
    from multiprocessing import util

    before = tempfile.tempdir
    try:
        if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TMPDIR:
            tempfile.tempdir = "/tmp"
            util.get_temp_dir()  # it keeps this choice
    except OSError as error:
        raise ProcessError(
            f"no folder for temporary files: {error}. Set TMPDIR to one that exists, "
            f"with at most {LONGEST_TMPDIR} bytes, and has free space"
        ) from None
    finally:
        tempfile.tempdir = before


def begin_child(ends_by: Sequence[int] = ()) -> None:
    """Prepares a child process that runs environments; its first call.

    The child becomes the leader of a process group, for Guardian, and prints its stack
    on SIGUSR1. Stop signals of a terminal don't reach it, and those of a batch system
    have no effect: only the parent reacts to them. SIGTERM ends processes that the
    child forks.

    Args:
      ends_by: stop signals that end the child nevertheless.
    """
    os.setpgid(0, 0)
    standard_streams.keep_open()
    faulthandler.register(signal.SIGUSR1)
    # Environments may start processes, which Python forbids to a "daemon".
    multiprocessing.current_process().daemon = False
    for number in handled_signals():
        # Not SIG_IGN: programs that the environment starts would inherit it.
        handler = signal.SIG_DFL if number in ends_by else lambda number, frame: None
        signal.signal(number, handler)
    _let_sigterm_end_forks()
    # A terminal may stop background groups that write to it (stty tostop).
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _let_sigterm_end_forks() -> None:
    """So multiprocessing's terminate() ends processes that the environment forks."""
    sigterm = [signal.SIGTERM]

    def begin() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, sigterm)

    os.register_at_fork(  # blocked until the process has its own handler
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, sigterm),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, sigterm),
        after_in_child=begin,
    )


def receive(process: Any, pipe: Any, who: str) -> Any:
    """A message from a child process; None if it has sent none yet.

    Args:
      process: of multiprocessing.
      pipe: its connection.
      who: begins the message of the error.

    Raises:
      ProcessError: it has died, and nothing is left in the pipe.
    """
    alive = process.is_alive()  # asked first: it may send its last message and exit
    # The pipe may have no EOF after the process has died: its own children may hold
    # the other end.
    with contextlib.suppress(EOFError, OSError):
        if pipe.poll():
            return pipe.recv()
        if alive:
            return None
    process.join(1.0)
    raise ProcessError(f"{who} died {how_it_ended(process.exitcode)}")


def how_it_ended(code: int | None) -> str:
    """Describes an exit code of multiprocessing in words."""
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:  # a real-time signal
            name = str(-code)
        hint = " (out of memory? see dmesg)" if code == -signal.SIGKILL else ""
        return f"by signal {name}{hint}"
    return f"with exit status {code}"


FORK_SERVER_IS_GONE = 255  # multiprocessing's exit code if the fork server has died


def check_fork_server() -> None:
    """Raises ProcessError if multiprocessing's fork server has died."""
    from multiprocessing import forkserver  # slow

    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is None or not hasattr(os, "waitid"):  # macOS before Python 3.13
        return
    deadline = time.monotonic() + 1.0  # it closes its pipes shortly before it exits
    with contextlib.suppress(ChildProcessError):
        while True:
            # WNOWAIT: multiprocessing reaps it.
            how = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if how is not None:
                exited = how.si_code == os.CLD_EXITED
                code = how.si_status if exited else -how.si_status
                raise ProcessError(
                    "the process that starts actors (fork server) died "
                    f"{how_it_ended(code)}"
                )
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)


class Guardian:
    """Kills child processes and their groups if this process dies.

    It is a separate process, so it works even if this process gets SIGKILL while a
    child's environment hangs and holds Python's lock.

    Args:
      seconds: time for the children to exit before they are killed.
      number: a signal that they get first, or 0.
    """

    def __init__(self, seconds: float, number: int = 0) -> None:
        path = os.path.join(os.path.dirname(__file__), "guardian.py")
        with starting_children():
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", path, str(seconds), str(int(number))],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                bufsize=0,
            )

    def guard(self, pid: int) -> None:
        self._write(pid)

    def release(self, pid: int) -> None:
        """Stops guarding a process that has exited."""
        self._write(-pid)

    def _write(self, number: int) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # the guardian was killed
            self._process.stdin.write(f"{number:+d}\n".encode())

    def start(self, process: Any) -> None:
        """Starts and guards a process of multiprocessing, which calls begin_child().

        Raises:
          ProcessError: multiprocessing's fork server has died.
        """
        with starting_children():
            try:
                process.start()
            except (EOFError, OSError):
                check_fork_server()
                raise
            self.guard(process.pid)

    def end(self, children: Sequence[Any], seconds: float) -> None:
        """Waits for children to exit; kills the others, and the groups of all.

        Args:
          children: of multiprocessing.
          seconds: to wait for all of them together.
        """
        deadline = time.monotonic() + seconds
        for process in children:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
            # PermissionError: macOS raises it for zombies.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
            self.release(process.pid)

    def close(self) -> None:
        """Ends the guardian. It first ends the children that it still guards."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def end_on_request(
    end: Callable[[], None], seconds: float, pipe: connection.Connection
) -> None:
    """Starts a thread that waits for a request to end, calls `end` and exits later.

    A request is SIGTERM, if there is a handler, or the end of the other side of the
    pipe: the parent has died, or closes it because environments may ignore SIGTERM.
    This works while the main thread is busy. Call it in the main thread.

    Args:
      end: asks the main thread to exit.
      seconds: after this the process exits, because an environment hangs.
      pipe: to the parent, which sends nothing. Another thread may send.
    """
    from multiprocessing import connection  # slow

    signals = WakePipe()
    signals.wake_on_signals()

    def wait() -> None:
        while pipe not in (ready := connection.wait([pipe, signals.reader])):
            if ready and signal.SIGTERM in signals.drain():
                break
        end()
        time.sleep(seconds)
        os._exit(1)  # still here: an environment hangs

    threading.Thread(target=wait, daemon=True).start()
