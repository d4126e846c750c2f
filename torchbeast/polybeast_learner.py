"""PolyBeast's learner: batched inference for environment servers, and learning.

    environment servers          this process
      E environments per stream <-> actor pool (C++): one thread per stream
                                    -> DynamicBatcher -> inference threads: one forward
                                       for all waiting streams, on --actor_device
                                    -> BatchingQueue, rollouts [T + 1, B, ...]
                                    -> learner threads: the update, on --learner_device,
                                       and the new weights for inference

Read it top to bottom: infer, train, flags, main. The update, checkpoints, logs and
evaluation use the same code as MonoBeast.

    python -m torchbeast.polybeast_env --num_servers 2 &
    python -m torchbeast.polybeast_learner --num_servers 2
"""

if __name__ == "__main__":
    from torchbeast.procs import processes

    processes.exit_on_stop_signals()  # the imports below take seconds
    processes.require_native()

import contextlib
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

from torchbeast import flags as declared_flags
from torchbeast.base import devices
from torchbeast.base.errors import FlagError
from torchbeast.base.flag import FlagParser
from torchbeast.base.hardware import keep_freed_memory
from torchbeast.base.nested import Nested, map_nested
from torchbeast.base.seeds import derive_seed
from torchbeast.core import rollout
from torchbeast.core.acting import ActingModels, act_step
from torchbeast.learner import Learner, learn
from torchbeast.model import TORSOS
from torchbeast.play.evaluate import evaluate
from torchbeast.play.evaluate_on_servers import fits, play_on_servers
from torchbeast.play.evaluator import Evaluator
from torchbeast.procs import processes
from torchbeast.remote.remote_envs import RemoteEnvs, server_addresses
from torchbeast.remote.security import choose_side
from torchbeast.remote.streams import Streams, SyncBarrier, as_stored
from torchbeast.runs import flagset, prof, resume, script
from torchbeast.runs.flagset import Flags
from torchbeast.runs.prof import Timings
from torchbeast.runs.run import Run

log = logging.getLogger("torchbeast.polybeast_learner")

REPORT_SECONDS = 60.0  # between two log lines about the bottleneck
LISTENING_STREAMS = 4  # default of --num_actors with --listen


# --- Acting ---------------------------------------------------------------------------


def infer(
    streams: Streams,
    models: ActingModels,
    env_fields: dict[str, Nested],
    device: torch.device,
    generator: torch.Generator,
    barrier: SyncBarrier | None,
) -> None:
    """An inference thread: answers batches [1, n, ...] until the batcher is closed.

    Args:
      env_fields: fields of a row from the environments, see core/rollout.py.
      barrier: with --sync, makes streams and learner alternate.
    """

    def to_device(nested: Nested) -> Nested:
        if device.type == "cpu":
            return nested
        return map_nested(lambda x: x.to(device, non_blocking=True), nested)

    if sys.platform == "linux":  # per thread: the learner thread has priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + 5)
    timings = Timings()
    streams.inference_timings.append(timings)
    row_number = 0
    for batch in streams.batcher:
        timings.time("wait")
        row, state = to_device(batch.get_inputs())
        row = as_stored(row, env_fields)
        if barrier:
            timings.time("infer")
            barrier.wait_for_turn(row_number)
            timings.time("wait")
        bank, policy_version = models.acquire()
        net = models.nets[bank]
        choose: Any = functools.partial(net.distribution.sample, generator=generator)
        # The pool also asks for the value of a truncated episode's last observation. It
        # ignores the action, so with --sync don't use a random number for it.
        if barrier and bool((row["truncated"] & ~row["done"]).any()):
            choose = net.distribution.mode
        else:
            row_number += 1
        outputs, state = act_step(net, row, state, choose, policy_version)
        batch.set_outputs(map_nested(torch.Tensor.cpu, (outputs, tuple(state))))
        models.release(bank)
        timings.time("infer")


# --- Learning -------------------------------------------------------------------------


def make_streams(
    flags: Flags, learner: Learner, envs: RemoteEnvs, device: torch.device
) -> list[Streams]:
    """All streams share a pool, batcher and queue. With --sync each has its own."""
    addresses = envs.addresses
    groups = [[address] for address in addresses] if flags.sync else [addresses]
    return [
        Streams(
            flags,
            group,
            envs,
            learner.env_spec,
            initial_state=tuple(learner.model.initial_state(1)),
            first_stream=i,
            stream_stride=len(groups),
            acting_device=device,
            learning_device=learner.device,
        )
        for i, group in enumerate(groups)
    ]


