"""Child processes: started, guarded, listened to and ended.

Each process that runs an environment leads a process group, so that programs which the
environment has started can be killed with it. Importing this module loads neither torch
nor NumPy.
"""

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import connection, resource_tracker, util
from typing import Any, NoReturn

from torchbeast.base.errors import UserError
from torchbeast.procs import processes

# Bytes of TMPDIR. A socket's path may have 103, and multiprocessing adds 32.
LONGEST_TMPDIR = 70


class ProcessError(UserError, RuntimeError):
    """A child process died, raised or got stuck."""


# --- In the parent --------------------------------------------------------------------

HINTS = {
    -signal.SIGKILL: " (out of memory? see dmesg)",
    -signal.SIGBUS: " (is /dev/shm full?)",
    # multiprocessing's exit code if the process that starts the others has died
    255: ", or the process that starts actors (fork server) died (out of memory?)",
}


@contextlib.contextmanager
def starting_children() -> Iterator[None]:
    """Blocks stop signals in child processes that start inside this block.

    begin_child() unblocks them, and exit_on_stop_signals() in a script. So a signal
    can't hit a child while Python starts. The parent gets the signal after this block.
    Other programs don't unblock them, so don't start them inside.
    """
    processes.unpin()
    # multiprocessing sends these to each child, and pdb's kind of str can't be pickled.
    sys.argv[:1] = map(str, sys.argv[:1])
    if spec := getattr(sys.modules["__main__"], "__spec__", None):
        spec.name = str(spec.name)
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TMPDIR:
        tempfile.tempdir = "/tmp"
    util.get_temp_dir()  # multiprocessing keeps this choice for its sockets
    tempfile.tempdir = before
    old = signal.pthread_sigmask(signal.SIG_BLOCK, processes.STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # first, because it unblocks signals
        signal.pthread_sigmask(signal.SIG_BLOCK, processes.STOP_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def how_it_ended(code: int, hints: Mapping[int, str] = HINTS) -> str:
    """Describes an exit code of multiprocessing in words."""
    names = {-x: f"by signal {x.name}" for x in signal.Signals}
    return names.get(code, f"with exit status {code}") + hints.get(code, "")


class Guardian:
    """Kills processes and their groups if this process dies.

    It is a separate process, so it works even if this process gets SIGKILL while a
    child's environment hangs and holds Python's lock. Somebody has to close it.

    Args:
      seconds: time for the processes to exit before they are killed.
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

    def close(self) -> None:
        """Ends the guardian. It first ends the processes that it still guards."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


class Child:
    """A child process with a pipe; Children.start makes it.

    Attributes:
      who: what it is, for messages.
      process: of multiprocessing.
      pipe: the parent's end.
      steps: an integer in shared memory that the child counts up, for StepWatch.
    """

    steps: Any = None
    hints: Mapping[int, str] = HINTS  # what an exit code may mean

    def __init__(self, who: str, process: Any, pipe: connection.Connection) -> None:
        self.who, self.process, self.pipe = who, process, pipe

    def send(self, message: Any) -> None:
        """Sends a message. If the child has died, only `receive` says so."""
        with contextlib.suppress(OSError):
            self.pipe.send(message)

    def receive(self) -> Any:
        """A message from the child; None if it has sent none yet.

        Raises:
          UserError: what the child has sent, see sending_errors.
          ProcessError: it has died, and nothing is left in the pipe.
        """
        alive = self.process.is_alive()  # first: it may send a last message and exit
        # The pipe may have no EOF after the process has died: its own children may
        # hold the other end.
        with contextlib.suppress(EOFError, OSError):
            if self.pipe.poll():
                message = self.pipe.recv()
                if isinstance(message, UserError):
                    raise message
                return message
            if alive:
                return None
        raise ProcessError(f"{self.who} {self.how_it_died()}")

    def how_it_died(self) -> str:
        """Waits for the end of a dead process; "died" and how, in words."""
        self.process.join(1.0)
        return f"died {how_it_ended(self.process.exitcode, self.hints)}"


class Children(Guardian):
    """Child processes of multiprocessing. They end with this process, or at `close`.

    Args:
      context: of multiprocessing.
      seconds: time for the children to exit if this process dies.
    """

    def __init__(self, context: Any, seconds: float = 0) -> None:
        super().__init__(seconds)
        self.context = context
        self.alive: list[Child] = []

    def start(self, who: str, target: Callable[..., None], *args: Any) -> Child:
        """Starts a child that calls target(*args, pipe), which calls begin_child().

        Args:
          who: what it is, for messages.

        Raises:
          ProcessError: it can't be started.
        """
        pipe, child_pipe = self.context.Pipe()
        process = self.context.Process(
            target=target, args=(*args, child_pipe), name=who, daemon=True
        )
        with starting_children():
            try:
                process.start()
            except (EOFError, OSError) as error:
                raise ProcessError(
                    f"{who} can't be started: {error!r}. Is there memory, and a free "
                    "process?"
                ) from error
            self.guard(process.pid)
        child_pipe.close()
        child = Child(f"{who} (pid {process.pid})", process, pipe)
        self.alive.append(child)
        return child

    def end(self, seconds: float = 0, children: Sequence[Child] | None = None) -> None:
        """Waits for children to exit; kills the others, and the groups of all.

        Args:
          seconds: to wait for all of them together.
          children: None: all.
        """
        deadline = time.monotonic() + seconds
        for child in list(self.alive if children is None else children):
            process = child.process
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
            # PermissionError: macOS raises it for zombies.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join(5.0)  # one that hangs in the system delays our own exit only
            self.release(process.pid)
            self.alive.remove(child)

    def close(self) -> None:
        """Kills the children that are left, and ends the guardian."""
        self.end()
        super().close()


def wait(
    children: Iterable[Child], timeout: float, wake_up: Iterable[Any] = ()
) -> list[Child]:
    """Waits until a child has sent something or has died. Returns these children.

    Args:
      timeout: maximal seconds.
      wake_up: objects that end the wait when they are ready.
    """
    children = list(children)
    objects = [x for child in children for x in (child.pipe, child.process.sentinel)]
    ready = connection.wait([*objects, *wake_up], timeout)
    return [c for c in children if c.pipe in ready or c.process.sentinel in ready]


class StepWatch:
    """Finds children that take no steps.

    Args:
      timeout: seconds without a step after which a child is stuck.

    Attributes:
      awake: seconds of watching, without the time in which the run is suspended.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout, self.awake = timeout, 0.0
        self._checked_at = time.monotonic()
        self._seen: dict[Child, tuple[int, float]] = {}  # steps, and `awake` then

    def restart(self, child: Child) -> None:
        """Gives a child its full time, for example after it was idle."""
        self._seen.pop(child, None)

    def check(self, children: Iterable[Child]) -> None:
        """Call it once per second. Raises ProcessError if one of them is stuck."""
        now = time.monotonic()
        # A longer gap between two calls means that the run was suspended.
        self.awake += min(now - self._checked_at, 2.0)
        self._checked_at = now
        for child in children:
            steps = int(child.steps)
            seen, since = self._seen.get(child, (-1, 0.0))
            if steps != seen:
                self._seen[child] = steps, self.awake
            elif self.awake - since > self.timeout:
                self.fail(child)

    def fail(self, child: Child) -> NoReturn:
        """Prints the stack of a stuck child and raises ProcessError."""
        print_stack(child)
        raise ProcessError(
            f"{child.who} made no step for {self.timeout:g} s. Its stack is printed "
            "above, if the process could print it. If the environment is that slow, "
            "raise --actor_timeout"
        )


def print_stack(child: Child) -> None:
    """Makes a child print its Python stack, see begin_child."""
    with contextlib.suppress(OSError):
        os.kill(child.process.pid, signal.SIGUSR1)
        time.sleep(0.5)


# --- In the child ---------------------------------------------------------------------


@contextlib.contextmanager
def sending_errors(pipe: connection.Connection, problem: str) -> Iterator[None]:
    """Sends what the block raises; the parent's Child.receive raises it.

    Args:
      problem: begins the message, except of a UserError, which is sent as it is.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, UserError):
            error = ProcessError(f"{problem}:\n{traceback.format_exc()}")
        with contextlib.suppress(OSError):  # the parent has exited
            pipe.send(error)


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
    processes.keep_streams_open()
    faulthandler.register(signal.SIGUSR1)
    # Environments may start processes, as they may outside of a child.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method(None, force=True)
    for number in processes.handled_signals():
        # Not SIG_IGN: programs that the environment starts would inherit it.
        handler = signal.SIG_DFL if number in ends_by else lambda number, frame: None
        signal.signal(number, handler)
    # multiprocessing's terminate() ends processes that the environment forks. SIGTERM
    # is blocked until such a process has its own handler.
    mask = functools.partial(signal.pthread_sigmask, mask=[signal.SIGTERM])
    os.register_at_fork(
        before=lambda: mask(signal.SIG_BLOCK),
        after_in_parent=lambda: mask(signal.SIG_UNBLOCK),
        after_in_child=lambda: (
            signal.signal(signal.SIGTERM, signal.SIG_DFL),
            mask(signal.SIG_UNBLOCK),
        ),
    )
    # A terminal may stop background groups that write to it (stty tostop).
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.STOP_SIGNALS)
