"""Limits of memory and CPUs, with made-up control groups, and the cores of processes.

The folders are those of /proc and /sys/fs/cgroup, as the kernel's documentation
describes them.
"""

import os
import subprocess
import sys

import pytest
import runs

from torchbeast.base import hardware

MB = 10**6
SLURM = "slurm/uid_7/job_9/step_0"


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A function that makes a system: its root folder."""
    monkeypatch.setattr(hardware, "CORES", set(range(64)))

    def make(path, files):
        write("proc/self/cgroup", f"0::{path}\n")
        write("proc/meminfo", "MemTotal: 900 kB\nMemAvailable: 15000 kB\n")
        for name, text in files.items():
            write(f"sys/fs/cgroup/{name}", f"{text}\n")
        return tmp_path

    def write(name, text):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return make


@pytest.mark.parametrize("name", ["memory.max", "memory.high"])
@pytest.mark.parametrize("limited", [SLURM, "slurm/uid_7", "."])
def test_memory(system, limited, name):
    """Each group up to the root counts. MemoryHigh slows down, which is no better."""
    files = {f"{SLURM}/memory.max": "max", f"{limited}/{name}": 3 * MB}
    root = system(f"/{SLURM}", files)
    assert hardware.memory_limit(root) == hardware.free_memory(root) == 3 * MB


def test_without_limits(system):
    root = system("/a", {"a/memory.max": "max", "a/cpu.max": "max 100000"})
    assert hardware.free_memory(root) == 15_000 * 1024
    assert hardware.memory_limit(root) == hardware.memory_limit(root / "nothing")
    assert hardware.num_cpus(root) == hardware.num_cpus(root / "nothing") == 64


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("max 100000", 64),
        ("250000 100000", 3),
        ("50000 100000", 1),
        ("9900000 100000", 64),
        ("", 64),
    ],
)
@pytest.mark.parametrize("limited", [SLURM, "."])
def test_a_quota_of_cpus(system, content, expected, limited):
    root = system(f"/{SLURM}", {f"{limited}/cpu.max": content})
    assert hardware.num_cpus(root) == expected


@pytest.mark.parametrize("name", ["OMP_PROC_BIND", "GOMP_CPU_AFFINITY"])
def test_children_of_a_process_that_openmp_has_pinned_get_all_cores(name):
    """Importing PyTorch pins the process to one core; children would inherit it."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        runs.skip("needs two cores")
    code = (
        "from torchbeast.procs import processes; processes.exit_on_stop_signals()\n"
        "import torch, subprocess, sys; torch.ones(9)\n"
        "from torchbeast.base import hardware\n"
        "print(hardware.num_cpus(), flush=True)\n"
        "code = 'import torch, os; print(len(os.sched_getaffinity(0)))'\n"
        "subprocess.run([sys.executable, '-c', code], check=True)"
    )
    value = "true" if name == "OMP_PROC_BIND" else f"0-{len(cores) - 1}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**runs.environment(), name: value},
        capture_output=True,
        text=True,
        check=True,
        timeout=runs.patience(60),
    )
    assert done.stdout.split() == [str(len(cores))] * 2
