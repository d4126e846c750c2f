"""Signals and processes: how they start, how they end, what they leave behind.

The learner and the environment servers use this. It loads neither torch nor NumPy, and
importing it changes nothing.

Three sets of handlers for the stop signals (SIGINT, SIGTERM, SIGHUP) follow each other
in a script: while it imports, a signal ends it at once (exit_on_stop_signals); while it
prepares a run, a signal raises KeyboardInterrupt (raise_on_stop_signals); while it
works, a signal is noted and wakes the main thread (StopSignals, or a handler of its
own). Each gives exit status 128 + the signal's number and no traceback.

Each process that runs an environment leads a process group of its own, so that the
programs which the environment has started can be killed with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

from torchbeast.core.errors import UserError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Within this time after the first signal, others are the same request: programs such as
# timeout signal the process and then its group, and people press Ctrl-C twice.
SAME_REQUEST_SECONDS = 1.0


class ProcessError(UserError, RuntimeError):
    """A child process died, raised or got stuck."""


# --- Signals --------------------------------------------------------------------------


def handled_signals() -> list[signal.Signals]:
    """The stop signals, but not a SIGHUP that this process ignores (see nohup)."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [n for n in STOP_SIGNALS if not (ignored and n == signal.SIGHUP)]


def exit_on_stop_signals() -> None:
    """For the first lines of a script, before its slow imports."""
    for number in handled_signals():
        signal.signal(number, _exit_at_once)


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    # Not an exception: code that is being imported might catch it, or print it.
    name = signal.Signals(number).name
    with contextlib.suppress(OSError):
        os.write(2, f"{name} during the start: nothing was begun.\n".encode())
    os._exit(128 + number)


@contextlib.contextmanager
def handling(
    handler: Callable[[int, FrameType | None], Any],
) -> Iterator[None]:
    """Handles stop signals like this; afterwards as before.

    Only in a script that has called exit_on_stop_signals they are ignored afterwards:
    then it is about to exit with a status of its own.
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
        if now - first > SAME_REQUEST_SECONDS:  # some code has caught the exception
            os._exit(128 + number)

    with handling(handler):
        yield


class StopSignals:
    """Notes stop signals instead of ending the process, and wakes the main thread.

    Attributes:
      number: the first signal, or 0.
      wake_reader: a file descriptor that is ready to be read after a signal.
    """

    def __init__(self) -> None:
        self.number = 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number

    def __enter__(self) -> StopSignals:
        self.wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self.wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._old_wakeup = signal.set_wakeup_fd(
            self._wake_writer, warn_on_full_buffer=False
        )
        self._handling = handling(self._note)
        self._handling.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handling.__exit__(None, None, None)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self.wake_reader)
        os.close(self._wake_writer)


def run_script(main: Callable[[], int]) -> NoReturn:
    """Ends this process with the status that `main` returns.

    If the terminal is gone, what is left to print is dropped: Python would otherwise
    end with status 120.
    """
    status = main()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(status)


def num_cpus() -> int:
    """The CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --- Child processes ------------------------------------------------------------------


@contextlib.contextmanager
def starting_children() -> Iterator[None]:
    """Child processes that are started meanwhile get no stop signals.

    They call begin_child() first, which takes signals again. So a Ctrl-C can't reach a
    child that still imports modules; the parent gets it afterwards.
    """
    from multiprocessing import resource_tracker  # slow

    old = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        # It unblocks SIGINT and SIGTERM in this process, so it has to come first.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def begin_child(ends_by: Sequence[int] = ()) -> None:
    """The first call of a child process that runs environments.

    It leads a process group from now on, for kill_group and Guardian. A terminal's
    signals don't reach that group, and those of a batch system have no effect: the
    parent decides what they mean.

    Args:
      ends_by: stop signals by which the parent ends the child.
    """
    os.setpgid(0, 0)
    for number in handled_signals():
        # Not SIG_IGN, which programs that an environment starts would inherit.
        handler = signal.SIG_DFL if number in ends_by else lambda number, frame: None
        signal.signal(number, handler)
    # Output of a group in the background; the terminal may be set to stop it.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def kill_group(pid: int | None) -> None:
    """Kills what is left of the process group that this child leads or led."""
    if pid is not None:
        # macOS: no permission for zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def end_processes(processes: Sequence[Any], seconds: float) -> list[Any]:
    """Waits for processes to end, kills those that don't, and all their groups.

    Args:
      processes: of multiprocessing.
      seconds: granted to all of them together to end by themselves.

    Returns:
      Those that had to be killed.
    """
    killed = []
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            killed.append(process)
            process.kill()
        kill_group(process.pid)
        process.join()
    return killed


def how_it_ended(code: int | None) -> str:
    """In words, the exit code of a process as multiprocessing gives it."""
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:  # a real-time signal
            name = str(-code)
        hint = " (out of memory? see dmesg)" if code == -signal.SIGKILL else ""
        return f"by signal {name}{hint}"
    return f"with exit status {code}"


FORK_SERVER_IS_GONE = 255  # exit code by which multiprocessing says so


def check_fork_server() -> None:
    """Raises ProcessError if the fork server has died, which starts processes."""
    from multiprocessing import forkserver  # slow

    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is None or not hasattr(os, "waitid"):  # macOS before Python 3.13
        return
    deadline = time.monotonic() + 1.0  # its pipes are closed a moment before its end
    with contextlib.suppress(ChildProcessError):
        while True:
            # Without reaping it, which multiprocessing does.
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
    """Kills child processes and their groups if this process dies before it has.

    It is a process of its own, and so it works even if this process gets SIGKILL while
    a child's environment hangs and holds Python's lock.

    Args:
      seconds: granted to the children to notice and to end by themselves.
    """

    def __init__(self, seconds: float) -> None:
        path = os.path.join(os.path.dirname(__file__), "guardian.py")
        with starting_children():
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", path, str(seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                bufsize=0,
            )

    def _write(self, number: int) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            self._process.stdin.write(f"{number:+d}\n".encode())

    def start(self, process: Any) -> None:
        """Starts a process of multiprocessing that calls begin_child(), and guards it.

        Raises:
          ProcessError: multiprocessing's fork server has died.
        """
        with starting_children():
            try:
                process.start()
            except (EOFError, OSError):
                check_fork_server()
                raise
            self._write(process.pid)

    def end(self, children: Sequence[Any], seconds: float) -> list[Any]:
        """Ends child processes as end_processes does; they are guarded no more."""
        killed = end_processes(children, seconds)
        for process in children:
            self._write(-process.pid)
        return killed

    def close(self) -> None:
        """Ends the guardian, after the children that it still guards."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def end_after_parent(end: Callable[[], None], seconds: float) -> None:
    """Starts a thread that calls `end` if the parent dies, and then exits."""
    from multiprocessing import connection, parent_process  # slow

    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        end()
        time.sleep(seconds)
        os._exit(1)  # an environment hangs

    threading.Thread(target=wait, daemon=True).start()
