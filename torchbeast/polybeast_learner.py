"""PolyBeast's learner: batched inference for environment servers, and learning.

    environment servers          this process
      E environments per stream <-> actor pool (C++): one thread per stream
                                    -> DynamicBatcher -> inference threads: one forward
                                       for all streams that wait, on --actor_device
                                    -> BatchingQueue, rollouts [T + 1, B, ...]
                                    -> learner threads: the update, on --learner_device,
                                       and the new weights for inference

Read it top to bottom: infer, train, flags, main. The update, checkpoints, logs and
evaluation are the same code as MonoBeast's.

    python -m torchbeast.polybeast_env --num_servers 2 &
    python -m torchbeast.polybeast_learner --num_servers 2
"""

if __name__ == "__main__":
    from torchbeast.core import processes

    processes.exit_on_stop_signals()  # the imports below take seconds

import argparse
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

import torch

try:
    import libtorchbeast  # noqa: F401 # if it is missing, its own message says what to do
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(str(error))

from torchbeast.core import devices, processes, prof, resume, rollout, script
from torchbeast.core import flags as flags_lib
from torchbeast.core.acting import ActingModels, act_step
from torchbeast.core.connection_flags import add_connection_flags
from torchbeast.core.flags import FlagError, Flags
from torchbeast.core.nested import Nested, map_nested
from torchbeast.core.prof import Timings
from torchbeast.core.remote_envs import RemoteEnvs, server_addresses
from torchbeast.core.run import Run, keep_freed_memory
from torchbeast.core.seeds import derive_seed
from torchbeast.core.streams import Streams, SyncBarrier, as_stored
from torchbeast.evaluate import evaluate
from torchbeast.learner import Learner, learn
from torchbeast.model import TORSOS

log = logging.getLogger("torchbeast.polybeast_learner")

REPORT_SECONDS = 60.0  # between two lines on what limits the speed
LISTENING_STREAMS = 4  # expected with --listen, unless --num_actors is given


# --- Acting ---------------------------------------------------------------------------


@torch.inference_mode()
def infer(
    streams: Streams,
    models: ActingModels,
    env_spec: dict[str, Nested],
    agent_spec: dict[str, Nested],
    device: torch.device,
    generator: torch.Generator,
    barrier: SyncBarrier | None,
) -> None:
    """An inference thread: answers batches [1, n, ...] until the batcher is closed.

    Args:
      env_spec: fields of a row that the environments fill, see rollout.py.
      agent_spec: those that the agent fills.
      barrier: in sync mode, holds the stream back until it is its turn.
    """

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
        row, state = to_device(batch.get_inputs())
        row = as_stored(row, env_spec)
        if barrier:
            barrier.wait_for_turn(row_number)
        bank, num_updates = models.acquire()
        net = models.nets[bank]
        choose: Any = functools.partial(net.distribution.sample, generator=generator)
        # The pool also asks for the value of a truncated episode's last observation. It
        # drops the action, so no random number is used up for it.
        if barrier and bool((row["truncated"] & ~row["done"]).any()):
            choose = net.distribution.mode
        else:
            row_number += 1
        outputs, state = act_step(net, row, state, choose, num_updates)
        agent_row = {name: x for name, x in outputs.items() if name in agent_spec}
        batch.set_outputs(map_nested(torch.Tensor.cpu, (agent_row, tuple(state))))
        models.release(bank)
        timings.time("infer")


# --- Learning -------------------------------------------------------------------------


def make_streams(
    flags: Flags, learner: Learner, envs: RemoteEnvs, device: torch.device
) -> list[Streams]:
    """All streams share a pool, batcher and queue. In sync mode each has its own."""
    spec = learner.env_spec
    E, B = spec.num_envs, flags.batch_size
    addresses = envs.addresses
    groups = [[address] for address in addresses] if flags.sync else [addresses]
    return [
        Streams(
            flags,
            group,
            envs,
            (i, len(groups)),
            tuple(learner.model.initial_state(1)),
            E if flags.sync else max(B, E),
            (E, len(group) * E if group else flags.num_actors * E),
            spec.hello,
            (device, learner.device),
        )
        for i, group in enumerate(groups)
    ]


