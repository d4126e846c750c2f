"""Jobs of a sweep: processes that are ended, whatever happens to the sweep."""

import os
import signal
import sys
import threading
import time

import pytest

from torchbeast.runs.files import RunFolder
from torchbeast.tools import jobs
from torchbeast.tools.jobs import Job

UNBLOCK = "from torchbeast.procs import processes; processes.exit_on_stop_signals()\n"
SLEEP = f"{UNBLOCK}import time; print('up', flush=True); time.sleep(100)"


def test_an_exception_ends_the_jobs_and_does_not_wait_long(tmp_path):
    first = Job("a", tmp_path / "a", (sys.executable, "-c", SLEEP))

    def planned():
        yield first
        while "up" not in first.tail():
            time.sleep(0.01)
        raise OSError("the disk is full")

    begun = time.monotonic()
    with pytest.raises(OSError, match="the disk is full"):
        jobs.run_here(planned(), [[], []], lambda job, status: None)
    assert time.monotonic() - begun < jobs.END_SECONDS / 4


def test_a_job_has_ended_when_the_exception_is_raised(tmp_path, monkeypatch):
    """Also if it ignores SIGTERM for a while, as a run does that saves."""
    code = (
        f"{UNBLOCK}import signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(0.5)\n"
        "    print('saved', flush=True)\n"
        "    sys.exit(1)\n"
        f"signal.signal({int(signal.SIGTERM)}, save)\n"
        "print('up', flush=True)\n"
        "time.sleep(100)\n"
    )
    job = Job("a", tmp_path / "a", (sys.executable, "-c", code))

    def planned():
        yield job
        while "up" not in job.tail():
            time.sleep(0.01)
        raise KeyError("x")

    with pytest.raises(KeyError):
        jobs.run_here(planned(), [[], []], lambda job, status: None)
    assert "saved" in job.tail()


def test_more_jobs_than_cores(caplog):
    """They share all cores."""
    num_cpus = len(os.sched_getaffinity(0))
    assert jobs.split_cores(num_cpus + 1, None) == [[]] * (num_cpus + 1)
    assert jobs.split_cores(1, num_cpus + 1) == [[]]
    assert caplog.text.count(f"but this process may use {num_cpus}") == 2


def test_a_job_waits_for_its_folder(tmp_path):
    """A run of a killed sweep may still save when the sweep starts again."""
    code = "import fcntl, os, sys; folder = os.open(sys.argv[1], os.O_RDONLY); "
    code += "fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    folder = tmp_path / "a"
    job = Job("a", folder, (sys.executable, "-c", code, str(folder)))
    busy, statuses = RunFolder(str(tmp_path), "a"), []
    timer = threading.Timer(0.5, busy.close)
    timer.start()
    jobs.run_here(iter([job]), [[]], lambda job, status: statuses.append(status))
    timer.join()
    assert statuses == [0], job.tail()
