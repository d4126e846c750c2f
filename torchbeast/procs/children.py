"""Child processes: started, guarded, listened to and ended.

Each leads a process group, so that programs which its environment has started can be
killed with it. Importing this module loads neither torch nor NumPy.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import connection, resource_tracker
from typing import Any, NoReturn

from torchbeast.base.errors import UserError, text_of
from torchbeast.procs import processes

HINTS = {
    -signal.SIGKILL: " (out of memory? see dmesg)",
    -signal.SIGBUS: " (is /dev/shm full?)",
    255: ", or the process that starts actors (fork server) died (out of memory?)",
}


class ProcessError(UserError, RuntimeError):
    """A child process died, raised or got stuck."""


# --- In the parent --------------------------------------------------------------------


@contextlib.contextmanager
def starting_children() -> Iterator[None]:
    """Blocks stop signals in child processes that start inside this block.

    begin_child() unblocks them, and exit_on_stop_signals() in a script. So a signal
    can't hit a child while Python starts. Don't start other programs inside.
    """
    # multiprocessing sends these to each child, and pdb's kind of str can't be pickled.
    sys.argv[:1] = map(str, sys.argv[:1])
    if spec := getattr(sys.modules["__main__"], "__spec__", None):
        spec.name = str(spec.name)
    # multiprocessing puts sockets there, whose paths may have 103 bytes.
    if len(tempfile.gettempdir().encode()) > 70:
        tempfile.tempdir = "/tmp"
    resource_tracker.ensure_running()  # first, because it unblocks signals
    old = signal.pthread_sigmask(signal.SIG_BLOCK, processes.STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def how_it_ended(code: int, hints: Mapping[int, str] = HINTS) -> str:
    """Describes an exit code of multiprocessing in words."""
    names = {-x: f"by signal {x.name}" for x in signal.Signals}
    return names.get(code, f"with exit status {code}") + hints.get(code, "")


class Guardian:
    """Kills processes and their groups if this process dies, even by SIGKILL.

    They get the signal `number`, unless it is 0, and then `seconds` to exit.
    """

    def __init__(self, seconds: float, number: int = 0) -> None:
        path = os.path.join(os.path.dirname(__file__), "guardian.py")
        words = [sys.executable, "-I", "-S", path, str(seconds), str(int(number))]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        with starting_children():
            self._process = subprocess.Popen(words, stdin=pipe, stdout=null, bufsize=0)

    def guard(self, pid: int) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # the guardian was killed
            self._process.stdin.write(f"{pid:+d}\n".encode())

    def release(self, pid: int) -> None:
        """Stops guarding a process that has exited."""
        self.guard(-pid)

    def close(self) -> None:
        """Ends the guardian. It first ends the processes that it still guards."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


class Child:
    """A child process of multiprocessing with a pipe; Children.start makes it."""

    steps: Any = None  # an integer in shared memory that it counts up, for StepWatch
    hints: Mapping[int, str] = HINTS  # what its exit codes may mean

    def __init__(self, who: str, process: Any, pipe: connection.Connection) -> None:
        self.who, self.process, self.pipe = who, process, pipe

    def send(self, message: Any) -> None:
        """Sends a message. If the child has died, only `receive` says so."""
        with contextlib.suppress(OSError):
            self.pipe.send(message)

    def receive(self) -> Any:
        """A message from the child; None if it has sent none yet.

        Raises what the child has sent, see sending_errors; or ProcessError, if it has
        died and nothing is left in the pipe.
        """
        alive = self.process.is_alive()  # first: it may send a last message and exit
        # Its own children may hold the other end of the pipe: then there is no EOF.
        with contextlib.suppress(EOFError, OSError):
            if self.pipe.poll():
                message = self.pipe.recv()
                if isinstance(message, UserError):
                    raise message
                return message
            if alive:
                return None
        self.process.join(1.0)
        how = how_it_ended(self.process.exitcode, self.hints)
        raise ProcessError(f"{self.who} died {how}")

    def print_stack(self) -> None:
        """Makes it print its Python stack, see begin_child."""
        with contextlib.suppress(OSError):
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.5)

    def fail_stuck(self, seconds: float) -> NoReturn:
        """Makes it print its stack, and raises ProcessError."""
        self.print_stack()
        raise ProcessError(
            f"{self.who} made no step for {seconds:g} s. Its stack is above, if it "
            "could print it. If the environment is that slow, raise --actor_timeout"
        )


