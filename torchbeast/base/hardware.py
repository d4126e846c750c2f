"""CPUs, memory and GPUs that this process may use. Does not load torch by itself.

Limits come from the machine and from control groups (version 2), as containers, Slurm
and systemd set them. Each of them may be the smallest.
"""

import contextlib
import ctypes
import math
import os
import pathlib
import platform
import re
import sys
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path("/")  # of the system; tests have their own
# Read before PyTorch is imported, which may change them, see processes.unpin.
CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def num_cpus(root: pathlib.Path = ROOT) -> int:
    """The number of CPUs that this process may use."""
    count = len(CORES) or os.cpu_count() or 1
    for group in _groups(root):
        for quota, period in filter(None, [_numbers(group / "cpu.max")]):
            count = min(count, max(1, math.ceil(quota / period)))
    return count


def memory_limit(root: pathlib.Path = ROOT) -> int:
    """The most memory that this process may use, in bytes."""
    return min(limit for limit, _ in _memory(root))


def free_memory(root: pathlib.Path = ROOT) -> int:
    """The memory that this process can still get, in bytes; at least 0."""
    return max(0, min(free for _, free in _memory(root)))


def _memory(root: pathlib.Path) -> Iterator[tuple[int, int]]:
    """Each limit of memory, and what is free of it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = _fields(root / "proc/meminfo").get("MemAvailable:")
    yield physical, physical if available is None else available * 1024
    for group in _groups(root):
        for limit in _numbers(group / "memory.max") + _numbers(group / "memory.high"):
            used = sum(_numbers(group / "memory.current"))
            # Copies of files, which the system drops when it needs the memory.
            copies = _fields(group / "memory.stat").get("inactive_file", 0)
            yield limit, limit - used + copies


def _groups(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """The folders of this process's control group and of those that contain it."""
    with contextlib.suppress(OSError, IndexError):  # not Linux, or version 1
        text = (root / "proc/self/cgroup").read_text()
        top = root / "sys/fs/cgroup"
        path = top / text.split("0::/")[1].split("\n")[0]
        yield from (x for x in (path, *path.parents) if x.is_relative_to(top))


def _numbers(file: pathlib.Path) -> list[int]:
    with contextlib.suppress(OSError, ValueError):  # none, or "max": no limit
        return [int(word) for word in file.read_text().split()]
    return []


def _fields(file: pathlib.Path) -> dict[str, int]:
    """The numbers of a file with lines such as "name 123"."""
    with contextlib.suppress(OSError):
        return {k: int(x) for k, x in re.findall(r"(\S+)\s+(\d+)", file.read_text())}
    return {}


# --- Names ----------------------------------------------------------------------------


def hardware() -> dict[str, Any]:
    """Model and number of the CPUs that this process may use, memory, GPUs.

    GPUs are named only if the process has loaded torch.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = {"cpu": cpu_model(), "cpus": num_cpus(), "gpus": gpus()}
    return {**names, "memory_gib": round(memory / 2**30, 1)}


def cpu_model(file: pathlib.Path = pathlib.Path("/proc/cpuinfo")) -> str:
    """Such as "Intel(R) Xeon(R) Processor (family 6, model 85)".

    The numbers tell generations apart whose names are the same on virtual machines.
    """
    with contextlib.suppress(OSError, KeyError):
        found = dict(re.findall(r"^([a-z ]+?)\s*: (.+)$", file.read_text(), re.M))
        return "{model name} (family {cpu family}, model {model})".format_map(found)
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
