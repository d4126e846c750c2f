"""The runs of a sweep as a Slurm array, through submitit."""

import argparse
import contextlib
import logging
import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import submitit
from submitit.core import utils

from torchbeast.base.errors import FlagError
from torchbeast.procs import children
from torchbeast.tools.jobs import END_SECONDS, Job, noting_signals

log = logging.getLogger(__name__)


class SlurmJob:
    """What submitit calls in a job: runs one run and returns its exit status."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._process: subprocess.Popen | None = None

    def __call__(self) -> int:
        guardian = children.Guardian(END_SECONDS, signal.SIGTERM)
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
    options: argparse.Namespace,
    waiting: Sequence[Job],
    folder: pathlib.Path,
    ended: Callable[[Job, int], None],
) -> int:
    """Submits jobs as an array and waits for them; see jobs.run_here.

    A stop signal ends only the waiting. With --submit local all jobs start on this
    machine at once, and end with this process. `folder` is for submitit's files.

    Raises:
      FlagError: the cluster refuses the jobs.
    """
    if not waiting:
        return 0
    cluster = options.submit
    if cluster == "slurm" and not shutil.which("sbatch"):
        raise FlagError("--submit slurm needs a machine of a Slurm cluster: no sbatch")
    # A job that reaches its time limit is requeued again and again.
    limit = {f"{cluster}_max_num_timeout": 1_000_000}
    executor = submitit.AutoExecutor(folder=folder, cluster=cluster, **limit)
    executor.update_parameters(
        name=options.name,
        timeout_min=options.minutes,
        cpus_per_task=options.cores or 2,
        slurm_array_parallelism=options.jobs or len(waiting),
        slurm_additional_parameters=dict(options.sbatch),
    )
    submitted: dict[Job, Any] = {}
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(noting_signals())
        # SIGINT: submitit ignores SIGTERM.
        guard = children.Guardian(END_SECONDS, signal.SIGINT)
        stack.callback(guard.close)
        if cluster == "local":
            stack.callback(_end_here, submitted)
        try:
            with executor.batch():
                handles = [executor.submit(SlurmJob(job)) for job in waiting]
        except (utils.UncompletedJobError, utils.FailedSubmissionError) as error:
            raise FlagError(f"the jobs can't be submitted: {error}") from error
        submitted |= zip(waiting, handles, strict=True)
        for job, handle in submitted.items():
            if cluster == "local":
                guard.guard(int(handle.job_id))
            log.info("%s is job %s.", job.xpid, handle.job_id)
        while submitted and not signals:
            time.sleep(1.0)
            for job, handle in list(submitted.items()):
                if signals or not handle.done():
                    continue
                del submitted[job]
                if cluster == "local":
                    guard.release(int(handle.job_id))
                try:
                    ended(job, handle.result())
                except utils.UncompletedJobError as error:
                    log.error("%s: %s", job.xpid, error)
                    ended(job, 1)
        if signals and cluster == "slurm":
            name = signal.Signals(signals[0]).name
            log.warning("%s: the jobs go on; scancel ends them.", name)
        return signals[0] if signals else 0


def _end_here(submitted: dict[Job, Any]) -> None:
    """Ends submitit's processes on this machine. Then their guardians end the runs."""
    for handle in submitted.values():
        handle.cancel()
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline and not all(x.done() for x in submitted.values()):
        time.sleep(0.05)
