"""The hardware of this machine, for meta.json and test.json."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import platform
import re
import sys
from typing import Any

from torchbeast.core.processes import num_cpus


def hardware() -> dict[str, Any]:
    """Model and number of the CPUs that this process may use, memory, GPUs.

    GPUs are named only if the process has loaded torch.
    """
    memory = None
    with contextlib.suppress(ValueError, OSError, AttributeError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cpus": num_cpus(),
        "memory_gib": memory and round(memory / 2**30, 1),
        "gpus": _gpus(),
    }


def describe_hardware(found: dict[str, Any] | None) -> str:
    """In a few words: "2 × AMD EPYC, NVIDIA H100"; "unknown" if there is nothing."""
    if not found:
        return "unknown"
    return ", ".join([f"{found['cpus']} × {found['cpu']}", *found["gpus"]])


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        text = pathlib.Path("/proc/cpuinfo").read_text()
        if model := re.search(r"^model name\s*: (.+)$", text, re.MULTILINE):
            return model[1].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    return [torch.cuda.get_device_name(i) for i in range(count)]


def keep_freed_memory(device: Any) -> None:
    """Makes glibc keep large freed blocks for the next update, if that is on the CPU.

    By default glibc returns them to the kernel, which then has to clear and map each
    page again. That takes a tenth of the learner's CPU time.
    """
    if sys.platform == "linux" and device.type == "cpu":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL("libc.so.6")
            # M_MMAP_THRESHOLD: map only larger blocks. Older versions allow 32 MiB.
            _ = libc.mallopt(-3, 1 << 30) or libc.mallopt(-3, 1 << 25)
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: return nothing
            libc.mallopt(-8, 1)  # M_ARENA_MAX: one arena for all threads
