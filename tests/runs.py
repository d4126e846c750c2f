"""Runs as a user starts them: real processes, real files."""

import contextlib
import csv
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A small, quick run on CartPole whose dimensions all differ.
SMALL = {
    "env": "CartPole-v1",
    "num_actors": 2,
    "envs_per_actor": 3,
    "batch_size": 2,
    "unroll_length": 5,
    "total_steps": 600,
    "precision": "fp32",
    "torch_threads": 1,
    "reward_clipping": "none",
}

# What `start_words` has started, until the end of the test.
STARTED: list["Process"] = []

needs_proc = pytest.mark.skipif(
    not os.path.exists("/proc/self/stat"), reason="reads /proc, which is Linux's"
)


def patience(seconds: float) -> float:
    """A time limit for an idle machine, extended if other programs keep it busy.

    Those have their way if the tests have a lower priority, as under scripts/test.
    """
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    return seconds * busy * (4.0 if os.nice(0) > 0 else 1.0)


def skip(reason: str) -> NoReturn:
    """Skips a test if a tool is missing; in CI, where no tool may be missing, fails it.

    A user who installed only the Python part does not need openssl, iproute2 or a C++
    compiler, and can run all other tests.
    """
    if os.environ.get("TORCHBEAST_NATIVE") == "require":
        pytest.fail(reason)
    pytest.skip(reason)


def command(
    savedir: Path, xpid: str, module: str = "torchbeast.monobeast", **flags: object
) -> list[str]:
    """The command line of a run; True gives a bare flag, None leaves one out.

    A test that runs PolyBeast is skipped here if there is no libtorchbeast.
    """
    if "polybeast" in module:
        pytest.importorskip("libtorchbeast", exc_type=ImportError)
    words = [sys.executable, "-m", module]
    for name, value in {"savedir": savedir, "xpid": xpid, **flags}.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


