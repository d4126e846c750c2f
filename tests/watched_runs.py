"""Runs in sessions of their own, and what they leave behind.

For tests that bring faults about: Run starts a script and looks at its processes,
messages and files. Needs Linux.
"""

import contextlib
import fcntl
import functools
import json
import os
import pathlib
import re
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import runs
import torch
from runs import patience

SHARED_MEMORY = pathlib.Path("/dev/shm")
END_SECONDS = 10.0  # within which every fault ends the run, if the machine is idle
ACTOR_TIMEOUT = 6.0
FAULTY = pathlib.Path(__file__).with_name("faulty.py")

# A run without end that saves a checkpoint more than once a second.
FLAGS = {
    "env": "faulty:Environment",
    "num_actors": 2,
    "envs_per_actor": 3,
    "batch_size": 2,
    "unroll_length": 50,
    "total_steps": 10**9,
    "checkpoint_interval": 0.5,
    "precision": "fp32",
    "torch_threads": 1,
}


def starter(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """For a fixture: starts what `make` returns, and kills it after the test."""
    started: list[Any] = []

    def start(*arguments: Any, **flags: Any) -> Any:
        started.append(make(*arguments, **flags))
        return started[-1]

    yield start
    for one in started:
        one.kill()


class Process(NamedTuple):
    pid: int
    parent: int
    command: str


def processes_of_session(session: int) -> list[Process]:
    """The living processes of a session, oldest first; zombies don't count."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            _, _, rest = (path / "stat").read_text().rpartition(")")
            state, parent, _, its_session = rest.split()[:4]
            command = (path / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if int(its_session) == session and state not in "ZX":
            started = int(rest.split()[19])
            found.append((started, Process(int(path.name), int(parent), command)))
    return [process for _, process in sorted(found)]


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> None:
    begun = time.monotonic()
    while not condition():
        waited = time.monotonic() - begun
        assert waited < patience(seconds), f"after {waited:.0f} s still not: {what}"
        time.sleep(0.01)


@functools.cache
def mount_namespace() -> tuple[str, ...] | None:
    """Words that run a command where it can mount; None where this is not allowed."""
    for words in (("unshare", "--mount"), ("unshare", "--mount", "--map-root-user")):
        test = [*words, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run(test, capture_output=True, check=False).returncode == 0:
                return words
    return None


def small_disk(folder: pathlib.Path, size: str) -> tuple[str, ...]:
    """Words that run a command to which `folder` is an empty disk of this size.

    Where it can't be mounted, no file of the command can become larger.
    """
    if (words := mount_namespace()) is None:
        most = int(size[:-1]) << {"k": 10, "m": 20}[size[-1]]
        return ("prlimit", f"--fsize={most}")
    script = 'mount -t tmpfs -o "size=$0" tmpfs "$1" && shift && exec "$@"'
    return (*words, "sh", "-c", script, size, str(folder))


def own_terminal() -> None:
    """Makes standard input the terminal of this session, whose end is noticed."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Run:
    """A run in its own session, observed from outside.

    Args:
      fresh: a new program, which imports all that it needs; else see runs.Forked.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        xpid: str = "run",
        faulty_learner: bool = False,
        prefix: Sequence[str] = (),
        savedir: pathlib.Path | None = None,
        terminal: bool = False,
        fresh: bool = False,
        **flags: Any,
    ) -> None:
        self.savedir = savedir or folder
        self.xpid = xpid
        self._disk = -1
        self.fault_file = folder / "fault"
        self.fault_file.unlink(missing_ok=True)
        words = runs.command(self.savedir, xpid, **{**FLAGS, **flags})
        if faulty_learner:
            words[1:3] = [str(FAULTY)]
        self.shared_memory_before = set(os.listdir(SHARED_MEMORY))
        self._console = folder / f"console-{time.monotonic_ns()}"
        self._console.touch()
        if terminal:
            self._terminal, screen = os.openpty()
            self._terminal_closed = False
            size = struct.pack("4H", 24, 200, 0, 0)  # lines and columns
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, size)
            self._reader = threading.Thread(target=self._read_terminal)
            self._reader.start()
        else:
            screen = os.open(self._console, os.O_WRONLY)
        variables = {"FAULT_FILE": str(self.fault_file)}
        self.process: runs.Process
        if prefix or terminal or fresh:
            self.process = subprocess.Popen(
                [*prefix, *words],
                stdin=screen if terminal else subprocess.DEVNULL,
                stdout=screen,
                stderr=screen,
                env={**runs.environment(), **variables},
                start_new_session=True,
                preexec_fn=own_terminal if terminal else None,
            )
        else:
            self.process = runs.Forked(words, screen, variables=variables)
        os.close(screen)
        self.pid = self.process.pid

    def _read_terminal(self) -> None:
        with contextlib.suppress(OSError), self._console.open("ab", 0) as console:
            while not self._terminal_closed:
                if select.select([self._terminal], [], [], 0.05)[0]:
                    console.write(os.read(self._terminal, 4096))

    def close_terminal(self) -> None:
        """Closes the terminal, as closing its window or ending an ssh session does."""
        self._terminal_closed = True
        self._reader.join()
        os.close(self._terminal)

    @property
    def path(self) -> pathlib.Path:
        return self.savedir / self.xpid

    @property
    def checkpoint(self) -> pathlib.Path:
        return self.path / "model.tar"

    @property
    def console(self) -> str:
        return self._console.read_text(errors="replace")

    def see_small_disk(self, folder: pathlib.Path) -> pathlib.Path:
        """The disk that `small_disk` mounts for the run, also when the run is over."""
        inside = pathlib.Path(f"/proc/{self.pid}/root", folder.relative_to("/"))
        device = folder.stat().st_dev
        self.wait_for(lambda: inside.stat().st_dev != device, f"a disk at {folder}")
        self._disk = os.open(inside, os.O_RDONLY)  # outlives the mount
        return pathlib.Path(f"/proc/self/fd/{self._disk}")

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        def condition_or_end() -> bool:
            met = bool(condition())
            assert met or self.process.poll() is None, f"ended early:\n{self.console}"
            return met

        wait_until(condition_or_end, what)

    def wait_for_updates(self, number: int = 1) -> None:
        """Waits until logs.csv has this many more lines."""
        logs = self.path / "logs.csv"

        def lines() -> int:
            return logs.read_bytes().count(b"\n") if logs.exists() else 1

        before = lines()
        self.wait_for(lambda: lines() >= before + number, f"{number} updates")

    def wait_for_a_checkpoint(self) -> None:
        """Waits for a checkpoint after an update; not for an earlier one."""

        def learned() -> bool:
            if not self.checkpoint.exists():
                return False
            saved = torch.load(self.checkpoint, weights_only=True)
            return saved["stats"]["step"] > 0

        self.wait_for(learned, "a checkpoint after an update")

    def actors(self) -> list[int]:
        """Pids of the actors: children of the fork server, which is the learner's."""
        servers = self.fork_servers()
        processes = processes_of_session(self.pid)
        return [process.pid for process in processes if process.parent in servers]

    def fork_servers(self) -> list[int]:
        return [
            process.pid
            for process in processes_of_session(self.pid)
            if process.parent == self.pid
            and re.search("forkserver|forked_runs", process.command)
        ]

    def cause(self, fault: str) -> None:
        """Makes environments or the learner of faulty.py fail."""
        temporary = self.fault_file.with_suffix(".tmp")
        temporary.write_text(fault)
        temporary.replace(self.fault_file)

    def hang_in_loss(self) -> None:
        self.cause("hang_in_loss")
        self.wait_for(lambda: self.marks("hangs"), "the learner to hang")

    def marks(self, suffix: str) -> list[pathlib.Path]:
        """The files that faulty.py writes when it causes a fault."""
        return list(self.fault_file.parent.glob(f"{self.fault_file.name}.{suffix}"))

    def maps(self) -> str:
        """The libraries that the learner process has loaded."""
        with contextlib.suppress(OSError):
            return pathlib.Path(f"/proc/{self.pid}/maps").read_text()
        return ""

    def signal_group(self, number: int) -> None:
        """Sends the signals of a Ctrl-C in a terminal."""
        os.killpg(self.pid, number)

    def signal_all(self, number: int) -> None:
        """Signals all processes, like a batch system or a container that ends."""
        for process in processes_of_session(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def end(self, number: int = signal.SIGINT) -> None:
        """Signals the run, which has to end by it."""
        self.process.send_signal(number)
        self.wait_for_end(128 + number)

    def wait_for_end(self, status: int, seconds: float = END_SECONDS) -> None:
        """Waits for the end of the run; checks its status and that nothing is left."""
        try:
            returned = self.process.wait(patience(seconds))
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end within {seconds} s:\n{self.console}")
        assert returned == status, self.console
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        # The fork server and the resource tracker end when they see the others gone.
        wait_until(lambda: not processes_of_session(self.pid), "no process left", 5.0)
        # Polled, as other programs, such as other tests, use shared memory, too.
        wait_until(
            lambda: set(os.listdir(SHARED_MEMORY)) <= self.shared_memory_before,
            "no shared memory left",
        )

    def assert_error(
        self, *parts: str, tracebacks: int = 0, begun: bool = True
    ) -> None:
        """There was one error, with each of these words once, also in out.log.

        begun: False if the error came before this run wrote to its folder.
        """
        texts = [self.console]
        if begun and self.path.exists():
            texts.append((self.path / "out.log").read_text())
        for text in texts:
            for part in parts:
                assert text.count(part) == 1, (part, text)
        assert self.console.count("[ERROR ") == 1, self.console
        assert self.console.count("Traceback (most") == tracebacks, self.console

    def assert_no_error(self) -> None:
        assert "[ERROR " not in self.console, self.console
        assert "Traceback" not in self.console, self.console

    def assert_files(
        self, saved_at_end: bool = True, has_end: bool = True
    ) -> dict[str, Any]:
        """Checks that meta.json has the end, and that the checkpoint is good."""
        meta = json.loads((self.path / "meta.json").read_text())
        assert meta["successful"] is False
        assert meta["date_end"] or not has_end
        rows = runs.read_logs(self.savedir, self.xpid)
        if not rows:  # nothing was learned, so nothing is worth saving
            assert not self.checkpoint.exists()
            return {}
        saved = torch.load(self.checkpoint, weights_only=True)
        for name, tensor in saved["model_state_dict"].items():
            assert tensor.isfinite().all(), name
        last_step = int(rows[-1]["step"])
        if saved_at_end:
            assert saved["stats"]["step"] == last_step
        else:
            assert saved["stats"]["step"] <= last_step
        return saved

    def kill(self) -> None:
        for process in processes_of_session(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.process.wait()
        if self._disk >= 0:
            os.close(self._disk)
