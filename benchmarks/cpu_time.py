"""CPU times of a run from Linux's /proc: whose time a step takes."""

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from torchbeast.base.hardware import num_cpus
from torchbeast.runs.files import read_meta
from torchbeast.tools.trial import WARM_UP, Trial

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


def measure(run: Trial, seconds: float) -> Measured:
    """Measures a run in the next seconds. Raises TrialError if it fails or hangs."""
    pid, start = run.process.pid, time.time()
    tree, own, busy = process_tree(pid), threads(pid), machine_busy()
    sps = run.measure(seconds)
    wall, busy = time.time() - start, machine_busy() - busy
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
    others = max(0.0, busy - sum(used.values())) / wall
    return Measured(
        sps,
        {name: max(0.0, x) / wall for name, x in cores.items()},
        max(0.1, min(num_cpus(), (os.cpu_count() or 1) - others)),
        min(1.0, sum(alone.values()) / wall),
    )


def measure_command(command: Sequence[str], seconds: float) -> Measured:
    """Measures a run that a command starts. Raises TrialError if it fails or hangs."""
    with tempfile.TemporaryDirectory(prefix="measured-") as name:
        folder = Path(name)
        words = [*command, "--savedir", name, "--xpid", "run"]
        with Trial(words, folder, os.environ) as run:
            run.wait_for_update()
            run.sleep(WARM_UP * seconds)
            measured = measure(run, seconds)
        times = read_meta(folder / "run").get("timings") or {}
    shares = times.get("actors") or times.get("streams") or {}
    return measured._replace(shares=shares, batch=times.get("inference_batch"))
