"""Tensors in shared memory, for rollouts, weights and counters."""

import math
import os
import pathlib
import shutil
from mmap import PAGESIZE

import torch

from torchbeast.base.errors import UserError
from torchbeast.base.hardware import free_memory
from torchbeast.base.nested import Nested, flatten, map_nested
from torchbeast.core.rollout import Spec

SHARED_MEMORY = "/dev/shm"  # on Linux


class SharedMemoryError(UserError, RuntimeError):
    """The machine's shared memory can't hold the buffers."""


def create_buffers(spec: Nested, leading: tuple[int, ...]) -> Nested:
    """Makes zeroed tensors [*leading, *shape] in shared memory, nested as the spec is.

    Their files are unlinked at once, so nothing stays behind however the processes end.
    All pages are allocated now: if memory ran out later, SIGBUS would kill a process.
    Raises SharedMemoryError if the system does not give them.
    """
    # Each tensor is one file, made of whole pages.
    sizes = [math.prod((*leading, *s.shape, s.dtype.itemsize)) for s in flatten(spec)]
    needed = sum(math.ceil(size / PAGESIZE) * PAGESIZE for size in sizes)
    places = [(free_memory(), "this process")]
    if os.path.isdir(SHARED_MEMORY):
        places.append((shutil.disk_usage(SHARED_MEMORY).free, SHARED_MEMORY))
    free, place = min(places)
    if needed > free:
        raise SharedMemoryError(
            f"Buffers need {needed / 2**20:,.1f} MiB, but {place} has "
            f"{free / 2**20:,.1f} MiB free (in Docker see --shm-size): lower "
            "--num_buffers, --unroll_length, --num_actors, --envs_per_actor, --model"
        )

    def create(s: Spec) -> torch.Tensor:
        return torch.empty(*leading, *s.shape, dtype=s.dtype).share_memory_().zero_()

    try:
        return map_nested(create, spec)
    except RuntimeError as error:  # other limits: open files, their sizes
        for left in pathlib.Path(SHARED_MEMORY).glob(f"torch_{os.getpid()}_*"):
            if not left.stat().st_size:  # PyTorch leaves one that it can't resize
                left.unlink()
        raise SharedMemoryError(f"no shared memory: {error}") from error


def step_counters(count: int) -> torch.Tensor:
    """[count] int64 zeros in shared memory, for StepWatch."""
    return create_buffers(Spec((), torch.int64), (count,))