class Children(Guardian):
    """Child processes. They end at `close`, or `seconds` after this process died."""

    def __init__(self, context: Any, seconds: float = 0) -> None:
        super().__init__(seconds)
        self.context, self.alive = context, list[Child]()

    def start(self, who: str, target: Callable[..., None], *args: Any) -> Child:
        """Starts a child that calls target(*args, pipe), which calls begin_child()."""
        pipe, child_pipe = self.context.Pipe()
        process = self.context.Process(
            target=target, args=(*args, child_pipe), name=who, daemon=True
        )
        with starting_children():
            try:
                process.start()
            except (EOFError, OSError) as error:
                raise ProcessError(f"{who} can't be started: {error!r}") from error
            self.guard(process.pid)
        child_pipe.close()
        self.alive.append(Child(f"{who} (pid {process.pid})", process, pipe))
        return self.alive[-1]

    def end(self, seconds: float = 0, children: Sequence[Child] | None = None) -> None:
        """Waits for children (None: all) to exit; kills the others, and all groups."""
        deadline = time.monotonic() + seconds
        for child in list(self.alive if children is None else children):
            process = child.process
            process.join(max(0.0, deadline - time.monotonic()))
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
    """Waits until a child has sent something or has died. Returns these children."""
    children = list(children)
    objects = [x for child in children for x in (child.pipe, child.process.sentinel)]
    ready = connection.wait([*objects, *wake_up], timeout)
    return [c for c in children if c.pipe in ready or c.process.sentinel in ready]


class StepWatch:
    """Finds children that take no steps for `timeout` seconds.

    `awake` is the time of watching, without the time in which the run is suspended.
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
            steps, (seen, since) = int(child.steps), self._seen.get(child, (-1, 0.0))
            if steps != seen:
                self._seen[child] = steps, self.awake
            elif self.awake - since > self.timeout:
                child.fail_stuck(self.timeout)


# --- In the child ---------------------------------------------------------------------


@contextlib.contextmanager
def sending_errors(pipe: connection.Connection, problem: str) -> Iterator[None]:
    """Sends what the block raises to Child.receive; if it is no UserError, as text."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, UserError):
            error = ProcessError(f"{problem}:\n{text_of(error)}")
        with contextlib.suppress(OSError):  # the parent has exited
            pipe.send(error)


def begin_child() -> None:
    """Prepares a child process that runs environments; its first call.

    The child leads a process group, and prints its stack on SIGUSR1. Stop signals have
    no effect: only the parent reacts to them. SIGTERM ends what the child forks.
    """
    os.setpgid(0, 0)
    processes.keep_streams_open()
    faulthandler.register(signal.SIGUSR1)
    # Environments may start processes, as they may outside of a child.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method(None, force=True)
    for number in processes.handled_signals():
        # Not SIG_IGN: programs that the environment starts would inherit it.
        signal.signal(number, lambda number, frame: None)
    # Blocked during a fork, because Python's forks drop the signals that wait.
    mask, term = signal.pthread_sigmask, signal.SIGTERM
    os.register_at_fork(
        before=lambda: mask(signal.SIG_BLOCK, [term]),
        after_in_parent=lambda: mask(signal.SIG_UNBLOCK, [term]),
        after_in_child=lambda: (
            signal.signal(term, signal.SIG_DFL),
            mask(signal.SIG_UNBLOCK, [term]),
        ),
    )
    # A terminal may stop background groups that write to it (stty tostop).
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.STOP_SIGNALS)
