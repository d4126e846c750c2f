"""Jobs: runs of a sweep as processes, each on cores of its own. Loads no torch."""

import collections
import contextlib
import logging
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from torchbeast.base import hardware
from torchbeast.procs import children, processes
from torchbeast.runs.files import writing

log = logging.getLogger(__name__)

END_SECONDS = 60.0  # for runs to save and end if the sweep ends
TAIL = 15  # lines of a failed run's output that are shown

# Exit statuses of runs that a signal has ended. They can be resumed.
STOPPED = {sign for n in processes.STOP_SIGNALS for sign in (128 + n, -n)}


class Job(NamedTuple):
    """One run: its name, its folder, and a script that calls exit_on_stop_signals."""

    xpid: str
    folder: pathlib.Path
    command: tuple[str, ...]

    @property
    def console(self) -> pathlib.Path:
        return self.folder / "console.log"

    def start(self, cores: Collection[int] = ()) -> subprocess.Popen:
        """Starts the run as leader of a process group, limited to `cores` if given."""

        def prepare() -> None:
            os.setpgid(0, 0)  # a Ctrl-C reaches the sweep only, which passes it on
            if cores:
                os.sched_setaffinity(0, cores)
            # Slurm sends it to all processes of a job; only submitit reacts.
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)

        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            console = self.console.open("ab")
        # A signal that hits a run while Python starts would count as its failure.
        with children.starting_children(), console:
            return subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                preexec_fn=prepare,
            )

    def tail(self) -> str:
        """The last lines of the run's output."""
        text = ""
        with contextlib.suppress(FileNotFoundError):
            text = self.console.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-TAIL:])


def split_cores(num_jobs: int, cores_per_job: int | None) -> list[list[int]]:
    """The cores of each job; empty lists if the jobs share all cores.

    They share if there are fewer. cores_per_job None: divides those of this process.
    """
    num_cpus = hardware.num_cpus()
    each = cores_per_job or max(1, num_cpus // num_jobs)
    # macOS has no affinity. With a container's quota others use the same cores.
    affinity = getattr(os, "sched_getaffinity", lambda _: ())
    cores = sorted(affinity(0))
    if num_jobs * each > num_cpus:
        log.warning("The runs share %d cores, so each is slower.", num_cpus)
        return [[]] * num_jobs
    if not cores or (len(cores) > num_cpus and cores_per_job is None):
        return [[]] * num_jobs
    return [cores[i * each : (i + 1) * each] for i in range(num_jobs)]


@contextlib.contextmanager
def noting_signals() -> Iterator[list[int]]:
    """Appends the numbers of stop signals to a list."""
    numbers: list[int] = []
    with processes.handling(lambda number, frame: numbers.append(number)):
        yield numbers


@contextlib.contextmanager
def ending(running: dict[Job, tuple[subprocess.Popen, Any]]) -> Iterator[None]:
    """At the end of the block, lets the runs save that an exception has left."""
    try:
        yield
    finally:
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)


def run_here(
    jobs: Iterator[Job],
    cores: Sequence[Sequence[int]],
    ended: Callable[[Job, int], None],
) -> int:
    """Runs jobs, as many at a time as `cores` has entries.

    The next job is taken when there is room for it. `ended` gets each with its exit
    status. A stop signal is passed on to the runs, which save and end, and no more are
    started. Returns its number, or 0.
    """
    places = collections.deque(cores)
    running: dict[Job, tuple[subprocess.Popen, Sequence[int]]] = {}
    guardian = contextlib.closing(children.Guardian(END_SECONDS, signal.SIGTERM))
    with guardian as guard, noting_signals() as signals, ending(running):
        passed_on = 0
        while True:
            while places and not signals and (job := next(jobs, None)):
                own_cores = places.popleft()
                process = job.start(own_cores)
                guard.guard(process.pid)
                running[job] = (process, own_cores)
                where = f" on cores {own_cores}" if own_cores else ""
                log.info("%s starts%s.", job.xpid, where)
            if not running:
                return signals[0] if signals else 0
            time.sleep(0.1)
            for number in signals[passed_on:]:
                name = signal.Signals(number).name
                log.warning("%s: %d runs are ending.", name, len(running))
                for process, _ in running.values():
                    process.send_signal(number)
                passed_on += 1
            for job, (process, own_cores) in list(running.items()):
                status = process.poll()
                if status is not None:
                    guard.release(process.pid)
                    del running[job]
                    places.append(own_cores)
                    ended(job, status)
