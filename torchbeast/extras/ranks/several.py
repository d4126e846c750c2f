"""Several learners that equal one, by torch.distributed.

    torchrun --nproc_per_node 2 -m torchbeast.monobeast --num_actors 2 --batch_size 4

torchrun starts a process for each learner, a rank. Each has its own actors and its own
part of the batch. What a loss adds up over a batch is added up over all ranks, so all
make the update that one learner would make from the whole batch.
"""

import contextlib
import datetime
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from torchbeast.base import hardware, ranks
from torchbeast.base.errors import FlagError, UserError
from torchbeast.base.ranks import Alone
from torchbeast.runs.files import RunFolder
from torchbeast.runs.start import print_warnings_only

COPY_SECONDS = 3600.0  # for a replay of 700 GB at 200 MB/s


class RankError(UserError, RuntimeError):
    """Another learner has ended, or hangs."""


@contextlib.contextmanager
def joined(flags: Any) -> Iterator[Alone]:
    """Inside, this process is one of the ranks that torchrun has started.

    A wait for the other ranks ends after twice the longest time that one may wait for
    its environments, and not before rank 0 can have saved or loaded a replay.
    """
    kind, gpus = hardware.accelerators()
    own = dist.get_default_backend_for_device(kind)  # of CUDA's GPUs: nccl
    backend = f"cpu:gloo,{kind}:{own}" if gpus and own != "gloo" else "gloo"
    seconds = max(flags.actor_timeout, getattr(flags, "connect_timeout", 0))
    if getattr(flags, "save_replay", False):
        seconds = max(seconds, COPY_SECONDS)
    limit = datetime.timedelta(seconds=2 * seconds)
    store, number, count = next(dist.rendezvous("env://", timeout=limit))
    # After a restart by torchrun, the store still has the addresses of before.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt}", store)
    place = {"store": store, "rank": number, "world_size": count, "timeout": limit}
    dist.init_process_group(backend, **place)
    try:
        yield Several()
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    """Names the cause if another rank does not come."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            f"learner {dist.get_rank()} of {dist.get_world_size()} waited in vain for "
            "the others: one has ended or hangs, and its own log lines say why. "
            f"({error})"
        ) from error


class Several(Alone):
    """The methods of base/ranks.py, for the ranks of torch.distributed."""

    def rank(self) -> int:
        return dist.get_rank()

    def size(self) -> int:
        return dist.get_world_size()

    def local_gpu(self, count: int) -> int | None:
        """Raises FlagError if this machine has more ranks than GPUs."""
        if self.size() == 1 or not count:
            return None
        if (number := int(os.environ["LOCAL_WORLD_SIZE"])) > count:
            raise FlagError(
                f"{number} learners can't share {count} GPUs: start as many with "
                "torchrun, or give --disable_cuda"
            )
        return int(os.environ["LOCAL_RANK"])

    def total(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach()
        x = x.to(torch.int64) if x.dtype == torch.bool else x.clone()
        with _waiting():
            dist.all_reduce(x)
        return x

    def totals(self, row: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        device = next(iter(row.values())).device
        wide = torch.float32 if device.type == "mps" else torch.float64
        flat = self.total(torch.cat([x.to(wide).flatten() for x in row.values()]))
        parts = flat.split([x.numel() for x in row.values()])
        return {
            name: part.to(x.dtype).view(x.shape)
            for (name, x), part in zip(row.items(), parts, strict=True)
        }

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        weights = [weight for weight in parameters if weight.requires_grad]
        gradients = []
        for weight in weights:  # all ranks send the same numbers
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            gradients.append(weight.grad)
        flat = self.total(torch.cat([x.flatten() for x in gradients]))
        parts = flat.split([x.numel() for x in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))

    def joined(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        own = x.contiguous()
        own = own.view(torch.uint8) if x.dtype == torch.bool else own  # gloo lacks bool
        parts = [torch.empty_like(own) for _ in range(self.size())]
        with _waiting():
            dist.all_gather(parts, own)
        return torch.cat(parts, dim).view(x.dtype)

    def joined_list(self, items: list[Any]) -> list[Any]:
        lists: list[Any] = [None] * self.size()
        with _waiting():
            dist.all_gather_object(lists, items)
        return [item for part in lists for item in part]

    def highest(self, number: int) -> int:
        x = torch.tensor(number)
        with _waiting():
            dist.all_reduce(x, dist.ReduceOp.MAX)
        return int(x)

    def of_first(self, make: Callable[[], Any]) -> Any:
        made: list[Any] = [make() if self.rank() == 0 else None]
        with _waiting():
            dist.broadcast_object_list(made)
        return made[0]

    @contextlib.contextmanager
    def begun(self, begin: Callable[[], Any]) -> Iterator[Any]:
        """The other ranks write into folders that are removed at the end."""
        if self.rank() == 0:
            with contextlib.ExitStack() as stack:

                def first() -> Any:
                    start = stack.enter_context(begin())
                    folders.append(start.folder)
                    return start._replace(folder=None)  # its lock stays here

                folders: list[RunFolder] = []
                start = self.of_first(first)
                yield start._replace(folder=folders[0])
            return
        found = self.of_first(begin)
        print_warnings_only()
        with tempfile.TemporaryDirectory() as savedir:
            flags = found.flags.replace(savedir=savedir, disable_checkpoint=True)
            with contextlib.closing(RunFolder(savedir, flags.xpid)) as folder:
                yield found._replace(flags=flags, folder=folder)

    def copy_first(self, tensors: Iterable[torch.Tensor]) -> None:
        with _waiting():
            for x in tensors:
                dist.broadcast(x, 0)
                if x.device.type != "cpu":  # other streams copy it next
                    torch.accelerator.synchronize(x.device)


def share_out(saved: dict[str, Any], learners: int, typed: set[str]) -> None:
    """Changes the flags so that all ranks together act and learn as `learners` did.

    Raises:
      FlagError: they can't share something equally, and it was not typed.
    """
    for name in ("num_actors", "batch_size"):
        if saved.get(name) is None:
            continue
        own, left = divmod(saved[name] * learners, ranks.size())
        if left and name not in typed:
            raise FlagError(
                f"{ranks.size()} learners can't share the --{name} of {learners} "
                f"equally, which was {saved[name]} each: give --{name}"
            )
        saved[name] = max(1, own)
    for name in {"num_buffers", "max_learner_queue_size"} & saved.keys():
        saved[name] = None  # chosen again
