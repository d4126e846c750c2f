"""Runs as a user starts them: real processes, real files."""

import contextlib
import csv
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
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
    """The command line of a run; True gives a bare flag, None leaves one out."""
    words = [sys.executable, "-m", module]
    for name, value in {"savedir": savedir, "xpid": xpid, **flags}.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


def environment() -> dict[str, str]:
    """The environment variables of a run: --env can name classes of the tests.

    One thread, because threads that spin while they wait are slow on a busy machine.
    """
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def start(savedir: Path, xpid: str, **flags: Any) -> subprocess.Popen:
    """Starts a run in its own process group; see `command` for the flags."""
    return start_words(command(savedir, xpid, **flags))


def start_words(words: list[str]) -> subprocess.Popen:
    """Starts a command in its own session, and so in its own process group."""
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        start_new_session=True,
    )


def finish(process: subprocess.Popen, timeout: float = 100) -> str:
    """Waits for a run and returns its output; kills its process group on a timeout."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"no end after {timeout} s:\n{output}") from None
    return output


def wait_for_rows(
    process: subprocess.Popen, savedir: Path, xpid: str, rows: int, timeout: float = 60
) -> None:
    """Waits until a run has logged some updates; fails if it ends before."""
    logs = savedir / xpid / "logs.csv"
    deadline = time.monotonic() + timeout
    while not logs.exists() or logs.read_text().count("\n") <= rows:
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline, f"no {rows} updates after {timeout} s"
        time.sleep(0.02)


@functools.cache
def forking() -> subprocess.Popen:
    """The program that forks into runs. It ends when this process closes its input."""
    return subprocess.Popen(
        [sys.executable, "-m", "forked_runs"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )


@contextlib.contextmanager
def killed_after(seconds: float, pid: int) -> Iterator[None]:
    """Kills a process group after this time, or if the block raises."""
    timer = threading.Timer(seconds, os.killpg, (pid, signal.SIGKILL))
    timer.start()
    try:
        yield
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        raise
    finally:
        timer.cancel()


def run_words(
    words: list[str],
    timeout: float = 100,
    status: int = 0,
    folder: Path = ROOT,
    **variables: str,
) -> str:
    """Runs a module that has to end with this exit status; returns its output.

    It forks from a program that has PyTorch already, see `forked_runs`. Use `start` for
    a test that looks at the processes of the run, sends them signals or limits them.
    """
    _, _, module, *words = words
    program = forking()
    with tempfile.TemporaryDirectory() as temporary:
        pipe = Path(temporary, "output")
        os.mkfifo(pipe)
        request = {
            "module": module,
            "words": words,
            "folder": str(folder),
            "variables": {**environment(), **variables},
            "output": str(pipe),
        }
        try:
            program.stdin.write(json.dumps(request) + "\n")
            program.stdin.flush()
            with killed_after(timeout, int(program.stdout.readline())):
                output = pipe.read_text()  # ends when the run's last process has ended
                ended = int(program.stdout.readline())
        except BaseException:  # whose answer the next line is would be unknown
            program.kill()
            forking.cache_clear()
            raise
    assert ended == status, f"exit status {ended} within {timeout} s:\n{output}"
    return output


def run(
    savedir: Path, xpid: str, timeout: float = 100, status: int = 0, **flags: Any
) -> str:
    """Runs a command, see `command` for the flags and `run_words` for the rest."""
    return run_words(command(savedir, xpid, **flags), timeout, status)


def read_logs(savedir: Path, xpid: str) -> list[dict[str, str]]:
    with (savedir / xpid / "logs.csv").open() as file:
        return list(csv.DictReader(file))


def without_time(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """logs.csv without the columns that depend on the time."""
    return [{k: v for k, v in r.items() if k not in ("_time", "sps")} for r in rows]
