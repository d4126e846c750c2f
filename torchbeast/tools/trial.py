"""A short training run, measured by its own files. Benchmarks measure with it, too."""

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from torchbeast.base.errors import UserError
from torchbeast.procs.children import Guardian, how_it_ended
from torchbeast.runs.files import read_rows

WARM_UP = 0.4  # share of the seconds to measure, before that
START_SECONDS = 120.0  # until the first update, and for FEWEST_UPDATES
END_SECONDS = 30.0  # from SIGTERM to the end
FEWEST_UPDATES = 5  # in a measurement


class TrialError(UserError, RuntimeError):
    """A trial run failed or hung; the message has the end of its output."""


def read_ticks(folder: Path) -> np.ndarray:
    """Time in s and steps of every update of a run so far, [updates, 2] float64."""
    rows = read_rows(folder)
    ticks = [(float(row["_time"]), float(row["step"])) for row in rows]
    return np.array(ticks).reshape(-1, 2)


class Trial:
    """A run in its own session. It ends with the `with` block, or with this process.

    Its command has --savedir FOLDER --xpid run.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, environ: Mapping[str, str]
    ) -> None:
        self.command = command
        self.logs, self._output = folder / "run" / "logs.csv", folder / "output.txt"
        self._guardian = Guardian(END_SECONDS, signal.SIGTERM)
        with self._output.open("w") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )
        self._guardian.guard(self.process.pid)

    def __enter__(self) -> "Trial":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Asks the run to end and waits. Raises TrialError if it had to be killed."""
        self.process.terminate()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            if error is None:  # else the first error says more
                raise self.fail(f"did not end within {END_SECONDS:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._guardian.release(self.process.pid)
            self._guardian.close()

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def fail(self, what: str) -> TrialError:
        return TrialError(
            f"the trial run {what}. The command: {shlex.join(self.command)}\n"
            f"The end of its output:\n{self.output()[-4000:]}"
        )

    def sleep(self, seconds: float) -> None:
        """Lets the run go on. Raises TrialError if it ends meanwhile."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        raise self.fail(f"ended {how_it_ended(code)}")

    def wait_for_update(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        # While a replay fills, rows have no loss.
        while not any(row.get("total_loss") for row in read_rows(self.logs.parent)):
            self.sleep(0.2)
            if time.monotonic() > deadline:
                raise self.fail(f"made no update in {START_SECONDS:.0f} s")

    def measure(self, seconds: float) -> float:
        """Steps per second in the next seconds, or in more if updates are rare."""
        start = time.time()
        while True:
            self.sleep(min(seconds, 0.5))
            wall, ticks = time.time() - start, read_ticks(self.logs.parent)
            ticks = ticks[ticks[:, 0] >= start]
            if wall >= seconds and len(ticks) >= FEWEST_UPDATES:
                between, steps = ticks[-1] - ticks[0]
                return float(steps / between)
            if wall > START_SECONDS + seconds:
                raise self.fail(f"made only {len(ticks)} updates in {wall:.0f} s")


def try_command(command: Sequence[str], folder: Path, seconds: float) -> float:
    """Steps per second of a run. Raises TrialError if it fails or hangs."""
    command = [*command, "--savedir", str(folder), "--xpid", "run"]
    with Trial(command, folder, os.environ) as run:
        run.wait_for_update()
        run.sleep(WARM_UP * seconds)
        return run.measure(seconds)
