"""Several learners that equal one, by torch.distributed.

    torchrun --nproc_per_node 2 -m torchbeast.monobeast --num_actors 2 --batch_size 4

torchrun starts a process for each learner, a rank, with actors and a part of the batch.
What a loss adds up over a batch is added up over all ranks, so all make the update that
one learner would make from the whole batch.
"""

import contextlib
import datetime
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from torchbeast.base import devices, ranks
from torchbeast.base.errors import FlagError, UserError
from torchbeast.base.ranks import Alone
from torchbeast.runs.files import RunFolder
from torchbeast.runs.start import print_warnings_only

COPY_SECONDS = 3600.0  # for a replay of 700 GB at 200 MB/s


@contextlib.contextmanager
def joined(flags: Any) -> Iterator[Alone]:
    """Inside, this process is one of the ranks that torchrun has started.

    It waits for the others twice as long as one may wait for its environments, and
    until rank 0 can have saved or loaded a replay.
    """
    kind, gpus = devices.accelerators()
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
        text = (
            f"learner {dist.get_rank()} waited in vain: another one has ended or hangs"
        )
        raise UserError(f"{text}, and its log says why ({error})") from error


class Several(Alone):
    """The methods of base/ranks.py, for the ranks of torch.distributed."""

    def rank(self) -> int:
        return dist.get_rank()

    def size(self) -> int:
        return dist.get_world_size()

    def local_gpu(self, count: int) -> int | None:
        several = count and self.size() > 1
        return int(os.environ["LOCAL_RANK"]) if several else None

    def total(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach()
        x = x.to(torch.int64) if x.dtype == torch.bool else x.clone()
        with _waiting():
            dist.all_reduce(x)
        return x

    def totals(self, row: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(zip(row, self._sums([*row.values()], torch.float64), strict=True))

    def _sums(self, tensors: list[torch.Tensor], dtype: Any) -> list[torch.Tensor]:
        """The sums of tensors over all ranks, by one message of this dtype."""
        flat = self.total(torch.cat([x.to(dtype).flatten() for x in tensors]))
        parts = zip(flat.split([x.numel() for x in tensors]), tensors, strict=True)
        return [part.to(x.dtype).view(x.shape) for part, x in parts]

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        weights = [weight for weight in parameters if weight.requires_grad]
        for weight in weights:  # all ranks send the same numbers
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        gradients: Any = [weight.grad for weight in weights]
        sums = self._sums(gradients, torch.float32)
        for gradient, x in zip(gradients, sums, strict=True):
            gradient.copy_(x)

    def joined(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        # gloo lacks bool
        own = x.contiguous().view(torch.uint8 if x.dtype == torch.bool else x.dtype)
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
        with contextlib.ExitStack() as stack:
            folders: list[Any] = []

            def first() -> Any:
                start = stack.enter_context(begin())
                folders.append(start.folder)
                return start._replace(folder=None)  # its lock stays here

            start = self.of_first(first)
            if self.rank():
                print_warnings_only()
                savedir = stack.enter_context(tempfile.TemporaryDirectory())
                flags = start.flags.replace(savedir=savedir, disable_checkpoint=True)
                start = start._replace(flags=flags)
                own = RunFolder(savedir, flags.xpid)
                folders.append(stack.enter_context(contextlib.closing(own)))
            yield start._replace(folder=folders[0])

    def copy_first(self, tensors: Iterable[torch.Tensor]) -> None:
        with _waiting():
            for x in tensors:
                dist.broadcast(x, 0)
                if x.device.type != "cpu":  # other streams copy it next
                    torch.accelerator.synchronize(x.device)


def share_out(saved: dict[str, Any], learners: int, typed: set[str]) -> None:
    """Changes the flags so that all ranks together act and learn as `learners` did."""
    for name in ("num_actors", "batch_size"):
        if saved.get(name) is None:
            continue
        own, left = divmod(saved[name] * learners, ranks.size())
        if left and name not in typed:
            what = f"{learners} x --{name} {saved[name]}"
            raise FlagError(
                f"{ranks.size()} learners can't share {what}: give --{name}"
            )
        saved[name] = max(1, own)
    for name in {"num_buffers", "max_learner_queue_size"} & saved.keys():
        saved[name] = None  # chosen again
