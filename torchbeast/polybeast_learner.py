"""PolyBeast's learner: batched inference for environment servers, and learning.

    environment servers          this process
      E environments a stream <-> actor pool (C++): one thread a stream
                                    -> DynamicBatcher -> inference threads: one forward
                                       for all streams that wait, on --actor_device
                                    -> BatchingQueue, rollouts [T + 1, B, ...]
                                    -> learner threads: the update, on --learner_device,
                                       and the new weights for inference

The algorithm is MonoBeast's: learn, test, checkpoints and run files are the same code.

    python -m torchbeast.polybeast_env --num_servers 2 &
    python -m torchbeast.polybeast_learner --num_servers 2
"""

if __name__ == "__main__":
    from torchbeast.core import processes

    processes.exit_on_stop_signals()  # the imports below take seconds

import argparse
import collections
import contextlib
import copy
import functools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

try:
    import libtorchbeast
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(str(error))  # which says what to do

from torchbeast import atari_wrappers, monobeast, polybeast_env
from torchbeast.core import flags as flags_lib
from torchbeast.core import resume, rollout
from torchbeast.core.distributions import make_distribution
from torchbeast.core.env_connection import environment_settings, tls_fault
from torchbeast.core.environment import EXTRA_FIELDS
from torchbeast.core.flags import FlagError, Flags
from torchbeast.core.peer_log import Events, PeerLog
from torchbeast.core.prof import Timings, format_shares
from torchbeast.core.rollout import Nested, map_nested
from torchbeast.model import Net, State

log = logging.getLogger("torchbeast.polybeast_learner")

MAX_ROLLOUT_BYTES = 2 << 30  # of one stream; see torchbeast.proto
PROBE_SECONDS = 60.0  # granted to a server that is there to make its environments
REPORT_SECONDS = 60.0  # between two lines on what limits the speed
ALWAYS_BUSY = 0.9  # of the time
DIALLING_STREAMS = 4  # of environments, unless --num_actors says otherwise


# --- Environments, as their servers describe them -------------------------------------


class EnvDescription(NamedTuple):
    """What the learner needs to know of the environments."""

    observation_space: spaces.Space
    action_space: spaces.Space
    frames_per_step: int
    num_envs: int  # of one stream
    hello: bytes  # all of it, for the pool to compare