def start_acting(
    run: Run, envs: RemoteEnvs, env_fields: dict[str, Nested], barrier: Any
) -> tuple[list[Streams], ActingModels]:
    """Starts the pools and the inference threads."""
    flags, learner = run.flags, run.learner
    device = devices.actor_device(flags)
    models = ActingModels(learner.model, device)
    models.publish(learner.model, learner.num_updates)
    all_streams = make_streams(flags, learner, envs, device)

    def stop() -> None:
        if barrier:
            barrier.close()
        for streams in all_streams:
            streams.close()

    run.on_stop(stop)
    for i, streams in enumerate(all_streams):
        run.start_thread(f"pool-{i}", streams.pool.run)
    # A resumed run gets new random numbers, except with --sync.
    start_step = () if flags.sync else (learner.step,)
    for i in range(len(all_streams) if flags.sync else flags.num_inference_threads):
        generator = torch.Generator(device)
        generator.manual_seed(derive_seed(flags.seed, i, *start_step))
        inference = functools.partial(
            infer,
            all_streams[i % len(all_streams)],
            models,
            env_fields,
            device,
            generator,
            barrier,
        )
        run.start_thread(f"inference-{i}", inference)
    return all_streams, models


def train(
    start: resume.Start,
    check_servers: Callable[[], None] = lambda: None,
    listen: str | None = None,
) -> int:
    """Trains until flags.total_steps or a stop signal. Returns the exit status.

    Args:
      check_servers: called about once per second, and before each server is asked for
        its spaces; may raise to end the run.
      listen: listens here if --listen is not given. It is not saved, so a resumed run
        may listen elsewhere.
    """
    flags = start.flags
    # Before any other thread starts, so that threads share one memory arena.
    keep_freed_memory(devices.learner_device(flags))
    env_seed = flags.seed
    if start.saved:  # don't repeat the games before the resume
        env_seed = derive_seed(flags.seed, start.saved["stats"]["step"])
    B, T = flags.batch_size, flags.unroll_length
    envs = RemoteEnvs(flags.replace(listen=flags.listen or listen), env_seed)
    check = fits(flags, start.saved["model_state_dict"]) if start.saved else None
    barrier = SyncBarrier(T) if flags.sync else None
    with contextlib.ExitStack() as undo:
        undo.callback(envs.close)
        while True:
            spec = envs.find_env_spec(check_servers, check)
            learner = Learner(flags, spec)
            run = Run(start, learner)
            env_fields = rollout.env_fields(
                spec.observation_space, learner.model.distribution
            )
            undo.callback(run.end_threads)
            all_streams, models = start_acting(run, envs, env_fields, barrier)
            # Environments that join determine the spaces once there is a batch of them.
            checks = (check_servers, run.stop_requested)
            if not envs.listener or envs.settle(all_streams[0], spec, checks):
                break
            run.end_threads()
        undo.pop_all()
    # Sum of the queue's size over updates, and number of updates.
    queue_depth = {"queue_sum": 0.0, "queue_samples": 0.0}

    def queued() -> int:
        return sum(s.queue.size() for s in all_streams) * learner.env_spec.num_envs

    def to_learner(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().to(learner.device, non_blocking=True)

    def learn_from(rollouts: Nested) -> bool:
        """Learns from rollouts [T + 1, n, ...]; False if no more updates are wanted.

        If a stream has more than B environments, n is a multiple of B and gives several
        updates.
        """
        rows, initial_state = rollouts
        rows = as_stored(rows, env_fields)
        parts = rows["done"].shape[1] // B
        for part in (slice(i * B, (i + 1) * B) for i in range(parts)):
            batch, state = map_nested(
                lambda x, part=part: to_learner(x[:, part]), (rows, initial_state)
            )
            with run.updating() as wanted:
                if not wanted:
                    return False
                columns = learn(learner, batch, state)
                models.publish(learner.model, learner.num_updates)
                waiting = queued()
                queue_depth["queue_sum"] += waiting
                queue_depth["queue_samples"] += 1
                run.log(columns, envs.columns(all_streams), {"queued": waiting})
        run.wake()
        return True

    def learn_from_queue() -> None:
        """A learner thread."""
        (streams,) = all_streams
        for rollouts in streams.queue:
            if not learn_from(rollouts):
                break

    def learn_in_rounds() -> None:
        """The learner thread with --sync: a round has one item of each stream."""
        assert barrier
        while learner.step < flags.total_steps:
            try:
                rollouts = [next(streams.queue) for streams in all_streams]
            except StopIteration:
                break
            learn_from(map_nested(lambda *x: torch.cat(x, dim=1), *rollouts))
            barrier.end_round()
            run.wake()

    def counts() -> dict[str, float]:
        """Seconds and counts since the start, for prof.bottleneck."""
        sums = dict(queue_depth)
        for name, seconds in run.timings.seconds.copy().items():  # threads add some
            sums[f"learner_{name}"] = seconds
        for streams in all_streams:
            for name, x in streams.counts().items():
                sums[name] = sums.get(name, 0.0) + x
        return sums

    with run:
        log.info(
            "%d streams of %d environments; inference on %s, learning on %s",
            flags.num_actors,
            learner.env_spec.num_envs,
            devices.actor_device(flags),
            learner.device,
        )
        run.stack.callback(
            lambda: log.info("The whole run: %s", prof.bottleneck(counts()))
        )
        run.stack.callback(envs.close)
        run.stack.callback(envs.report, all_streams)
        for i in range(1 if flags.sync else flags.num_learner_threads):
            work = learn_in_rounds if flags.sync else learn_from_queue
            run.start_thread(f"learner-{i}", work)

        evaluator = Evaluator(run)
        reported, reported_at = counts(), time.monotonic()
        while run.going():
            evaluator.poll()
            if run.save_is_due():
                run.save()
            connection.wait([run.wake_reader], 1.0)
            check_servers()
            envs.report(all_streams)
            if flags.sync and not run.stop_requested():  # else servers may be gone
                envs.check_no_stream_lost(all_streams)
            if time.monotonic() - reported_at > REPORT_SECONDS:
                now = counts()
                change = {k: x - reported.get(k, 0.0) for k, x in now.items()}
                log.info("The last minute: %s", prof.bottleneck(change))
                reported, reported_at = now, time.monotonic()
            acted = sum(streams.pool.count() for streams in all_streams)
            run.show(queued(), acted, envs.num_connected(all_streams))
        evaluator.finish()
    return run.exit_status


# --- Command line ---------------------------------------------------------------------


def make_parser() -> FlagParser:
    groups = (*declared_flags.TRAINING, *declared_flags.CONNECTED)
    return declared_flags.make_parser(
        "PolyBeast's learner.",
        TORSOS,
        groups,
        num_actors=None,
        envs_per_actor=None,  # the environments' value
    )


def resolve_layout(flags: Flags) -> Flags:
    """Fills in the flags that depend on others, and checks them.

    Raises:
      FlagError: a value is not allowed.
    """
    choose_side(flags)
    if flags.num_actors is None:
        flags.num_actors = (
            LISTENING_STREAMS if flags.listen else len(server_addresses(flags))
        )
    if flags.max_learner_queue_size is None:
        flags.max_learner_queue_size = flags.batch_size
    devices.actor_device(flags)  # raises if it does not exist
    if flags.sync and (
        flags.listen or len(set(server_addresses(flags))) != flags.num_actors
    ):
        raise FlagError(
            "--sync needs one server per actor, so that each environment gets a known "
            f"seed: give --num_servers {flags.num_actors} for --num_actors "
            f"{flags.num_actors}, and no --listen"
        )
    if flags.sync and not flags.disable_checkpoint:
        raise FlagError(
            "PolyBeast can't resume exactly with --sync, because the servers have the "
            "games in progress: add --disable_checkpoint, or use MonoBeast"
        )
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 finished, 1 failed, 128 + n ended by signal n."""
    parser = make_parser()
    with script.reported() as outcome:
        typed = flagset.read(parser, argv)
        if flagset.merge(typed).mode == "train":
            with resume.begin(typed, resolve_layout) as start:
                outcome.status = 0 if start.is_finished() else train(start)
        else:
            evaluate(typed, play_on_servers)
    return outcome.status


if __name__ == "__main__":
    processes.run_script(main)
