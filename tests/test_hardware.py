"""Limits of memory and CPUs: made-up control groups, and the limits of real processes.

The folders are those of /proc and /sys/fs/cgroup, as the kernel's documentation
describes them.
"""

import os
import re
import resource
import subprocess
import sys

import pytest
import runs

from torchbeast.base import hardware

GB = 10**9
MOUNTS = {
    2: "31 23 0:28 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n",
    1: (
        "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
        "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup "
        "rw,cpu,cpuacct\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    ),
}
GROUPS = {
    2: "0::{}\n",
    1: "9:name=systemd:{0}\n4:memory:{0}\n1:cpu,cpuacct:{0}\n0::{0}\n",
}


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A function that makes a system: its root folder."""
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda _: set(range(64)), raising=False
    )

    def make(version, path, files, mounts=None):
        write("proc/self/cgroup", GROUPS[version].format(path))
        write("proc/self/mountinfo", mounts or MOUNTS[version])
        write("proc/meminfo", "MemTotal: 900 kB\nMemAvailable: 15000000 kB\n")
        for name, text in files.items():
            write(f"sys/fs/cgroup/{name}", f"{text}\n")
        return tmp_path

    def write(name, text):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return make


SLURM = "slurm/uid_7/job_9/step_0"


@pytest.mark.parametrize("limited", [SLURM, "slurm/uid_7", "."])
def test_memory_of_version_2(system, limited):
    """Each group up to the root counts; what it uses is its own."""
    files = {
        f"{SLURM}/memory.max": "max",
        f"{SLURM}/memory.high": "max",
        f"{limited}/memory.max": 3 * GB // 2,
        f"{limited}/memory.current": GB,
        f"{limited}/memory.stat": f"anon 5\ninactive_file {GB // 4}\nfile 7",
    }
    root = system(2, f"/{SLURM}", files)
    assert hardware.memory_limit(root) == 3 * GB // 2
    assert hardware.free_memory(root) == 3 * GB // 4


def test_memory_of_systemd(system):
    """MemoryHigh slows a process down, which is no better than an end."""
    group = "user.slice/run-7.scope"
    root = system(2, f"/{group}", {f"{group}/memory.high": 2 * GB})
    assert hardware.memory_limit(root) == hardware.free_memory(root) == 2 * GB


@pytest.mark.parametrize("limited", [SLURM, "slurm/uid_7", "."])
def test_memory_of_version_1(system, limited):
    files = {
        f"memory/{SLURM}/memory.limit_in_bytes": 2**63 - 4096,
        f"memory/{limited}/memory.limit_in_bytes": 2 * GB,
        f"memory/{limited}/memory.usage_in_bytes": GB,
        f"memory/{limited}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GB}",
    }
    root = system(1, f"/{SLURM}", files)
    assert hardware.memory_limit(root) == 2 * GB
    assert hardware.free_memory(root) == 2 * GB


@pytest.mark.parametrize("top", ["/docker/7", "/"])
def test_a_container_that_sees_the_path_of_its_host(system, top):
    """Version 1 without a namespace: the container's own group is the top."""
    mounts = f"35 31 0:32 {top} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    files = {"memory/memory.limit_in_bytes": GB, "memory/sub/memory.limit_in_bytes": 7}
    root = system(1, "/docker/7/sub", files, mounts)
    assert hardware.memory_limit(root) == (7 if top != "/" else GB)


def test_more_used_than_allowed(system):
    root = system(2, "/", {"memory.max": GB, "memory.current": 2 * GB})
    assert hardware.free_memory(root) == 0


def test_without_limits(system):
    root = system(2, "/a", {"a/memory.max": "max", "a/cpu.max": "max 100000"})
    assert hardware.free_memory(root) == 15_000_000 * 1024
    assert hardware.memory_limit(root) == hardware.memory_limit(root / "nothing")
    assert hardware.num_cpus(root) == hardware.num_cpus(root / "nothing") == 64


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("max 100000", 64),
        ("400000 100000", 4),
        ("250000 100000", 3),
        ("50000 100000", 1),
        ("9900000 100000", 64),
        ("", 64),
    ],
)
@pytest.mark.parametrize("limited", [SLURM, "slurm", "."])
def test_a_quota_of_cpus(system, content, expected, limited):
    root = system(2, f"/{SLURM}", {f"{limited}/cpu.max": content})
    assert hardware.num_cpus(root) == expected


@pytest.mark.parametrize(("quota", "expected"), [(-1, 64), (250_000, 3), (1_000, 1)])
def test_a_quota_of_cpus_in_version_1(system, quota, expected):
    folder = "cpu,cpuacct/slurm/uid_7"
    files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": 10**5}
    assert hardware.num_cpus(system(1, f"/{SLURM}", files)) == expected


# --- Real processes ---


@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_limits_of_a_process(name):
    code = (
        "import mmap; from torchbeast.base.hardware import *\n"
        "before = free_memory()\n"
        "kept = mmap.mmap(-1, 10**8, mmap.MAP_PRIVATE)\n"
        "print(memory_limit(), before, free_memory())"
    )
    limit = 2 * GB // 5
    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(getattr(resource, name), (limit, limit)),
        env=runs.environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=runs.patience(60),
    )
    found, before, after = map(int, done.stdout.split())
    assert found == limit
    assert 0 < before < limit
    assert before - after == pytest.approx(10**8, rel=0.05)


def test_a_run_beyond_its_address_space_says_so(tmp_path):
    """As with `ulimit -v`: the replay is refused before it is made."""
    flags = {**runs.SMALL, "replay_ratio": 1, "replay_size": 80_000_000}
    limit = f'ulimit -v 6000000; exec {sys.executable} "$@"'
    words = runs.command(tmp_path, "a", **flags)
    process = runs.start_words(["sh", "-c", limit, *words])
    output = runs.finish(process)
    assert process.returncode == 1
    assert "--replay_size 80,000,000 needs" in output
    found = re.search(r"but only ([\d.]+) GB of memory are free", output)
    assert float(found[1]) < 6.15
    assert "Traceback" not in output


def test_rollouts_beyond_the_data_segment_are_refused(tmp_path):
    """PolyBeast's streams may use half of what `ulimit -d` allows."""
    pytest.importorskip("libtorchbeast", exc_type=ImportError)
    flags = {**runs.SMALL, "module": "torchbeast.polybeast", "num_actors": 8}
    flags |= {"batch_size": 3, "unroll_length": 4_000_000, "total_steps": 10**9}
    limit = f'ulimit -d 6000000; exec {sys.executable} "$@"'
    process = runs.start_words(
        ["sh", "-c", limit, *runs.command(tmp_path, "a", **flags)]
    )
    output = runs.finish(process)
    assert process.returncode == 1
    assert f"more than half of the memory ({6_000_000 * 1024 // 2:,} bytes" in output
    assert "Traceback" not in output


def test_the_name_of_the_cpu(tmp_path):
    """Virtual machines give several generations one name: the numbers differ."""
    file = tmp_path / "cpuinfo"
    lines = "vendor_id\t: X\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\n"
    file.write_text(f"processor\t: 0\n{lines}\nprocessor\t: 1\n{lines}")
    assert hardware.cpu_model(file) == "AMD EPYC (family 25, model 1)"
    file.write_text("processor\t: 0\nmodel name\t: ARMv8\n")
    assert hardware.cpu_model(file) == "ARMv8"
    assert hardware.cpu_model(tmp_path / "none")
