"""CPUs and memory that this process may use, also in containers and Slurm jobs.

Does not load torch by itself.
"""

import contextlib
import ctypes
import math
import os
import pathlib
import re
import sys
from typing import Any

ROOT = pathlib.Path("/")  # of the system; tests have their own
# Read before PyTorch is imported, which may change them.
CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def num_cpus(root: pathlib.Path = ROOT) -> int:
    """The number of CPUs that this process may use."""
    quotas = [max(1, math.ceil(x[0] / x[1])) for x in _limits(root, "cpu.max")]
    return min([len(CORES) or os.cpu_count() or 1, *quotas])


def memory_limit(root: pathlib.Path = ROOT) -> int:
    """The most memory that this process may use, in bytes."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = _limits(root, "memory.max") + _limits(root, "memory.high")
    return min([physical, *(x for (x,) in limits)])


def free_memory(root: pathlib.Path = ROOT) -> int:
    """The memory that this process can still get, in bytes, if its groups are idle."""
    found = re.findall(r"MemAvailable: +(\d+) kB", _text(root / "proc/meminfo"))
    return min([memory_limit(root), *(int(x) * 1024 for x in found)])


def _limits(root: pathlib.Path, name: str) -> list[list[int]]:
    """The numbers in this file of each control group that contains this process."""
    top = root / "sys/fs/cgroup"
    found = re.search("0::/(.*)", _text(root / "proc/self/cgroup"))  # version 2
    path = top / found[1] if found else top
    texts = [_text(x / name) for x in (path, *path.parents) if x.is_relative_to(top)]
    return [list(map(int, x.split())) for x in texts if x.strip() and "max" not in x]


def _text(file: pathlib.Path) -> str:
    with contextlib.suppress(OSError):  # not Linux, or no limit
        return file.read_text()
    return ""


def keep_freed_memory(device: Any) -> None:
    """Makes glibc keep freed blocks: to map and clear them anew is 10 % of the time."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL("libc.so.6")
            # M_MMAP_THRESHOLD: map only larger blocks. Older versions allow 32 MiB.
            _ = libc.mallopt(-3, 1 << 30) or libc.mallopt(-3, 1 << 25)
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: return nothing
            if device.type == "cpu":
                libc.mallopt(-8, 1)  # M_ARENA_MAX: one arena for all threads
