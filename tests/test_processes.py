"""What procs/processes.py starts; the tests of faults use the rest of it."""

import os

import pytest

from torchbeast.procs import processes
from torchbeast.sweeps import jobs


@pytest.mark.parametrize("quota", [2, 3, 64])
def test_a_quota_counts_for_a_sweep(monkeypatch, quota):
    monkeypatch.setattr(processes, "num_cpus", lambda: quota)
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda _: set(range(64)), raising=False
    )
    if quota < 64:
        assert jobs.split_cores(2, None) == [[], []]  # others use the same cores
    assert jobs.split_cores(1, 2) == [[0, 1]]
