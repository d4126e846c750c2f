"""core/processes.py on its own; the tests of faults use the rest of it."""

import os

import pytest

from torchbeast.core import jobs, processes


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("max 100000", 64),
        ("400000 100000", 4),
        ("250000 100000", 3),
        ("50000 100000", 1),
        ("9900000 100000", 64),
        ("", 64),
        (None, 64),
    ],
)
def test_a_containers_quota_counts(tmp_path, monkeypatch, content, expected):
    file = tmp_path / "cpu.max"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(processes, "CPU_QUOTA", file)
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda _: set(range(64)), raising=False
    )
    assert processes.num_cpus() == expected
    if expected == 3:
        assert jobs.split_cores(3, None) == [[], [], []]
        assert jobs.split_cores(1, 2) == [[0, 1]]
