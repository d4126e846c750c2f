"""Jobs of a sweep: processes that are ended, whatever happens to the sweep."""

import signal
import sys
import time

import pytest

from torchbeast.tools import jobs
from torchbeast.tools.jobs import Job

UNBLOCK = "from torchbeast.procs import processes; processes.exit_on_stop_signals()\n"


def test_a_job_has_ended_when_the_exception_is_raised(tmp_path):
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

    begun = time.monotonic()
    with pytest.raises(KeyError):
        jobs.run_here(planned(), [[], []], lambda job, status: None)
    assert "saved" in job.tail()
    assert time.monotonic() - begun < jobs.END_SECONDS / 4
