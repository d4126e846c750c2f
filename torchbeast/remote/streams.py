"""PolyBeast's streams of environments: the C++ pool, batcher and queue."""

import collections
import contextlib
import math
import threading
from collections.abc import Sequence

import torch

import libtorchbeast
from torchbeast.base.errors import FlagError
from torchbeast.base.hardware import memory_limit
from torchbeast.base.nested import Nested, map_nested
from torchbeast.core import rollout
from torchbeast.local.env_spec import EnvSpec
from torchbeast.remote.remote_envs import RemoteEnvs
from torchbeast.runs.flagset import Flags
from torchbeast.runs.prof import Timings

# Names in libtorchbeast's stats().
POOL_COUNTS = (
    *("env_seconds", "env_wait_seconds", "inference_wait_seconds"),
    *("queue_wait_seconds", "num_reconnects", "num_dropped_steps"),
)
BATCHER_COUNTS = ("num_batches", "num_items", "num_entries")


def as_stored(row: dict[str, Nested], spec: dict[str, Nested]) -> dict[str, Nested]:
    """Casts a row to the dtypes of MonoBeast's buffers, see rollout.STORED_AS.

    Environments in other languages may leave out fields of `spec`: these become zero.
    """

    def cast(x: torch.Tensor, field: rollout.Spec) -> torch.Tensor:
        return x if x.dtype == field.dtype else x.to(field.dtype)

    row = rollout.show_final_fields(row)
    leading = row["done"].shape
    for name, field in spec.items():
        if name in row:
            row[name] = map_nested(cast, row[name], field)
        else:
            row[name] = row["done"].new_zeros(
                (*leading, *field.shape), dtype=field.dtype
            )
    return row


class SyncBarrier:
    """Makes acting and learning alternate with --sync. Thread-safe.

    No unroll starts before the learner has used all unrolls of the previous round.
    """

    def __init__(self, unroll_length: int) -> None:
        self.unroll_length = unroll_length
        self.learned = 0  # rounds of unrolls
        self.closed = False
        self.changed = threading.Condition()

    def wait_for_turn(self, row: int) -> None:
        """Waits until the stream may act on row number `row` since its start."""
        # As in MonoBeast, the agent acts on an unroll's last row before learning.
        unroll = max(0, row - 1) // self.unroll_length
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.learned >= unroll)

    def end_round(self) -> None:
        with self.changed:
            self.learned += 1
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class Streams:
    """Streams of environments, with the batcher and the queue that they share.

    Args:
      addresses: of the servers, one per stream.
      envs: the environments of these streams.
      spec: of the first stream; all others are compared with it.
      initial_state: of the model, for one environment.
      first_stream, stream_stride: number of the first stream, and the distance to the
        next.

    Raises:
      FlagError: the rollouts of all streams need more than half of the memory that
        this process may use, or one of `addresses` is not an address.
    """

    def __init__(
        self,
        flags: Flags,
        addresses: Sequence[str],
        envs: RemoteEnvs,
        spec: EnvSpec,
        *,
        initial_state: tuple[torch.Tensor, ...],
        first_stream: int = 0,
        stream_stride: int = 1,
        acting_device: torch.device,
        learning_device: torch.device,
    ) -> None:
        E = spec.num_envs
        # With --sync, a batch has the rollouts of one stream.
        batch_size = E if flags.sync else max(flags.batch_size, E)
        self.items_per_batch = batch_size // E
        longest_queue = max(flags.max_learner_queue_size, batch_size)  # in rollouts
        self.queue = libtorchbeast.BatchingQueue(
            minimum_batch_size=batch_size,
            maximum_batch_size=batch_size,
            maximum_queue_size=math.ceil(longest_queue / E),
            allocator=pinned if learning_device.type == "cuda" else None,
        )
        self.batcher = libtorchbeast.DynamicBatcher(
            maximum_batch_size=(len(addresses) or flags.num_actors) * E,
            allocator=pinned if acting_device.type == "cuda" else None,
        )
        try:
            self.pool = libtorchbeast.ActorPool(
                flags.unroll_length,
                self.queue,
                self.batcher,
                addresses,
                initial_state,
                named_rows=True,
                max_rollout_bytes=memory_limit() // 2 // stream_stride,
                step_timeout_s=flags.actor_timeout,
                maximum_downtime_s=flags.connect_timeout,
                max_env_failures=flags.max_env_failures,
                hello=spec.hello,
                is_provisional=envs.listener is not None,
                expected=envs.expected,
                seed=envs.seed,
                first_stream=first_stream,
                stream_stride=stream_stride,
                listener=envs.listener,
                security=envs.security,
            )
        except ValueError as error:
            too_large = "max_rollout_bytes" in str(error)
            hint = "; see --num_actors, --unroll_length" if too_large else ""
            raise FlagError(f"{error}{hint}") from error
        self.inference_timings: list[Timings] = []

    def counts(self) -> dict[str, float]:
        """Seconds and counts since the start, for prof.bottleneck."""
        sums: dict[str, float] = collections.defaultdict(float)
        for timings in self.inference_timings:
            for name, seconds in timings.seconds.copy().items():  # threads add some
                sums[f"inference_{name}"] += seconds
        pool, batcher = self.pool.stats(), self.batcher.stats()
        for stats, names in ((pool, POOL_COUNTS), (batcher, BATCHER_COUNTS)):
            for name in names:
                sums[name] += stats.get(name, 0)
        return sums

    def has_batch(self) -> bool:
        """Whether the learner has a batch to learn from."""
        return self.queue.size() >= self.items_per_batch

    def close(self) -> None:
        self.pool.close()
        for closable in (self.batcher, self.queue):
            with contextlib.suppress(RuntimeError):  # a pool that failed has closed it
                closable.close()


def pinned(num_bytes: int) -> torch.Tensor:
    """Pinned memory: a GPU copies from it while the CPU continues.

    It is used again once the arrays of its batch are gone. So a thread keeps them until
    it has read a result from the GPU that depends on them: the answer, or the loss.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
