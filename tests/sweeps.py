"""Sweeps as a user starts them: real processes, each sweep in a session of its own."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import runs
import watched_runs

from torchbeast.runs.files import read_meta


def words(
    folder: Path, *own: str, variant: str = "monobeast", **flags: object
) -> list[str]:
    """The command line of a sweep of small runs, see `runs.SMALL`."""
    of_runs = {**runs.SMALL, "savedir": folder, **flags}
    shared = [f"--{name}={value}" for name, value in of_runs.items()]
    return [sys.executable, "-m", "torchbeast.sweep", *own, "--", variant, *shared]


@contextlib.contextmanager
def started(
    folder: Path, *own: str, variant: str = "monobeast", **flags: object
) -> Iterator[subprocess.Popen]:
    """Starts a sweep. At the end no process of it is left."""
    process = runs.start_words(words(folder, *own, variant=variant, **flags))
    try:
        yield process
    finally:
        for child in watched_runs.processes_of_session(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        process.communicate()


def finished(
    folder: Path,
    *own: str,
    status: int = 0,
    variant: str = "monobeast",
    **flags: object,
) -> str:
    """Waits for a sweep that has to end with `status`; returns its output."""
    with started(folder, *own, variant=variant, **flags) as process:
        output = runs.finish(process, timeout=300)
    assert process.returncode == status, output
    return output


def processes_of_run(session: int, xpid: str) -> list[int]:
    """The process that was started for a run of a sweep, or [] if it has ended."""
    return [
        process.pid
        for process in watched_runs.processes_of_session(session)
        if f"--xpid={xpid}" in process.command
    ]


def assert_finished(folder: Path, xpid: str, step: int = 600) -> None:
    meta = read_meta(folder / xpid)
    assert meta["successful"]
    assert meta["last_step"] == step
    assert int(runs.read_logs(folder, xpid)[-1]["step"]) == step