def train(start: resume.Start, check_servers: Callable[[], None] = lambda: None) -> int:
    """Trains until flags.total_steps or a stop signal. Returns the exit status.

    Args:
      check_servers: is called at least once per second; may raise to end the run.
    """
    flags = start.flags
    if devices.learner_device(flags).type == "cpu":
        # Before any other thread starts: it would get a memory arena of its own.
        keep_freed_memory()
    env_seed = flags.seed
    if start.saved:  # no game comes twice
        env_seed = derive_seed(flags.seed, start.saved["stats"]["step"])
    B, T = flags.batch_size, flags.unroll_length
    envs = RemoteEnvs(flags, env_seed)
    try:
        learner = Learner(flags, envs.describe(check_servers))
        run = Run(start, learner)
    except BaseException:
        envs.close()
        raise
    distribution = learner.model.distribution
    env_spec = rollout.environment_spec(
        learner.env_spec.observation_space, distribution
    )
    device = devices.actor_device(flags)
    models = ActingModels(learner.model, device)
    models.publish(learner.model, learner.num_updates)
    all_streams = make_streams(flags, learner, envs, device)
    barrier = SyncBarrier(T) if flags.sync else None
    # Rollouts that waited when an update was made: their sum, and how often.
    queue_depth = {"queue_sum": 0.0, "queue_samples": 0.0}

    def queued() -> int:
        return sum(s.queue.size() for s in all_streams) * learner.env_spec.num_envs

    def learn_from(rollouts: Nested) -> bool:
        """Updates from rollouts [T + 1, n, ...]; False if the run has enough of them.

        n is a multiple of B if a stream has more than B environments.
        """
        rows, initial_state = rollouts
        rows = as_stored(rows, env_spec)
        for begin in range(0, rows["done"].shape[1], B):

            def part(x: torch.Tensor, begin: int = begin) -> torch.Tensor:
                x = x[:, begin : begin + B].contiguous()
                return x.to(learner.device, non_blocking=True)

            batch, state = map_nested(part, rows), map_nested(part, initial_state)
            with run.updating() as wanted:
                if not wanted:
                    return False
                row = learn(learner, batch, state)
                models.publish(learner.model, learner.num_updates)
                queue_depth["queue_sum"] += queued()
                queue_depth["queue_samples"] += 1
                run.log(row, {**envs.columns(all_streams), "queued": queued()})
        run.wake()
        return True

    def learn_from_queue() -> None:
        """A learner thread."""
        (streams,) = all_streams
        for rollouts in streams.queue:
            if not learn_from(rollouts):
                break

    def learn_in_rounds() -> None:
        """The learner thread in sync mode: one rollout of each stream makes a round."""
        assert barrier
        while learner.step < flags.total_steps:
            try:
                rollouts = [next(streams.queue) for streams in all_streams]
            except StopIteration:
                break
            learn_from(map_nested(lambda *x: torch.cat(x, dim=1), *rollouts))
            barrier.end_round()
            run.wake()

    def stop() -> None:
        if barrier:
            barrier.close()
        for streams in all_streams:
            streams.close()

    def counts() -> dict[str, float]:
        """Seconds and numbers since the beginning, for prof.bottleneck."""
        sums = dict(queue_depth)
        for name, seconds in run.timings.seconds.items():
            sums[f"learner_{name}"] = seconds
        for streams in all_streams:
            for name, x in streams.counts().items():
                sums[name] = sums.get(name, 0.0) + x
        return sums

    with run:
        log.info(
            "%d streams of %d environments; inference on %s, learning on %s",
            *(flags.num_actors, learner.env_spec.num_envs, device, learner.device),
        )
        run.stack.callback(
            lambda: log.info("The whole run: %s", prof.bottleneck(counts()))
        )
        run.stack.callback(envs.close)
        run.stack.callback(envs.report, all_streams)
        for i, streams in enumerate(all_streams):
            run.start_thread(f"pool-{i}", streams.pool.run, stop)
        # No noise comes twice when a run goes on.
        entropy = () if flags.sync else (learner.step,)
        for i in range(len(all_streams) if flags.sync else flags.num_inference_threads):
            generator = torch.Generator(device)
            generator.manual_seed(derive_seed(flags.seed, i, *entropy))
            inference = functools.partial(
                infer,
                all_streams[i % len(all_streams)],
                models,
                env_spec,
                rollout.agent_spec(distribution),
                device,
                generator,
                barrier,
            )
            run.start_thread(f"inference-{i}", inference, stop)
        for i in range(1 if flags.sync else flags.num_learner_threads):
            work = learn_in_rounds if flags.sync else learn_from_queue
            run.start_thread(f"learner-{i}", work, stop)

        reported, reported_at = counts(), time.monotonic()
        while run.going():
            if run.save_is_due():
                run.save()
            connection.wait([run.wake_reader], 1.0)
            check_servers()
            envs.report(all_streams)
            if time.monotonic() - reported_at > REPORT_SECONDS:
                now = counts()
                change = {k: x - reported.get(k, 0.0) for k, x in now.items()}
                log.info("The last minute: %s", prof.bottleneck(change))
                reported, reported_at = now, time.monotonic()
            acted = sum(streams.pool.count() for streams in all_streams)
            run.show(queued(), acted, envs.num_connected(all_streams))
    return run.exit_status


# --- Command line ---------------------------------------------------------------------


def add_learner_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(num_actors=None)
    add = parser.add_argument_group("PolyBeast").add_argument
    add(
        "--server_addresses",
        help="host:port or host:first-last,... of the servers, or @FILE of them",
    )
    add(
        "--listen",
        help="HOST:PORT or unix:PATH where the learner waits for environments",
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
    add(
        "--num_actions",
        type=int,
        help="only checked; environments announce it",
    )


def make_parser() -> argparse.ArgumentParser:
    parser = flags_lib.make_parser("PolyBeast's learner.", TORSOS)
    add_learner_flags(parser)
    add_connection_flags(parser)
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
            LISTENING_STREAMS if flags.listen else len(server_addresses(flags))
        )
    if flags.torch_threads is None:
        flags.torch_threads = max(1, processes.num_cpus() // 2)
    if flags.max_learner_queue_size is None:
        flags.max_learner_queue_size = flags.batch_size
    devices.actor_device(flags)  # is it there?
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
    parser = make_parser()
    with script.reported() as outcome:
        if flags_lib.parse(parser, argv).mode == "train":
            with resume.begin(parser, argv, resolve_layout) as start:
                outcome.status = 0 if start.is_finished() else train(start)
        else:
            evaluate(parser, argv)
    return outcome.status


if __name__ == "__main__":
    processes.run_script(main)
