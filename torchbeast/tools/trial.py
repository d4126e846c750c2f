"""A short training run, measured from outside: its speed, the CPU time of its parts.

Needs Linux's /proc. benchmarks/ and autotune.py measure with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from torchbeast.base.errors import UserError
from torchbeast.base.hardware import num_cpus
from torchbeast.procs.children import Guardian, how_it_ended
from torchbeast.runs.files import read_meta, read_rows

WARM_UP = 0.4  # share of the seconds to measure, before that
START_SECONDS = 120.0  # until the first update, and for FEWEST_UPDATES
END_SECONDS = 30.0  # from SIGTERM to the end
FEWEST_UPDATES = 5  # in a measurement


class TrialError(UserError, RuntimeError):
    """A trial run failed or hung; the message has the end of its output."""


# --- Figures from /proc ---------------------------------------------------------------

has_ended = contextlib.suppress(FileNotFoundError, ProcessLookupError)


def read_stat(file: Path) -> tuple[int, float]:
    """Parent and CPU seconds of a process, or of a thread, from its file `stat`."""
    words = file.read_text().rpartition(")")[2].split()
    ticks = int(words[11]) + int(words[12])  # in user and in kernel mode
    return int(words[1]), ticks / os.sysconf("SC_CLK_TCK")


def process_tree(root: int) -> dict[int, float]:
    """CPU seconds of a process and all its descendants, by process id."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*"):
        with has_ended:
            stats[int(path.name)] = read_stat(path / "stat")
    tree, size = {root}, 0
    while len(tree) > size:
        size = len(tree)
        tree |= {pid for pid, (parent, _) in stats.items() if parent in tree}
    return {pid: stats[pid][1] for pid in tree if pid in stats}


def machine_busy() -> float:
    """CPU seconds for which cores were busy, or were taken away by the host."""
    words = Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, steal = map(int, words)
    busy = user + nice + system + irq + softirq + steal
    return busy / os.sysconf("SC_CLK_TCK")


def threads(pid: int) -> dict[tuple[str, int], float]:
    """CPU seconds of a process's threads, by name and thread id."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("[0-9]*"):
        with has_ended:
            name = (path / "comm").read_text().strip()
            found[name, int(path.name)] = read_stat(path / "stat")[1]
    return found


def read_ticks(folder: Path) -> np.ndarray:
    """Time in s and steps of every update of a run so far, [updates, 2] float64."""
    rows = read_rows(folder)
    ticks = [(float(row["_time"]), float(row["step"])) for row in rows]
    return np.array(ticks).reshape(-1, 2)


# --- A run ----------------------------------------------------------------------------


class Measured(NamedTuple):
    """What a run did in some seconds, and how it spent its time in all.

    Attributes:
      sps: environment steps per second that it learned from.
      cores: CPU seconds per second, by part: "environments" are all processes but the
        learner's, whose threads are in "learner", "inference" and "rest".
      free_cores: those that other programs have left.
      learner_busy: share of the time in which the learner's own threads computed, one
        per batch; "learner" also has those that helped them.
      shares: of its actors' or streams' time, as meta.json has them.
      batch: the mean size of PolyBeast's inference batches, or None.
    """

    sps: float
    cores: dict[str, float]
    free_cores: float
    learner_busy: float
    shares: Mapping[str, float] = MappingProxyType({})
    batch: float | None = None


class Trial:
    """A run in its own session, for a `with` block. It ends with the block.

    If this process is killed, the run ends, too.

    Args:
      command: has --savedir FOLDER --xpid run.
      folder: for the run's files and its output.
      environ: of the run.
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

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Asks the run to end and waits. Raises TrialError if it had to be killed."""
        self.process.terminate()
        late = False
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            late = error is None  # else the first error says more
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._guardian.release(self.process.pid)
            self._guardian.close()
        if late:
            raise self.fail(f"did not end within {END_SECONDS:.0f} s")

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def fail(self, what: str) -> TrialError:
        return TrialError(
            f"the trial run {what}. The command: {' '.join(self.command)}\n"
            f"The end of its output:\n{self.output()[-4000:]}"
        )

    def wait_for_update(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        # While a replay fills, rows have no loss.
        while not any(row.get("total_loss") for row in read_rows(self.logs.parent)):
            self.sleep(0.2)
            if time.monotonic() > deadline:
                raise self.fail(f"made no update in {START_SECONDS:.0f} s")

    def sleep(self, seconds: float) -> None:
        """Lets the run go on. Raises TrialError if it ends meanwhile."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        raise self.fail(f"ended {how_it_ended(code)}")

    def measure(self, seconds: float) -> Measured:
        """Measures the next seconds, or more if updates are rare. Raises TrialError."""
        pid, start = self.process.pid, time.time()
        tree, own, busy = process_tree(pid), threads(pid), machine_busy()
        while True:
            self.sleep(min(seconds, 0.5))
            wall = time.time() - start
            ticks = read_ticks(self.logs.parent)
            ticks = ticks[ticks[:, 0] >= start]
            if wall >= seconds and len(ticks) >= FEWEST_UPDATES:
                break
            if wall > START_SECONDS + seconds:
                raise self.fail(f"made only {len(ticks)} updates in {wall:.0f} s")
        busy = machine_busy() - busy
        used = {k: x - tree.get(k, 0.0) for k, x in process_tree(pid).items()}
        by_thread = [(k[0], x - own.get(k, 0.0)) for k, x in threads(pid).items()]
        learner = [x for x in by_thread if "learner-" in x[0]]
        cores = {
            "environments": sum(used.values()) - used[pid],
            "learner": sum(x for _, x in learner),
            "inference": sum(x for name, x in by_thread if "inference-" in name),
        }
        cores["rest"] = used[pid] - cores["learner"] - cores["inference"]
        # A thread's helpers inherit its name, and compute at most as long as it does.
        alone = {name: max(x for n, x in learner if n == name) for name, _ in learner}
        between, steps = ticks[-1] - ticks[0]
        others = max(0.0, busy - sum(used.values())) / wall
        return Measured(
            float(steps / between),
            {name: max(0.0, x) / wall for name, x in cores.items()},
            max(0.1, min(num_cpus(), (os.cpu_count() or 1) - others)),
            min(1.0, sum(alone.values()) / wall),
        )


def try_command(command: Sequence[str], folder: Path, seconds: float) -> Measured:
    """Measures a run that a command starts. Raises TrialError if it fails or hangs."""
    command = [*command, "--savedir", str(folder), "--xpid", "run"]
    with Trial(command, folder, os.environ) as run:
        run.wait_for_update()
        run.sleep(WARM_UP * seconds)
        measured = run.measure(seconds)
    times = read_meta(folder / "run").get("timings") or {}
    shares = times.get("actors") or times.get("streams") or {}
    return measured._replace(shares=shares, batch=times.get("inference_batch"))
