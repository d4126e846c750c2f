"""Jobs: runs of a sweep as processes, each on cores of its own.

Importing this module does not load torch.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import pathlib
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from torchbeast.base import hardware
from torchbeast.base.errors import FlagError
from torchbeast.procs import children, processes
from torchbeast.runs.files import RunBusyError, RunFolder, writing

log = logging.getLogger(__name__)

END_SECONDS = 60.0  # for runs to save and end if the sweep is killed
TAIL = 15  # lines of a failed run's output that are shown

# Exit statuses of runs that a signal has ended. They can be resumed.
STOPPED = {sign for n in processes.STOP_SIGNALS for sign in (128 + n, -n)}


class OtherRunError(FlagError):
    """The folder already has a run with other flags."""


class Job(NamedTuple):
    """One run.

    Attributes:
      xpid: its name.
      folder: of the run. Its output is appended to console.log there.
      command: what starts it; a script that calls exit_on_stop_signals.
    """

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

    def is_free(self) -> bool:
        """Whether no process has the run's folder."""
        with contextlib.suppress(RunBusyError):
            RunFolder(str(self.folder.parent), self.xpid).close()
            return True
        return False

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
    if num_jobs * each > num_cpus:
        log.warning(
            "--jobs %d with --cores %d need %d cores, but this process may use %d: the "
            "runs share them, and each is slower.",
            *(num_jobs, each, num_jobs * each, num_cpus),
        )
        return [[]] * num_jobs
    # macOS has no affinity. With a container's quota others use the same cores.
    affinity = getattr(os, "sched_getaffinity", lambda _: ())
    cores = sorted(affinity(0))
    if not cores or (len(cores) > num_cpus and cores_per_job is None):
        return [[]] * num_jobs
    return [cores[i * each : (i + 1) * each] for i in range(num_jobs)]


class StopSignals(contextlib.ExitStack):
    """Notes stop signals: `number` is the first, or 0; it wakes `wake_pipe`."""

    number = 0

    def _note(self, number: int, frame: Any) -> None:
        self.number = self.number or number

    def __enter__(self) -> StopSignals:
        self.wake_pipe = processes.WakePipe()
        self.callback(self.wake_pipe.close)
        self.wake_pipe.wake_on_signals()
        self.enter_context(processes.handling(self._note))
        return self


@contextlib.contextmanager
def ending(running: dict[Job, tuple[subprocess.Popen, Any]]) -> Iterator[None]:
    """At the end of the block, lets the runs save that an exception has left."""
    try:
        yield
    finally:
        deadline = time.monotonic() + END_SECONDS
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def run_here(
    jobs: Iterator[Job],
    cores: Sequence[Sequence[int]],
    ended: Callable[[Job, int], None],
) -> int:
    """Runs jobs, as many at a time as `cores` has entries.

    A stop signal is passed on to the runs, which save and end. No more are started.

    Args:
      jobs: the next one is taken when there is room for it.
      cores: per place, see split_cores.
      ended: called with each job and its exit status.

    Returns:
      The number of the stop signal, or 0.
    """
    places = collections.deque(cores)
    running: dict[Job, tuple[subprocess.Popen, Sequence[int]]] = {}
    guardian = contextlib.closing(children.Guardian(END_SECONDS, signal.SIGTERM))
    with guardian as guard, StopSignals() as signals, ending(running):
        while True:
            while places and not signals.number and (job := next(jobs, None)):
                # A killed sweep's runs are still saving, for END_SECONDS at most.
                for _ in range(int(END_SECONDS / 0.1)):
                    if job.is_free() or signals.number:
                        break
                    time.sleep(0.1)
                if signals.number:
                    break
                own_cores = places.popleft()
                process = job.start(own_cores)
                guard.guard(process.pid)
                running[job] = (process, own_cores)
                where = f" on cores {own_cores}" if own_cores else ""
                log.info("%s starts%s.", job.xpid, where)
            if not running:
                return signals.number
            if select.select([signals.wake_pipe.reader], [], [], 0.1)[0]:
                signals.wake_pipe.drain()
                if not signals.number:  # another signal of this process
                    continue
                name = signal.Signals(signals.number).name
                log.warning("%s: %d runs are ending.", name, len(running))
                for process, _ in running.values():
                    process.send_signal(signals.number)
            for job, (process, own_cores) in list(running.items()):
                status = process.poll()
                if status is not None:
                    guard.release(process.pid)
                    del running[job]
                    places.append(own_cores)
                    ended(job, status)
