"""The hardware of this machine, and how much of it this process may use.

Limits come from the machine, from control groups (containers, Slurm, systemd; versions
1 and 2, up to their root) and from setrlimit. Each of them may be the smallest.

Importing this module does not load torch.
"""

import contextlib
import ctypes
import math
import os
import pathlib
import platform
import re
import resource
import sys
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path("/")  # of the system; tests have their own
# Memory of other processes does not count against these: the limit, and what
# /proc/self/statm calls the use of it.
RESOURCES = ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5))


def hardware() -> dict[str, Any]:
    """Model and number of the CPUs that this process may use, memory, GPUs.

    GPUs are named only if the process has loaded torch.
    """
    return {
        "cpu": cpu_model(),
        "cpus": num_cpus(),
        "memory_gib": round(_physical_memory() / 2**30, 1),
        "gpus": gpus(),
    }


def describe_hardware(found: dict[str, Any] | None) -> str:
    """In a few words: "2 × AMD EPYC, NVIDIA H100"; "unknown" if there is nothing."""
    if not found:
        return "unknown"
    return ", ".join([f"{found['cpus']} × {found['cpu']}", *found["gpus"]])


# --- Limits ---------------------------------------------------------------------------


def num_cpus(root: pathlib.Path = ROOT) -> int:
    """The number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    for group in _groups("cpu", root):
        for files in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
            with contextlib.suppress(OSError, ValueError):  # "max": no quota
                words = " ".join((group / file).read_text() for file in files)
                quota, period = map(int, words.split())
                if quota > 0:  # version 1 has -1 without a quota
                    count = min(count, max(1, math.ceil(quota / period)))
    return count


def memory_limit(root: pathlib.Path = ROOT) -> int:
    """The most memory that this process may use, in bytes."""
    return min(limit for limit, _ in _memory(root))


def free_memory(root: pathlib.Path = ROOT) -> int:
    """The memory that this process can still get, in bytes; at least 0."""
    return max(0, min(free for _, free in _memory(root)))


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory(root: pathlib.Path) -> Iterator[tuple[int, int]]:
    """Each limit of memory, and what is free of it."""
    proc, page = root / "proc", os.sysconf("SC_PAGE_SIZE")
    available = _fields(proc / "meminfo").get("MemAvailable:")
    physical = _physical_memory()
    yield physical, physical if available is None else available * 1024
    for group in _groups("memory", root):
        names = ("memory.max", "memory.high", "memory.limit_in_bytes")
        limits = [x for name in names if (x := _number(group / name)) is not None]
        if limits:
            used = _number(group / "memory.current")
            if used is None:
                used = _number(group / "memory.usage_in_bytes") or 0
            # Copies of files, which the system drops when it needs the memory.
            stat = _fields(group / "memory.stat")
            copies = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            yield min(limits), min(limits) - used + copies
    for kind, place in RESOURCES:
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            used = 0
            with contextlib.suppress(OSError):
                used = int((proc / "self/statm").read_text().split()[place]) * page
            yield limit, limit - used


def _groups(controller: str, root: pathlib.Path) -> Iterator[pathlib.Path]:
    """The folders of this process's control group and of those that contain it.

    Args:
      controller: "memory" or "cpu". In version 2 one folder is for all controllers.
    """
    with contextlib.suppress(OSError, ValueError):  # not Linux
        own: dict[str, str] = {}  # the group by controller; "" is version 2
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, names, group = line.split(":", 2)
            own |= dict.fromkeys(names.split(","), group)
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            mount, _, system = line.partition(" - ")
            top, place = mount.split(" ")[3:5]
            kind, _, options = system.split(" ")[:3]
            is_old = kind == "cgroup" and controller in options.split(",")
            name = controller if is_old else ""
            if name in own and (is_old or kind == "cgroup2"):
                # A container may show its own group as the top.
                path = pathlib.PurePosixPath(own[name])
                below = path.relative_to(top if path.is_relative_to(top) else "/")
                for folder in (below, *below.parents):
                    yield root / place.lstrip("/") / folder


def _number(file: pathlib.Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        return int(file.read_text())
    return None


def _fields(file: pathlib.Path) -> dict[str, int]:
    """The numbers of a file with lines such as "name 123"."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
        return {words[0]: int(words[1]) for words in lines if len(words) > 1}
    except (OSError, ValueError):
        return {}


# --- Names ----------------------------------------------------------------------------


def cpu_model(file: pathlib.Path = pathlib.Path("/proc/cpuinfo")) -> str:
    """Such as "Intel(R) Xeon(R) Processor (family 6, model 85)".

    The numbers tell generations apart whose names are the same on virtual machines.
    """
    with contextlib.suppress(OSError):
        found = dict(
            re.findall(r"^([a-z ]+?)\s*: (.+)$", file.read_text(), re.MULTILINE)
        )
        if name := found.get("model name"):
            numbers = f" (family {found.get('cpu family')}, model {found.get('model')})"
            return name.strip() + (numbers if "cpu family" in found else "")
    return platform.processor() or platform.machine()


def accelerators() -> tuple[str, int]:
    """The kind of this machine's GPUs, such as cuda, xpu or mps, and their number."""
    import torch

    if kind := torch.accelerator.current_accelerator(check_available=True):
        return kind.type, torch.accelerator.device_count()
    return "cuda", 0


def gpus() -> list[str]:
    """Their names, if torch is loaded."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.accelerator.is_available():
        return []
    kind, count = accelerators()
    name = getattr(torch.get_device_module(kind), "get_device_name", lambda i: kind)
    return [name(i) for i in range(count)]


def keep_freed_memory(device: Any) -> None:
    """Makes glibc keep large freed blocks for the next update or message.

    By default glibc returns them to the kernel, which then has to clear and map each
    page again. That takes a tenth of the CPU time of a learner on the CPU.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL("libc.so.6")
            # M_MMAP_THRESHOLD: map only larger blocks. Older versions allow 32 MiB.
            _ = libc.mallopt(-3, 1 << 30) or libc.mallopt(-3, 1 << 25)
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: return nothing
            if device.type == "cpu":
                libc.mallopt(-8, 1)  # M_ARENA_MAX: one arena for all threads
