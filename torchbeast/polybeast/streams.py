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
from torchbeast.flags import Flags
from torchbeast.local.env_spec import EnvSpec
from torchbeast.polybeast.remote_envs import RemoteEnvs
from torchbeast.polybeast.security import ServerError
from torchbeast.runs.run import Run
from torchbeast.runs.status import Timings, format_shares

log = logging.getLogger(__name__)

ALWAYS_BUSY = 0.9  # share of the time


def as_stored(row: dict[str, Nested], spec: dict[str, Nested]) -> dict[str, Nested]:
    """Casts a row to the dtypes of MonoBeast's buffers, see rollout.STORED_AS.

    Environments in other languages may leave out fields of `spec`: these become zero.
    """
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
      addresses: of the servers, one per stream.
      spec: of the first stream; all others are compared with it.
      initial_state: of the model, for one environment.
      first_stream, stream_stride: number of the first stream, and the distance to the
        next.

    Attributes:
      turns: with --sync, a permit per round that the learner has learned from. No
        unroll begins before.
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
        E, self.turns = spec.num_envs, threading.Semaphore(0)
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
            raise FlagError(str(error)) from error

    def close(self) -> None:
        self.pool.close()
        for closable in (self.batcher, self.queue):
            with contextlib.suppress(RuntimeError):  # a pool that failed has closed it
                closable.close()
        self.turns.release()


def stream_shares(counts: Counter[str]) -> dict[str, float]:
    """Where streams spend their time; the sum is 1.

    In their environments, on the wire, in the batcher (behind the previous batch), in
    inference, or at the learner's full queue.
    """
    computing = min(
        counts["infer"] * counts["num_items"] / (counts["num_batches"] or 1),
        counts["inference_wait_seconds"],
    )
    spent = {
        "environments": counts["env_seconds"],
        "wire": max(0.0, counts["env_wait_seconds"] - counts["env_seconds"]),
        "batcher": counts["inference_wait_seconds"] - computing,
        "inference": computing,
        "learner's queue": counts["queue_wait_seconds"],
    }
    total = sum(spent.values()) or 1.0
    return {name: seconds / total for name, seconds in spent.items()}


class Streams:
    """All streams of a run, in groups.

    With --sync each stream is a group, so that inference and learning have its rows in
    a known order. Otherwise there is one group.

    Args:
      device: for inference.

    Attributes:
      env_fields: fields of a row from the environments, see core/rollout.py.
    """

    def __init__(self, run: Run, envs: RemoteEnvs, device: torch.device) -> None:
        flags, learner, spec = run.flags, run.learner, run.learner.env_spec
        self.run, self.envs = run, envs
        self.env_fields = rollout.env_fields(
            spec.observation_space, learner.model.distribution
        )
        parts = [[x] for x in envs.addresses] if flags.sync else [envs.addresses]
        self.groups = [
            StreamGroup(
                *(flags, part, envs, spec),
                initial_state=tuple(x.cpu() for x in learner.model.initial_state(1)),
                # No two streams of all learners play the same games.
                first_stream=ranks.rank() * len(parts) + i,
                stream_stride=ranks.size() * len(parts),
                acting_device=device,
                learning_device=learner.device,
            )
            for i, part in enumerate(parts)
        ]
        self.inference_timings: list[Timings] = []

    def queued(self) -> int:
        """Rollouts that wait for the learner."""
        items = sum(group.queue.size() for group in self.groups)
        return items * self.run.learner.env_spec.num_envs

    def columns(self) -> dict[str, int]:
        """The columns of logs.csv about streams."""
        stats, queued = [group.pool.stats() for group in self.groups], self.queued()
        listener = self.envs.listener
        refused = listener.stats()["num_refused"] if listener else 0
        return {
            "reconnects": sum(x["num_reconnects"] for x in stats),
            "dropped_steps": sum(x["num_dropped_steps"] for x in stats),
            "refused": refused + sum(x["num_refused"] for x in stats),
            "env_failures": sum(x["num_env_failures"] for x in stats),
            "streams": sum(x["num_connected"] for x in stats),
            "queued": queued,
        }

    def report(self) -> None:
        """Logs events and updates the live line.

        Raises:
          ServerError: a stream was lost, which --sync does not allow.
        """
        self.envs.report(self.groups)
        stats = [group.pool.stats() for group in self.groups]
        # After a stop signal, servers may be gone.
        for x in stats if self.run.flags.sync and not self.run.stop_requested() else ():
            if x["num_reconnects"] or x["num_dropped_steps"]:
                raise ServerError(
                    "a stream was lost, and a run with --sync can't be the same "
                    f"without its steps: {x['last_error']}"
                )
        acted = sum(group.pool.count() for group in self.groups)
        connected = sum(x["num_connected"] for x in stats)
        streams = f"{connected}/{self.run.flags.num_actors}"
        self.run.show(self.queued(), acted, streams)

    def end(self) -> None:
        """Logs the last events, and where the time went, also into meta.json."""
        self.envs.report(self.groups)
        self.envs.close()
        counts: Counter[str] = Counter()
        for timings in self.inference_timings:
            counts.update(timings.seconds)
        for group in self.groups:
            stats = group.pool.stats() | group.batcher.stats()
            counts.update({k: x for k, x in stats.items() if not isinstance(x, str)})
        shares, learner = stream_shares(counts), self.run.timings.shares()
        busy = {
            "learner": learner.get("learn", 0.0),
            "inference": counts["infer"] / (counts["infer"] + counts["wait"] or 1),
        }
        at_limit = [who for who, share in busy.items() if share > ALWAYS_BUSY]
        slowest = max(shares, key=lambda name: shares[name])
        log.info(
            "The whole run: busy: %s. Streams' time: %s. Reconnects %d, dropped steps "
            "%d. Bottleneck: %s.",
            *(format_shares(busy), format_shares(shares), counts["num_reconnects"]),
            *(counts["num_dropped_steps"], [*at_limit, slowest][0]),
        )
        self.run.shares |= {
            "learner": learner,
            "streams": shares,
            "inference_batch": counts["num_entries"] / (counts["num_batches"] or 1),
        }

    def close(self) -> None:
        """Asks all threads of the streams to return."""
        for group in self.groups:
            group.close()


def pinned(num_bytes: int) -> torch.Tensor:
    """Pinned memory: a GPU copies from it while the CPU continues.

    It is used again once the arrays of its batch are gone. So a thread keeps them until
    it has read a result from the GPU that depends on them: the answer, or the loss.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
