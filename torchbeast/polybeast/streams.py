"""PolyBeast's streams of environments: the C++ pool, batcher and queue."""

import contextlib
import logging
import math
import threading
from collections import Counter
from collections.abc import Sequence

import torch

import libtorchbeast
from torchbeast.base import ranks
from torchbeast.base.errors import FlagError
from torchbeast.base.hardware import memory_limit
from torchbeast.base.nested import Nested, map_nested
from torchbeast.core import rollout
from torchbeast.core.timings import Timings, format_shares
from torchbeast.flags import Flags
from torchbeast.local.env_spec import EnvSpec
from torchbeast.polybeast.remote_envs import RemoteEnvs
from torchbeast.polybeast.security import ServerError
from torchbeast.runs.run import Run

log = logging.getLogger(__name__)

ALWAYS_BUSY = 0.9  # share of the time


def as_stored(row: dict[str, Nested], spec: dict[str, Nested]) -> dict[str, Nested]:
    """Casts a row to MonoBeast's dtypes. Fields that environments lack become zero."""
    row = rollout.show_final_fields(row)
    done = row["done"]
    for name, field in spec.items():
        if name in row:
            row[name] = map_nested(lambda x, y: x.to(y.dtype), row[name], field)
        else:
            row[name] = done.new_zeros((*done.shape, *field.shape), dtype=field.dtype)
    return row


class StreamGroup:
    """Streams of environments that share a pool, a batcher and a queue.

    Args:
      initial_state: of the model, for one environment.
      devices: for inference, and for learning.
      numbers: of the first stream, and the distance to the next.
    """

    def __init__(
        self,
        flags: Flags,
        addresses: Sequence[str],
        envs: RemoteEnvs,
        spec: EnvSpec,
        initial_state: tuple[torch.Tensor, ...],
        devices: Sequence[torch.device],
        numbers: tuple[int, int] = (0, 1),
    ) -> None:
        E = spec.num_envs
        # With --sync, a permit per round that was learned from.
        self.turns = threading.Semaphore(0)
        # With --sync, a batch has the rollouts of one stream.
        batch_size = E if flags.sync else max(flags.batch_size, E)
        self.items_per_batch = batch_size // E
        longest_queue = max(flags.max_learner_queue_size, batch_size)  # in rollouts
        acting, learning = (pinned if x.type == "cuda" else None for x in devices)
        self.queue = libtorchbeast.BatchingQueue(
            *(1, batch_size, batch_size),
            maximum_queue_size=math.ceil(longest_queue / E),
            allocator=learning,
        )
        most = (len(addresses) or flags.num_actors) * E
        self.batcher = libtorchbeast.DynamicBatcher(1, 1, most, allocator=acting)
        try:
            self.pool = libtorchbeast.ActorPool(
                *(flags.unroll_length, self.queue, self.batcher),
                *(addresses, initial_state),
                named_rows=True,
                max_rollout_bytes=memory_limit() // 2 // numbers[1],
                step_timeout_s=flags.actor_timeout,
                maximum_downtime_s=flags.connect_timeout,
                max_env_failures=flags.max_env_failures,
                hello=spec.hello,
                expected=envs.expected,
                seed=envs.seed,
                first_stream=numbers[0],
                stream_stride=numbers[1],
                listener=envs.listener,
                security=envs.security,
            )
        except ValueError as error:
            raise FlagError(str(error)) from error

    def close(self) -> None:
        self.pool.close()
        for closable in (self.batcher, self.queue):
            with contextlib.suppress(RuntimeError):  # a pool that failed has closed it
                closable.close()
        self.turns.release()


