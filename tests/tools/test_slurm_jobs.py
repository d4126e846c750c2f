"""The runs of a sweep as jobs of submitit's local executor: real processes.

Skipped without submitit: pip install submitit.
"""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import runs
import sweeps
import watched_runs

pytest.importorskip("submitit")

from torchbeast.runs.files import read_meta
from torchbeast.tools import sweep
from torchbeast.tools.jobs import Job
from torchbeast.tools.slurm_jobs import SlurmJob  # it imports submitit

pytestmark = pytest.mark.timeout(400)


def job_processes(process):
    """The processes in which submitit calls SlurmJob."""
    return [
        child.pid
        for child in watched_runs.processes_of_session(process.pid)
        if "submitit.core._submit" in child.command
    ]


def test_an_array(tmp_path):
    own = ["--submit", "local", "--grid", "env=CartPole-v1,nowhere:Nothing"]
    output = sweeps.finished(tmp_path, *own, status=1)
    sweeps.assert_finished(tmp_path, "sweep-env=CartPole-v1-1")
    assert "sweep-env=CartPole-v1-1 finished." in output
    assert "sweep-env=nowhere_Nothing-1 ended with exit status 1" in output
    assert "No module named 'nowhere'" in output
    output = sweeps.finished(tmp_path, *own[:2], "--grid", "env=CartPole-v1")
    assert " is job " not in output


def test_a_preempted_job_goes_on(tmp_path):
    """Slurm sends SIGUSR2 to all processes of a job. The run saves, and resumes."""
    flags = {"total_steps": 9_000}
    with sweeps.started(tmp_path, "--submit", "local", **flags) as process:
        runs.wait_for_rows(process, tmp_path, "sweep-1", 10, timeout=200)
        (job,) = job_processes(process)
        (run,) = sweeps.processes_of_run(process.pid, "sweep-1")
        for pid in (run, job):
            os.kill(pid, signal.SIGUSR2)
        output = runs.finish(process, 300)
    assert process.returncode == 0, output
    meta = read_meta(tmp_path / "sweep-1")
    assert len(meta["resumed"]) == 1
    assert 0 < meta["first_step"] < 9_000
    sweeps.assert_finished(tmp_path, "sweep-1", 9_000)


def test_the_run_has_ended_before_the_job_is_requeued(tmp_path):
    command = runs.command(tmp_path, "run", **{**runs.SMALL, "total_steps": 10**9})
    job = SlurmJob(Job("run", tmp_path / "run", tuple(command)))
    with ThreadPoolExecutor() as threads:
        status = threads.submit(job)
        try:
            logs = tmp_path / "run" / "logs.csv"
            watched_runs.wait_until(logs.exists, "updates", 60)
        finally:
            job.checkpoint()
        end = read_meta(tmp_path / "run")
        assert status.result(timeout=60) == 143
    assert end["exit_status"] == 143


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_ends_leaves_nothing(tmp_path, number):
    """Its runs save and end."""
    flags = {"total_steps": 10**9}
    with sweeps.started(tmp_path, "--submit", "local", **flags) as process:
        runs.wait_for_rows(process, tmp_path, "sweep-1", 10, timeout=200)
        process.send_signal(number)
        output = runs.finish(process)
        assert process.returncode == (130 if number == signal.SIGINT else -9), output
        watched_runs.wait_until(
            lambda: not watched_runs.processes_of_session(process.pid),
            "no process left",
            60,
        )
    assert (tmp_path / "sweep-1" / "model.tar").exists()
    assert read_meta(tmp_path / "sweep-1")["exit_status"] == 143


def test_a_cluster_that_refuses(tmp_path, monkeypatch, caplog):
    """sbatch of a partition that does not exist."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "srun"):
        path = programs / name
        path.write_text(
            "#!/bin/sh\necho invalid partition specified: typo >&2\nexit 1\n"
        )
        path.chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    own = ["--submit", "slurm", "--sbatch", "partition=typo"]
    assert sweep.main(sweeps.words(tmp_path, *own)[3:]) == 1
    (record,) = [x for x in caplog.records if x.levelname == "ERROR"]
    assert "invalid partition specified: typo" in record.getMessage()
    assert record.exc_info is None
