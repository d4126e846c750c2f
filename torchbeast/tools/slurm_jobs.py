"""The runs of a sweep as a Slurm array, through submitit."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import submitit
from submitit.core import utils

from torchbeast.base.errors import FlagError
from torchbeast.procs import children
from torchbeast.tools import jobs
from torchbeast.tools.jobs import Job

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0


class SlurmJob:
    """What submitit calls in a job: runs one run and returns its exit status."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._process: subprocess.Popen | None = None

    def __call__(self) -> int:
        guardian = children.Guardian(jobs.END_SECONDS, signal.SIGTERM)
        with contextlib.closing(guardian) as guard:
            self._process = self.job.start()
            guard.guard(self._process.pid)
            while (status := self._process.poll()) is None:
                time.sleep(0.1)
            guard.release(self._process.pid)
            return status

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Lets the run save and end. submitit calls this before it requeues the job."""
        if self._process:
            self._process.terminate()
            # Not wait(): this interrupts __call__, which may hold poll()'s lock.
            with contextlib.suppress(ChildProcessError):  # it has ended already
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        return submitit.helpers.DelayedSubmission(SlurmJob(self.job))


def submit(
    waiting: Sequence[Job],
    folder: pathlib.Path,
    cluster: str,
    parameters: dict[str, Any],
    ended: Callable[[Job, int], None],
) -> int:
    """Submits jobs as an array and waits for them. A stop signal ends only the waiting.

    Args:
      folder: for submitit's files.
      cluster: "slurm"; or "local", which starts all jobs on this machine at once.
      parameters: of submitit's executor.
      ended: called with each job and its exit status.

    Returns:
      The number of the stop signal, or 0.

    Raises:
      FlagError: the cluster refuses the jobs.
    """
    # A job that reaches its time limit is requeued again and again.
    limit = {f"{cluster}_max_num_timeout": 1_000_000}
    executor = submitit.AutoExecutor(folder=folder, cluster=cluster, **limit)
    executor.update_parameters(**parameters)
    here = cluster == "local"
    submitted: list[tuple[Job, Any]] = []
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(jobs.StopSignals())
        # SIGINT: submitit ignores SIGTERM.
        guard = children.Guardian(jobs.END_SECONDS, signal.SIGINT)
        stack.callback(guard.close)
        if here:
            stack.callback(_end_here, submitted)
        try:
            with executor.batch():
                handles = [executor.submit(SlurmJob(job)) for job in waiting]
        except (utils.UncompletedJobError, utils.FailedSubmissionError) as error:
            raise FlagError(
                f"the jobs can't be submitted: {error}. Check --sbatch, --minutes, "
                "--cores"
            ) from error
        submitted += zip(waiting, handles, strict=True)
        for job, handle in submitted:
            if here:
                guard.guard(int(handle.job_id))
            log.info("%s is job %s.", job.xpid, handle.job_id)
        while submitted and not signals.number:
            time.sleep(POLL_SECONDS)
            done = [pair for pair in submitted if pair[1].done()]
            if signals.number and here:  # a Ctrl-C has ended them
                break
            for job, handle in done:
                submitted.remove((job, handle))
                if here:
                    guard.release(int(handle.job_id))
                try:
                    ended(job, handle.result())
                except utils.UncompletedJobError as error:
                    log.error("%s: %s", job.xpid, error)
                    ended(job, 1)
        if signals.number and not here:
            name = signal.Signals(signals.number).name
            log.warning("%s: the jobs go on; scancel ends them.", name)
        return signals.number


def _end_here(submitted: Sequence[tuple[Job, Any]]) -> None:
    """Ends submitit's processes on this machine; waits until their runs have saved."""
    deadline = time.monotonic() + jobs.END_SECONDS
    for _, handle in submitted:
        handle.cancel()
    for job, handle in submitted:
        # submitit kills its process after a second. The run ends later.
        while time.monotonic() < deadline and not (handle.done() and job.is_free()):
            time.sleep(0.05)