class Streams:
    """All streams of a run, in groups; `device` is for inference.

    With --sync each stream is a group, so that inference and learning have its rows in
    a known order. Otherwise there is one group.
    """

    def __init__(self, run: Run, envs: RemoteEnvs, device: torch.device) -> None:
        flags, learner, spec = run.flags, run.learner, run.learner.env_spec
        self.run, self.envs = run, envs
        self.env_fields = rollout.env_fields(
            spec.observation_space, learner.model.distribution
        )
        state = tuple(x.cpu() for x in learner.model.initial_state(1))
        places = device, learner.device
        parts = [[x] for x in envs.addresses] if flags.sync else [envs.addresses]
        # No two streams of all learners play the same games.
        first, stride = ranks.rank() * len(parts), ranks.size() * len(parts)
        self.groups = [
            StreamGroup(flags, part, envs, spec, state, places, (first + i, stride))
            for i, part in enumerate(parts)
        ]
        self.inference_timings: list[Timings] = []

    def queued(self) -> int:
        """Rollouts that wait for the learner."""
        items = sum(group.queue.size() for group in self.groups)
        return items * self.run.learner.env_spec.num_envs

    def counts(self) -> Counter[str]:
        """The numbers of all pools and batchers, added up."""
        counts: Counter[str] = Counter()
        for group in self.groups:
            stats = group.pool.stats() | group.batcher.stats()
            counts.update({k: x for k, x in stats.items() if not isinstance(x, str)})
        return counts

    def columns(self) -> dict[str, int]:
        """The columns of logs.csv about streams."""
        counts = self.counts()
        if listener := self.envs.listener:
            counts["num_refused"] += listener.stats()["num_refused"]
        names = ("reconnects", "dropped_steps", "refused", "env_failures")
        columns = {name: counts[f"num_{name}"] for name in names}
        return columns | {"streams": counts["num_connected"], "queued": self.queued()}

    def report(self) -> None:
        """Logs events. Raises ServerError if --sync has lost a stream."""
        self.envs.report(self.groups)
        flags, counts = self.run.flags, self.counts()
        is_lost = counts["num_reconnects"] or counts["num_dropped_steps"]
        # After a stop signal, servers may be gone.
        if flags.sync and is_lost and not self.run.stop_requested():
            why = [group.pool.stats()["last_error"] for group in self.groups]
            raise ServerError(
                "a stream was lost, and a run with --sync can't be the same without "
                f"its steps: {'; '.join(filter(None, why))}"
            )
        acted = sum(group.pool.count() for group in self.groups)
        streams = f"{counts['num_connected']}/{flags.num_actors}"
        self.run.show(self.queued(), acted, streams)

    def end(self) -> None:
        """Logs the last events, and where the time went, also into meta.json."""
        self.envs.report(self.groups)
        self.envs.close()
        counts, learner = self.counts(), self.run.timings.shares()
        for timings in self.inference_timings:
            counts.update(timings.seconds)
        shares = stream_shares(counts)
        inference = counts["infer"] / (counts["infer"] + counts["wait"] or 1)
        busy = {"learner": learner.get("learn", 0.0), "inference": inference}
        at_limit = {k: x for k, x in busy.items() if x > ALWAYS_BUSY} or shares
        log.info(
            "The whole run: busy: %s. Streams' time: %s. Reconnects %d, dropped steps "
            "%d. Bottleneck: %s.",
            *(format_shares(busy), format_shares(shares), counts["num_reconnects"]),
            *(counts["num_dropped_steps"], max(at_limit, key=lambda k: at_limit[k])),
        )
        self.run.shares |= {
            "learner": learner,
            "streams": shares,
            "inference_batch": counts["num_entries"] / (counts["num_batches"] or 1),
        }

    def close(self) -> None:
        """Asks all threads of the streams to return."""
        if self.envs.listener and self.run.exit_status == 0:
            self.envs.listener.finish()  # environments don't connect again
        for group in self.groups:
            group.close()


def stream_shares(counts: Counter[str]) -> dict[str, float]:
    """Where streams spend their time; in the batcher, behind the previous batch."""
    waited, env = counts["inference_wait_seconds"], counts["env_seconds"]
    per_batch = counts["infer"] / (counts["num_batches"] or 1)
    computing = min(per_batch * counts["num_items"], waited)
    spent = {
        "environments": env,
        "wire": max(0.0, counts["env_wait_seconds"] - env),
        "batcher": waited - computing,
        "inference": computing,
        "learner's queue": counts["queue_wait_seconds"],
    }
    total = sum(spent.values()) or 1.0
    return {name: seconds / total for name, seconds in spent.items()}


def pinned(num_bytes: int) -> torch.Tensor:
    # A GPU copies from it while the CPU continues. It is used again once the arrays of
    # its batch are gone, so a thread keeps them until it has read the GPU's result.
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