def environment() -> dict[str, str]:
    """The environment variables of a run: --env can name classes of the tests.

    One thread, because threads that spin while they wait are slow on a busy machine,
    and one of torch.compile, which starts as many processes as there are cores.
    """
    folders = "", "tests", *(f"tests/{x}" for x in ("extras", "polybeast", "tools"))
    paths = [*(str(ROOT / x) for x in folders), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    one = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return {**os.environ, "PYTHONPATH": path, **one}


@functools.cache
def forking() -> tuple[socket.socket, subprocess.Popen]:
    """The program that forks into runs. It ends with this process."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        program = subprocess.Popen(
            [sys.executable, "-m", "forked_runs", str(its.fileno())],
            env=environment(),
            pass_fds=[its.fileno()],
        )
    return ours, program


class Forked:
    """A run that forked from a program with PyTorch, with the methods of Popen.

    It leads a session. Its command line in /proc is that of forked_runs.py.

    Args:
      words: sys.executable, then "-m MODULE ..." or "FILE ...".
      stdout: for its output and its errors: a file's number, or subprocess.PIPE.
      variables: more than `environment()`.
    """

    def __init__(
        self,
        words: Sequence[str],
        stdout: int,
        folder: Path = ROOT,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.args, self.returncode = list(words), None
        self.stdout: Any = None
        self._output: list[str] = []
        request = {
            "words": self.args[1:],
            "folder": str(folder),
            "variables": {**environment(), **(variables or {})},
        }
        with contextlib.ExitStack() as stack:

            def pipe() -> tuple[Any, int]:
                read, write = os.pipe()
                stack.callback(os.close, write)
                return os.fdopen(read, errors="replace"), write

            self._report, report = pipe()
            if stdout == subprocess.PIPE:
                self.stdout, stdout = pipe()
            stdin = stack.enter_context(open(os.devnull)).fileno()
            passed = [stdin, stdout, stdout, report]
            socket.send_fds(forking()[0], [json.dumps(request).encode()], passed)
        self.pid = int(self._report.readline())
        self._reader = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        self._output.append(self.stdout.read())

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._report.readline())
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """The output until all that write to it have ended."""
        if self._reader.ident is None:
            self._reader.start()
        self._reader.join(timeout)
        if self._reader.is_alive():
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(timeout)
        return self._output[0], None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = subprocess.Popen | Forked


def start(savedir: Path, xpid: str, **flags: Any) -> Process:
    """Starts a run in its own process group; see `command` for the flags."""
    return start_words(command(savedir, xpid, **flags))


def start_words(words: list[str], fresh: bool = False) -> Process:
    """Starts a command in its own session, and so in its own process group.

    A module forks from a program that has PyTorch, see `Forked`; with `fresh` it is a
    new program, which imports all that it needs.
    """
    if words[:2] == [sys.executable, "-m"] and not fresh:
        process: Process = Forked(words, stdout=subprocess.PIPE)
    else:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            start_new_session=True,
        )
    STARTED.append(process)
    return process


def kill_started() -> None:
    """Kills what a test has started and not ended: it would slow down all others."""
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def finish(process: Process, timeout: float = 200) -> str:
    """Waits for a run and returns its output; kills its process group on a timeout."""
    try:
        output, _ = process.communicate(timeout=patience(timeout))
    except BaseException as error:  # also the time limit of the test
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        output, _ = process.communicate()
        raise AssertionError(f"no end after {timeout} s:\n{output}") from None
    return output


def wait_for_rows(
    process: Process, savedir: Path, xpid: str, rows: int, timeout: float = 60
) -> None:
    """Waits until a run has logged some updates; fails if it ends before."""
    logs = savedir / xpid / "logs.csv"
    begun = time.monotonic()
    while not logs.exists() or logs.read_text().count("\n") <= rows:
        assert process.poll() is None, finish(process)
        waited = time.monotonic() - begun
        assert waited < patience(timeout), f"no {rows} updates after {waited:.0f} s"
        time.sleep(0.02)


def run_words(
    words: list[str],
    timeout: float = 200,
    status: int = 0,
    folder: Path = ROOT,
    **variables: str,
) -> str:
    """Runs a module that has to end with this exit status; returns its output.

    It forks from a program that has PyTorch already, see `Forked`.
    """
    process = Forked(words, subprocess.PIPE, folder, variables)
    output = finish(process, timeout)
    ended = process.returncode
    assert ended == status, f"exit status {ended} within {timeout} s:\n{output}"
    return output


def run(
    savedir: Path, xpid: str, timeout: float = 200, status: int = 0, **flags: Any
) -> str:
    """Runs a command, see `command` for the flags and `run_words` for the rest."""
    return run_words(command(savedir, xpid, **flags), timeout, status)


def run_learners(
    ranks: int, savedir: Path, xpid: str, status: int = 0, **flags: Any
) -> str:
    """Runs so many learners of one run, with the variables that torchrun sets.

    All must end with the exit status.

    To start them by torchrun takes longer than most runs of the tests.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables |= {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
    variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    words = command(savedir, xpid, **flags)
    learners = [
        Forked(
            words, subprocess.PIPE, variables={**variables, "RANK": i, "LOCAL_RANK": i}
        )
        for i in map(str, range(ranks))
    ]
    try:
        output = "".join([finish(learner) for learner in learners])
    finally:
        for learner in learners:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(learner.pid, signal.SIGKILL)
    assert all(learner.returncode == status for learner in learners), output
    return output


def read_logs(savedir: Path, xpid: str) -> list[dict[str, str]]:
    with (savedir / xpid / "logs.csv").open() as file:
        return list(csv.DictReader(file))


def logs(savedir: Path, xpid: str) -> list[dict[str, str]]:
    """logs.csv without the columns that depend on the time."""
    rows = read_logs(savedir, xpid)
    return [{k: v for k, v in r.items() if k not in ("_time", "sps")} for r in rows]