def make_space(description: dict[str, Any]) -> spaces.Space:
    """The Gymnasium space that a server has described."""
    kind = description["type"]
    if kind == "Box":
        shape, dtype = description["shape"], np.dtype(description["dtype"])
        low, high = (
            np.broadcast_to(make_bound(description[end], end, dtype), shape)
            for end in ("low", "high")
        )
        return spaces.Box(low, high, shape, dtype=dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(description["n"], start=description["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(description["n"], start=description["start"])
    if kind == "MultiBinary":
        return spaces.MultiBinary(description["shape"])
    if kind == "Tuple":
        return spaces.Tuple([make_space(item) for item in description["spaces"]])
    items = description["spaces"].items()
    return spaces.Dict({key: make_space(item) for key, item in items})


def make_bound(bound: Any, end: str, dtype: np.dtype) -> np.ndarray:
    """A Box's low or high in its own dtype. The wire has float64, and no infinite ends.

    Args:
      bound: None (no bound), a float for all elements, or a float64 array.
      end: "low" or "high".
    """
    if bound is None:
        bound = -np.inf if end == "low" else np.inf
    if dtype.kind == "f":
        with np.errstate(over="ignore"):  # beyond the dtype's range: unbounded
            return np.asarray(bound, dtype)
    if dtype.kind == "b":
        return np.asarray(np.clip(bound, 0, 1), dtype)
    limits = np.iinfo(dtype)
    bound = np.clip(bound, float(limits.min), float(limits.max))
    with np.errstate(invalid="ignore"):  # float64 rounds int64's largest up, beyond it
        inside = bound.astype(dtype)
    return np.where(bound < float(limits.max), inside, dtype.type(limits.max))


class Environments:
    """The way to the environments: servers to dial, or a place where they dial.

    Attributes:
      addresses: of servers, one for each stream.
      listener: takes in environments that dial, or None.
      seed: of the environments; each stream gets it, with a number of its own.
      expected: what environments must be, as libtorchbeast takes it.

    Raises:
      FlagError: --listen is not an address.
      ServerError: the learner can't listen there.
    """

    def __init__(self, flags: Flags, seed: int) -> None:
        self.flags = flags
        self.seed = seed
        self.expected = expected_environment(flags)
        self.peer_log = PeerLog(log)
        self.addresses: list[str] = []
        self.listener: Any = None
        if flags.listen:
            try:
                security = polybeast_env.security(flags)
                del security["tls_server_name"]  # only for who dials
                self.listener = libtorchbeast.Listener(
                    flags.listen,
                    max_streams=flags.num_actors,
                    expected=self.expected,
                    seed=seed,
                    hello_timeout_s=flags.actor_timeout,
                    **security,
                )
                self.listener.start()
            except ValueError as error:
                raise FlagError(f"--listen: {error}") from error
            except RuntimeError as error:
                raise polybeast_env.ServerError(f"--listen: {error}") from error
            log.info("Listening at %s", self.listener.address)
        else:
            servers = server_addresses(flags)
            self.addresses = [
                servers[i % len(servers)] for i in range(flags.num_actors)
            ]
            if len(servers) > flags.num_actors:
                log.warning(
                    "%d of %d servers are not used: --num_actors is %d",
                    *(len(servers) - flags.num_actors, len(servers), flags.num_actors),
                )

    def describe(self, keep_going: Callable[[], None]) -> EnvDescription:
        """Waits for the first environments that can be used.

        Args:
          keep_going: is called again and again; may raise to end the wait.

        Raises:
          TransportError: there are none within --connect_timeout seconds, or no
            connection with them can work.
          FlagError, RefusedError, WireError, RuntimeError: none can be used; why.
        """
        deadline = time.monotonic() + self.flags.connect_timeout
        said = False
        warned: set[str] = set()
        while True:
            failed: dict[str, Exception] = {}
            final: list[Exception] = []  # of those that would be the same again
            for where in dict.fromkeys(self.addresses or [self.listener.address]):
                keep_going()
                try:
                    env = self._ask(where)
                except (FlagError, RuntimeError) as error:
                    failed[where] = error
                    fault = None
                    if not is_final(error) and not self.listener:
                        fault = tls_fault(where, self.flags)
                    if fault:
                        failed[where] = libtorchbeast.TransportError(
                            "no connection with the environment server at "
                            f"{where}: {fault}"
                        )
                    if fault or is_final(error):
                        final.append(failed[where])
                except ValueError as error:  # no address
                    raise FlagError(f"--server_addresses: {error}") from error
                else:
                    for other, why in failed.items():
                        log.warning("%s can't be used for now: %s", other, why)
                    return env
                finally:
                    self.report()
            if len(final) == len(failed):
                raise final[0]
            if time.monotonic() > deadline:
                raise (final or list(failed.values()))[0]
            for where, why in failed.items():
                if why in final and where not in warned:
                    log.warning("%s can't be used: %s", where, why)
                    warned.add(where)
            if not said:
                log.info("Waiting for environments at %s.", ", ".join(failed))
                said = True
            time.sleep(0.2)

    def _ask(self, where: str) -> EnvDescription:
        """What the environments are that a server has or that have joined.

        Raises:
          TransportError: there are none yet.
          FlagError, RefusedError, WireError, RuntimeError: they can't be used.
        """
        if not self.listener:
            seconds = min(PROBE_SECONDS, self.flags.connect_timeout)
            found = libtorchbeast.probe(
                where,
                seconds,
                expected=self.expected,
                **polybeast_env.security(self.flags),
            )
            return usable(self.flags, found, where)
        found = self.listener.probe(1.0)
        try:
            return usable(self.flags, found, where)
        except FlagError as error:  # others may come
            self.listener.refuse(found["hello"], str(error))
            raise libtorchbeast.TransportError(str(error)) from error

    def report(self, *events: Events) -> None:
        """Logs what happened to streams, also to those that the listener refused."""
        for happened in (self.listener.events(),) if self.listener else ():
            self.peer_log.report(happened)
        for happened in events:
            self.peer_log.report(happened)

    def num_refused(self) -> int:
        return self.listener.stats()["num_refused"] if self.listener else 0

    def close(self) -> None:
        if self.listener:
            self.listener.close()
        self.report()
        self.peer_log.close()


def is_final(error: Exception) -> bool:
    """Whether the same server would say the same again."""
    lost = isinstance(error, libtorchbeast.TransportError)
    return not lost or isinstance(error, libtorchbeast.RefusedError)


def usable(flags: Flags, found: dict[str, Any], where: str) -> EnvDescription:
    """What `libtorchbeast.probe` has found, if it is what the learner needs.

    Raises:
      FlagError: it is not; says why.
    """
    if found["action_space"] is None:
        raise FlagError(f"the environments at {where} don't tell their actions")
    is_atari = atari_wrappers.atari_game(flags.env) is not None
    try:
        observation_space, action_space = (
            make_space(found[name]) for name in ("observation_space", "action_space")
        )
        distribution = make_distribution(action_space)
    except (ValueError, AssertionError, OverflowError) as error:
        raise FlagError(f"the environments at {where}: {error}") from error
    env = EnvDescription(
        observation_space,
        action_space,
        flags.frame_skip if is_atari else 1,
        found["num_envs"],
        found["hello"],
    )
    n = getattr(env.action_space, "n", None)
    if flags.num_actions not in (None, n):
        raise FlagError(
            f"--num_actions is {flags.num_actions}, but {where} has "
            f"{env.action_space}; the flag may be left out"
        )
    num_bytes = found["step_bytes"] * (flags.unroll_length + 1)
    if num_bytes > MAX_ROLLOUT_BYTES:
        raise FlagError(
            f"a rollout of the {env.num_envs} environments at {where} would have "
            f"{num_bytes:,} bytes (--unroll_length {flags.unroll_length}), at most "
            f"{MAX_ROLLOUT_BYTES:,} are allowed"
        )
    spec = rollout.environment_spec(env.observation_space, distribution)
    for name, field in found["extra_fields"].items():
        seen = (tuple(field["shape"]), rollout.to_torch_dtype(field["dtype"]))
        if name in spec and seen != spec[name]:
            raise FlagError(
                f"the environments at {where} have the field {name} as "
                f"{field['dtype']} {list(field['shape'])}, and this learner needs "
                f"{spec[name].dtype} {list(spec[name].shape)}"
            )
    check_batches(flags, env)
    return env


def expected_environment(flags: Flags) -> dict[str, Any]:
    """What environments must be, by the flags; their spaces come from the first."""
    return {
        "name": flags.env,
        "num_envs": flags.envs_per_actor or 0,  # 0: as the first have it
        "settings": environment_settings(flags),
    }


# --- Inference ------------------------------------------------------------------------


class ActingModels(monobeast.Weights):
    """The newest weights as models to act with; those in use are never written to."""

    def __init__(self, model: Net, device: torch.device) -> None:
        self.nets = [
            copy.deepcopy(model).to(device).eval() for _ in range(self.NUM_BANKS)
        ]
        if device.type == "cpu":
            for net in self.nets:
                monobeast.prepare_to_act(net)
        super().__init__([net.state_dict() for net in self.nets])


def to_row(env_outputs: tuple, spec: dict[str, Nested]) -> dict[str, Nested]:
    """What the pool hands out, by the names that rows have (core/rollout.py).

    Environments in other languages may leave fields out: a game is an episode then, and
    nothing is ever truncated.
    """
    observation, reward, done, episode_step, episode_return, *extra = env_outputs
    row = {
        "observation": map_nested(as_stored, observation, spec["observation"]),
        "reward": reward,
        "done": done,
        "episode_step": episode_step,
        "episode_return": episode_return,
        "game_over": done,
        "game_step": episode_step,
        "game_return": episode_return,
        **(extra[0] if extra else {}),
    }
    row = rollout.show_final_fields(row)
    for name in row.keys() & EXTRA_FIELDS:
        row[name] = as_stored(row[name], spec[name])
    for name, field in spec.items():
        if name not in row:
            row[name] = done.new_zeros((*done.shape, *field.shape), dtype=field.dtype)
    return row


def as_stored(x: torch.Tensor, field: rollout.Spec) -> torch.Tensor:
    """In the dtype that MonoBeast's buffers have, see rollout.STORED_AS."""
    return x if x.dtype == field.dtype else x.to(field.dtype)


class Turns:
    """Makes acting and learning alternate in sync mode: no unroll begins before all of
    the unrolls before it were learned from."""

    def __init__(self, unroll_length: int) -> None:
        self.unroll_length = unroll_length
        self.learned = 0  # rounds of unrolls
        self.closed = False
        self.changed = threading.Condition()

    def wait(self, row: int) -> None:
        """Waits until the stream may act on row number `row` since its beginning."""
        # The agent acts on an unroll's last row before learning, in MonoBeast too.
        unroll = max(0, row - 1) // self.unroll_length
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.learned >= unroll)

    def end_of_turn(self) -> None:
        with self.changed:
            self.learned += 1
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


@torch.inference_mode()
def infer(
    streams: "Streams",
    models: ActingModels,
    env_spec: dict[str, Nested],
    agent_spec: dict[str, Nested],
    device: torch.device,
    generator: torch.Generator,
    turns: Turns | None,
) -> None:
    """Answers batches [1, n, ...] until the batcher is closed."""

    def to_device(nested: Nested) -> Nested:
        if device.type == "cpu":
            return nested
        return map_nested(lambda x: x.to(device, non_blocking=True), nested)

    if sys.platform == "linux":  # threads have priorities: the learner's comes first
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + 5)
    timings = Timings()
    streams.inference_timings.append(timings)
    row_number = 0
    for batch in streams.batcher:
        timings.time("wait")
        env_outputs, state = to_device(batch.get_inputs())
        row = to_row(env_outputs, env_spec)
        if turns:
            turns.wait(row_number)
        bank, version = models.lend()
        net = models.nets[bank]
        outputs, state = net(row, state)
        n = len(batch)
        # Of the end of truncated episodes the pool wants to know the value, no more.
        acts = not turns or not bool((row["truncated"] & ~row["done"]).any())
        logits = outputs["policy_logits"]
        if acts:
            outputs["action"] = net.distribution.sample(logits, generator)
            row_number += 1
        else:
            outputs["action"] = net.distribution.mode(logits)
        outputs["truncation_value"] = torch.zeros(1, n)  # the pool fills it in
        outputs["policy_version"] = torch.full((1, n), version)
        agent_row = {name: x for name, x in outputs.items() if name in agent_spec}
        batch.set_outputs(map_nested(torch.Tensor.cpu, (agent_row, tuple(state))))
        models.take_back(bank)
        timings.time("infer")


# --- Training -------------------------------------------------------------------------


class Streams:
    """Streams of environments, with the batcher and the queue that they share.

    Args:
      addresses: of servers, one for each stream.
      environments: which these streams are of.
      numbers: of the first stream, and the distance to the next.
      initial_state: of the model, for one environment.
      batch_size: environments of one learner batch.
      num_envs: of a stream, and of all streams.
      hello: what all environments must be.
    """

    def __init__(
        self,
        flags: Flags,
        addresses: Sequence[str],
        environments: Environments,
        numbers: tuple[int, int],
        initial_state: State,
        batch_size: int,
        num_envs: tuple[int, int],
        hello: bytes,
        devices: tuple[torch.device, torch.device],
    ) -> None:
        acting, learning = devices
        E, all_envs = num_envs
        listener = environments.listener
        self.queue = libtorchbeast.BatchingQueue(
            minimum_batch_size=batch_size,
            maximum_batch_size=batch_size,
            maximum_queue_size=-(-max(flags.max_learner_queue_size, batch_size) // E),
            allocator=pinned if learning.type == "cuda" else None,
        )
        self.batcher = libtorchbeast.DynamicBatcher(
            maximum_batch_size=all_envs,
            allocator=pinned if acting.type == "cuda" else None,
        )
        self.pool = libtorchbeast.ActorPool(
            flags.unroll_length,
            self.queue,
            self.batcher,
            addresses,
            initial_state,
            step_timeout_s=flags.actor_timeout,
            maximum_downtime_s=flags.connect_timeout,
            max_env_failures=flags.max_env_failures,
            hello=hello,
            expected=environments.expected,
            seed=environments.seed,
            first_stream=numbers[0],
            stream_stride=numbers[1],
            listener=listener,
            **({} if listener else polybeast_env.security(flags)),
        )
        self.inference_timings: list[Timings] = []

    def close(self) -> None:
        self.pool.close()
        for closable in (self.batcher, self.queue):
            if not closable.is_closed():
                closable.close()


def pinned(num_bytes: int) -> torch.Tensor:
    """Memory from which a GPU copies while the CPU goes on."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class PolyRun(monobeast.Run):
    """Threads do the work: pools step environments, inference threads act for them,
    learner threads learn from their rollouts.

    In sync mode every stream has a pool, batcher, queue and random generator of its own
    and takes turns with the learner, so that the run is a function of its flags: the
    same as MonoBeast's.
    """

    def __init__(
        self,
        beginning: resume.Beginning,
        learner: monobeast.Learner,
        env: EnvDescription,
        environments: "Environments",
        keep_going: Callable[[], None],
    ) -> None:
        flags = beginning.flags
        self.device = flags_lib.actor_device(flags)
        models = ActingModels(learner.model, self.device)
        super().__init__(beginning, learner, models)
        self.env, self.environments = env, environments
        self.keep_going = keep_going
        self.env_spec = rollout.environment_spec(
            env.observation_space, learner.model.distribution
        )
        agent_spec = rollout.agent_spec(learner.model.distribution)
        self.turns = Turns(flags.unroll_length) if flags.sync else None
        addresses = environments.addresses
        groups = [[address] for address in addresses] if flags.sync else [addresses]
        E = env.num_envs
        self.streams = [
            Streams(
                flags,
                group,
                environments,
                (i, len(groups)),
                tuple(learner.model.initial_state(1)),
                E if flags.sync else max(flags.batch_size, E),
                (E, len(group) * E if group else flags.num_actors * E),
                env.hello,
                (self.device, learner.device),
            )
            for i, group in enumerate(groups)
        ]
        for i, streams in enumerate(self.streams):
            self.add_thread(f"pool-{i}", streams.pool.run)
        # No noise comes twice when a run goes on.
        entropy = () if flags.sync else (learner.step,)
        for i in range(len(groups) if flags.sync else flags.num_inference_threads):
            seed = monobeast.derive_seed(flags.seed, i, *entropy)
            generator = torch.Generator(self.device).manual_seed(seed)
            self.add_thread(
                f"inference-{i}",
                functools.partial(
                    infer,
                    self.streams[i % len(groups)],
                    models,
                    self.env_spec,
                    agent_spec,
                    self.device,
                    generator,
                    self.turns,
                ),
            )
        for i in range(1 if flags.sync else flags.num_learner_threads):
            work = self.learn_in_turn if flags.sync else self.learn_from_queue
            self.add_thread(f"learner-{i}", work)
        # Sum and number of the rollouts that waited when an update was made.
        self.queue_depth = {"queue_sum": 0.0, "queue_samples": 0.0}
        self.reported, self.reported_at = self.counts(), time.monotonic()

    def start(self) -> None:
        log.info(
            "%d streams of %d environments; inference on %s, learning on %s",
            *(self.flags.num_actors, self.env.num_envs),
            *(self.device, self.learner.device),
        )

    def learn_from_queue(self) -> None:
        """A learner thread."""
        (streams,) = self.streams
        for rollouts in streams.queue:
            if not self.learn_from(rollouts):
                break
            self.wake()

    def learn_in_turn(self) -> None:
        """The learner thread in sync mode."""
        assert self.turns
        while self.learner.step < self.flags.total_steps:
            try:
                rollouts = [next(streams.queue) for streams in self.streams]
            except StopIteration:
                break
            self.learn_from(map_nested(lambda *x: torch.cat(x, dim=1), *rollouts))
            self.turns.end_of_turn()
            self.wake()

    def learn_from(self, rollouts: Nested) -> bool:
        """Updates from rollouts [T + 1, n, ...]; False if the run has enough of them.

        n is a multiple of the batch size: one stream may have more environments.
        """
        (env_outputs, agent_outputs), initial_state = rollouts
        rows = to_row(env_outputs, self.env_spec) | agent_outputs
        B = self.flags.batch_size
        for begin in range(0, rows["done"].shape[1], B):

            def part(x: torch.Tensor, begin: int = begin) -> torch.Tensor:
                x = x[:, begin : begin + B].contiguous()
                return x.to(self.learner.device, non_blocking=True)

            if not self.learn(map_nested(part, rows), map_nested(part, initial_state)):
                return False
        return True

    def turn(self) -> bool:
        if self.stop_signal or self.learner.step >= self.flags.total_steps:
            return False
        self.save_if_due()
        monobeast.connection.wait([self.wake_reader], 1.0)
        self.keep_going()
        self.environments.report(*(s.pool.events() for s in self.streams))
        if time.monotonic() - self.reported_at > REPORT_SECONDS:
            counts = self.counts()
            change = {k: x - self.reported.get(k, 0.0) for k, x in counts.items()}
            log.info("The last minute: %s", bottleneck(change))
            self.reported, self.reported_at = counts, time.monotonic()
        return True

    def queued(self) -> int:
        return sum(s.queue.size() for s in self.streams) * self.env.num_envs

    def acted(self) -> int:
        return sum(s.pool.count() for s in self.streams)

    def streams_connected(self) -> str:
        connected = sum(s.pool.stats()["num_connected"] for s in self.streams)
        return f"{connected}/{self.flags.num_actors}"

    def columns(self) -> dict[str, Any]:
        stats = [streams.pool.stats() for streams in self.streams]
        queued = self.queued()
        self.queue_depth["queue_sum"] += queued
        self.queue_depth["queue_samples"] += 1
        return {
            "reconnects": sum(s["num_reconnects"] for s in stats),
            "dropped_steps": sum(s["num_dropped_steps"] for s in stats),
            "refused": self.environments.num_refused()
            + sum(s["num_refused"] for s in stats),
            "env_failures": sum(s["num_env_failures"] for s in stats),
            "streams": sum(s["num_connected"] for s in stats),
            "queued": queued,
        }

    def end_work(self) -> None:
        if self.turns:
            self.turns.close()
        for streams in self.streams:
            streams.close()

    def close(self) -> None:
        self.environments.report(*(s.pool.events() for s in self.streams))
        self.environments.close()

    def who_waited(self) -> str:
        return f"The whole run: {bottleneck(self.counts())}"

    def report(self, error: BaseException) -> int:
        return report(error)

    def counts(self) -> dict[str, float]:
        """Seconds and numbers since the beginning, which `bottleneck` explains."""
        sums: dict[str, float] = collections.defaultdict(float, self.queue_depth)
        for name, seconds in self.timings.seconds.items():
            sums[f"learner_{name}"] += seconds
        for streams in self.streams:
            for timings in streams.inference_timings:
                for name, seconds in timings.seconds.items():
                    sums[f"inference_{name}"] += seconds
            pool, batcher = streams.pool.stats(), streams.batcher.stats()
            for stats, names in ((pool, POOL_COUNTS), (batcher, BATCHER_COUNTS)):
                for name in names:
                    sums[name] += stats.get(name, 0)
        return dict(sums)


# Of libtorchbeast's stats().
POOL_COUNTS = (
    *("env_seconds", "env_wait_seconds", "inference_wait_seconds"),
    *("queue_wait_seconds", "num_reconnects", "num_dropped_steps"),
)
BATCHER_COUNTS = ("num_batches", "num_items", "num_entries")


def bottleneck(counts: dict[str, float]) -> str:
    """Where the time went, and which part limits the speed.

    A stream's time passes while its environments step, on the wire, in the batcher
    while a batch before it is computed, in its own batch, or before a full queue. Where
    the learner or the inference threads are always busy, they limit; else it is the
    part in which streams spend most of their time.

    Args:
      counts: PolyRun.counts(), or the difference of two.
    """

    def get(name: str) -> float:
        return max(0.0, counts.get(name, 0.0))

    def busy(work: float, wait: float) -> float:
        return work / (work + wait) if work else 0.0

    learner = busy(get("learner_learn"), get("learner_wait"))
    inference = busy(get("inference_infer"), get("inference_wait"))
    batches = get("num_batches") or 1.0
    computing = get("inference_infer") * get("num_items") / batches
    computing = min(computing, get("inference_wait_seconds"))
    spent = {
        "environments": get("env_seconds"),
        "wire": max(0.0, get("env_wait_seconds") - get("env_seconds")),
        "batcher": get("inference_wait_seconds") - computing,
        "inference": computing,
        "learner's queue": get("queue_wait_seconds"),
    }
    total = sum(spent.values()) or 1.0
    shares = {name: seconds / total for name, seconds in spent.items()}
    if learner > ALWAYS_BUSY:
        limit = "learner"
    elif inference > ALWAYS_BUSY:
        limit = "inference"
    else:
        limit = max(shares, key=lambda name: shares[name])
    return (
        f"Learner busy {100 * learner:.0f} %, inference threads busy "
        f"{100 * inference:.0f} %. Streams' time: {format_shares(shares)}. Mean "
        f"inference batch {get('num_entries') / batches:.1f}, mean queue "
        f"{get('queue_sum') / (get('queue_samples') or 1.0):.1f}. Reconnects "
        f"{get('num_reconnects'):.0f}, dropped steps {get('num_dropped_steps'):.0f}. "
        f"The limit: {limit}."
    )


def train(
    beginning: resume.Beginning, keep_going: Callable[[], None] = lambda: None
) -> int:
    """Trains until flags.total_steps, or until a stop signal; see Run.train.

    Args:
      keep_going: is called at least once a second; ends the run by raising.
    """
    flags = beginning.flags
    if flags_lib.learner_device(flags).type == "cpu":
        # Before there are other threads: they would have memory arenas of their own.
        monobeast.keep_freed_memory()
    with contextlib.ExitStack() as stack:
        seed = flags.seed
        if beginning.saved:  # no game comes twice
            seed = monobeast.derive_seed(seed, beginning.saved["stats"]["step"])
        environments = Environments(flags, seed)
        stack.callback(environments.close)
        env = environments.describe(keep_going)
        learner = monobeast.Learner(flags, env)
        run = PolyRun(beginning, learner, env, environments, keep_going)
        return run.train()


def check_batches(flags: Flags, env: EnvDescription) -> None:
    """Raises FlagError if streams of environments don't add up to batches."""
    B, E = flags.batch_size, env.num_envs
    if flags.sync and flags.num_actors * E % B:
        raise FlagError(
            f"--sync learns from all {flags.num_actors * E} environments in turn "
            f"({flags.num_actors} streams of {E}): --batch_size must divide that, "
            f"got {B}"
        )
    if not flags.sync and B % E and E % B:
        raise FlagError(
            f"--batch_size {B}: the {E} environments of a stream are learned from "
            "together, so one must be a multiple of the other"
        )


# --- Command line ---------------------------------------------------------------------


def server_addresses(flags: argparse.Namespace) -> list[str]:
    """--server_addresses, which may name a file of them; else the local ones."""
    given = flags.server_addresses
    if not given:
        return [f"{flags.pipes_basename}.{i}" for i in range(flags.num_servers)]
    if given.startswith("@"):
        try:
            given = Path(given[1:]).read_text()
        except OSError as error:
            raise FlagError(f"--server_addresses: {error}") from error
    addresses = []
    for word in given.replace(",", " ").split():
        ports = re.fullmatch(r"(.+):(\d+)-(\d+)", word)  # host:5000-5007
        if not ports or word.startswith("unix:"):
            addresses.append(word)
            continue
        first, last = int(ports[2]), int(ports[3])
        if last < first:
            raise FlagError(
                f"--server_addresses: {word} has no ports: {last} < {first}"
            )
        addresses += [f"{ports[1]}:{port}" for port in range(first, last + 1)]
    if not addresses:
        raise FlagError("--server_addresses names no address")
    return addresses


def add_learner_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(num_actors=None)
    add = parser.add_argument_group("PolyBeast").add_argument
    add(
        "--server_addresses",
        help="host:port or host:first-last,... of the servers, or @FILE of them",
    )
    add(
        "--listen",
        help="HOST:PORT or unix:PATH where environments dial the learner",
    )
    add(
        "--connect_timeout",
        type=float,
        default=60.0,
        help="seconds without any environments after which the run ends",
    )
    add(
        "--actor_timeout",
        type=float,
        default=120.0,
        help="seconds that a step may take; a stream that takes longer is lost",
    )
    add(
        "--max_env_failures",
        type=int,
        default=10,
        help="environments that may raise within a minute; each costs its stream",
    )
    add("--actor_device", help="of inference (default: the second GPU, if any)")
    add("--num_inference_threads", type=int, default=1)
    add("--num_learner_threads", "--num_threads", type=int, default=1)
    add("--max_learner_queue_size", type=int, help="rollouts that may wait")
    add("--torch_threads", type=int, help="CPU threads of one operation")
    add("--num_actions", type=int, help="checked; the environments tell it themselves")


def make_parser() -> argparse.ArgumentParser:
    parser = flags_lib.make_parser("PolyBeast's learner.")
    add_learner_flags(parser)
    polybeast_env.add_connection_flags(parser)
    parser.set_defaults(envs_per_actor=None)  # as the environments have it
    return parser


def resolve_layout(flags: Flags) -> Flags:
    """Fills in what follows from other flags, and checks the rest.

    Raises:
      FlagError: a value can't work.
    """
    if flags.listen and flags.server_addresses:
        # A checkpoint's way to the environments gives way to one that is typed.
        for name, other in (
            ("listen", "server_addresses"),
            ("server_addresses", "listen"),
        ):
            if name in flags.typed and other not in flags.typed:
                setattr(flags, other, None)
    if flags.listen and flags.server_addresses:
        raise FlagError(
            "give --listen, to wait for environments, or --server_addresses, to dial "
            "them, but not both"
        )
    if flags.num_actors is None:
        flags.num_actors = (
            DIALLING_STREAMS if flags.listen else len(server_addresses(flags))
        )
    if flags.torch_threads is None:
        flags.torch_threads = max(1, monobeast.num_cpus() // 2)
    if flags.max_learner_queue_size is None:
        flags.max_learner_queue_size = flags.batch_size
    flags_lib.actor_device(flags)  # is it there?
    for name in ("connect_timeout", "actor_timeout"):
        if not getattr(flags, name) > 0:
            raise FlagError(f"--{name} must be above 0, got {getattr(flags, name)}")
    for name in (
        *("num_servers", "envs_per_actor", "num_inference_threads"),
        *("num_learner_threads", "max_learner_queue_size", "torch_threads"),
    ):
        if getattr(flags, name) < 1:
            raise FlagError(f"--{name} must be at least 1, got {getattr(flags, name)}")
    if flags.max_env_failures < 0:
        raise FlagError(
            f"--max_env_failures must be at least 0, got {flags.max_env_failures}"
        )
    if flags.sync and (
        flags.listen or len(set(server_addresses(flags))) != flags.num_actors
    ):
        raise FlagError(
            "--sync needs a server for each actor, so that the environments of each "
            f"have known seeds: give --num_servers {flags.num_actors} for --num_actors "
            f"{flags.num_actors}, and no --listen"
        )
    if flags.sync and not flags.disable_checkpoint:
        raise FlagError(
            "--sync can't resume exactly here, because the servers have the games in "
            "progress: add --disable_checkpoint, or use MonoBeast, which saves them"
        )
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 finished, 1 failed, 128 + n ended by signal n."""
    return run(argv, make_parser(), resolve_layout, train)


def run(
    argv: Sequence[str] | None,
    parser: argparse.ArgumentParser,
    resolve_layout: Callable[[Flags], Flags],
    train: Callable[[resume.Beginning], int],
) -> int:
    """What the flags ask for: trains with `train`, or tests as MonoBeast does."""
    return monobeast.run(argv, parser, resolve_layout, train, report)


# What a person can put right: the message says it all, a traceback would only hide it.
EXPECTED_ERRORS = (
    libtorchbeast.TransportError,
    libtorchbeast.WireError,
    polybeast_env.ServerError,
)


def report(error: BaseException) -> int:
    """Says in the log what ended the run; returns the exit status for it."""
    if isinstance(error, EXPECTED_ERRORS):
        log.error("%s: %s", type(error).__name__, error)
        return 1
    return monobeast.report(error)


if __name__ == "__main__":
    processes.run_script(main)
