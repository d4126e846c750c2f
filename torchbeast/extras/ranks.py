"""Several learners that equal one, by torch.distributed.

    torchrun --nproc_per_node 2 -m torchbeast.monobeast --num_actors 2 --batch_size 4

torchrun starts a process for each learner, a rank. Each has its own actors and its own
part of the batch. What a loss adds up over a batch is added up over all ranks, so all
make the update that one learner would make from the whole batch. All ranks call these
functions in the same order; without torchrun they return what they get.
"""

import argparse
import contextlib
import datetime
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchbeast.base import hardware
from torchbeast.base.errors import FlagError, UserError

T = TypeVar("T")
COPY_SECONDS = 3600.0  # for a replay of 700 GB at 200 MB/s


class RankError(UserError, RuntimeError):
    """Another learner has ended, or hangs."""


@contextlib.contextmanager
def joined(flags: argparse.Namespace) -> Iterator[None]:
    """Inside, this process is one of the ranks that torchrun has started.

    A wait for the other ranks ends after twice the longest time that one may wait for
    its environments, and not before rank 0 can have saved or loaded a replay.
    """
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        yield
        return
    kind, gpus = hardware.accelerators()
    own = dist.get_default_backend_for_device(kind)  # of CUDA's GPUs: nccl
    backend = f"cpu:gloo,{kind}:{own}" if gpus and own != "gloo" else "gloo"
    seconds = max(flags.actor_timeout, getattr(flags, "connect_timeout", 0))
    if flags.save_replay:
        seconds = max(seconds, COPY_SECONDS)
    limit = datetime.timedelta(seconds=2 * seconds)
    store, number, count = next(dist.rendezvous("env://", timeout=limit))
    # After a restart by torchrun, the store still has the addresses of before.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"attempt {attempt}", store),
        rank=number,
        world_size=count,
        timeout=limit,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _is_one() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """The number of this rank. Rank 0 writes the run's files."""
    return dist.get_rank() if _is_one() else 0


def size() -> int:
    """The number of ranks."""
    return dist.get_world_size() if _is_one() else 1


def local_gpu(count: int) -> int | None:
    """The GPU of this rank, of `count` in this machine; None if there is one rank.

    Raises:
      FlagError: there are more ranks in this machine than GPUs.
    """
    if size() == 1 or not count:
        return None
    if (number := int(os.environ["LOCAL_WORLD_SIZE"])) > count:
        raise FlagError(
            f"{number} learners can't share {count} GPUs: start as many with torchrun, "
            "or give --disable_cuda"
        )
    return int(os.environ["LOCAL_RANK"])


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    """Names the cause if another rank does not come."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            f"learner {rank()} of {size()} waited in vain for the others: one has "
            f"ended or hangs, and its own log lines say why. ({error})"
        ) from error


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all ranks, without a gradient."""
    if size() == 1:
        return x.detach()
    x = x.detach().to(torch.int64) if x.dtype == torch.bool else x.detach().clone()
    with _waiting():
        dist.all_reduce(x)
    return x


def add_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replaces all gradients by their sums over all ranks."""
    if size() == 1:
        return
    weights = [weight for weight in parameters if weight.requires_grad]
    for weight in weights:  # all ranks send the same numbers
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    with _waiting():
        dist.all_reduce(flat)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view(gradient.shape))


def joined_batch(x: torch.Tensor) -> torch.Tensor:
    """Tensors [T, B, ...] of all ranks as one [T, ranks · B, ...], in their order."""
    if size() == 1:
        return x
    own = x.contiguous()
    own = own.view(torch.uint8) if x.dtype == torch.bool else own  # gloo has no bool
    parts = [torch.empty_like(own) for _ in range(size())]
    with _waiting():
        dist.all_gather(parts, own)
    return torch.cat(parts, dim=1).view(x.dtype)


def highest(number: int) -> int:
    """The highest of the ranks' numbers."""
    if size() == 1:
        return number
    x = torch.tensor(number)
    with _waiting():
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return int(x)


def of_first(make: Callable[[], T]) -> T:
    """What make() returns in rank 0."""
    if size() == 1:
        return make()
    made: list[Any] = [make() if rank() == 0 else None]
    with _waiting():
        dist.broadcast_object_list(made)
    return made[0]


def joined_list(items: list[T]) -> list[T]:
    """The lists of all ranks as one, in their order."""
    if size() == 1:
        return items
    lists: list[Any] = [None] * size()
    with _waiting():
        dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]


def copy_first(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrites the tensors with those of rank 0."""
    if size() == 1:
        return
    with _waiting():
        for x in tensors:
            dist.broadcast(x, 0)
            if x.device.type != "cpu":  # other streams copy it next
                torch.accelerator.synchronize(x.device)
