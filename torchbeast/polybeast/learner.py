"""PolyBeast's learner: connections to environment servers, and learning.

    environment servers          this process
      E environments per stream <-> actor pool (C++)
                                    -> DynamicBatcher -> inference threads: one forward
                                       for all waiting streams, on --actor_device
                                    -> BatchingQueue, rollouts [T + 1, B, ...]
                                    -> learner threads: the update, on --learner_device,
                                       and the new weights for inference

Read it top to bottom: infer, start_acting, connect, learn_from, at_once, in_rounds,
train, flags, main. The update, checkpoints, logs and evaluation are MonoBeast's.
"""

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

import torch

from torchbeast import flags as declared_flags
from torchbeast.base import devices, parts, ranks
from torchbeast.base.errors import CheckpointError, FileError, FlagError, UserError
from torchbeast.base.flag import FlagParser
from torchbeast.base.hardware import keep_freed_memory
from torchbeast.base.named import find_named
from torchbeast.base.nested import Nested, map_nested
from torchbeast.base.seeds import derive_seed
from torchbeast.core.acting import act_step
from torchbeast.core.timings import Timings
from torchbeast.flags import Flags
from torchbeast.learner import Learner, Update, learn
from torchbeast.model import CHOICES
from torchbeast.polybeast.acting import ActingModels, fits, on_own_stream, pad
from torchbeast.polybeast.env_connection import choose_side, server_addresses
from torchbeast.polybeast.flags import Connection, PolyBeast
from torchbeast.polybeast.remote_envs import RemoteEnvs
from torchbeast.polybeast.streams import StreamGroup, Streams, as_stored
from torchbeast.runs.run import Run
from torchbeast.runs.start import Start, run_script

log = logging.getLogger("torchbeast.polybeast_learner")

LISTENING_STREAMS = 4  # default of --num_actors with --listen


def infer(
    group: StreamGroup, streams: Streams, models: ActingModels, random: torch.Generator
) -> None:
    """An inference thread: answers batches [1, n, ...] until the batcher is closed."""
    device, flags = random.device, streams.run.flags
    if sys.platform == "linux":  # per thread: the learner thread has priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + 5)
    timings = Timings()
    streams.inference_timings.append(timings)
    row_number, num_turns = 0, 0
    for batch in group.batcher:
        timings.time("wait")
        inputs = batch.get_inputs()
        if device.type != "cpu":
            inputs = map_nested(lambda x: x.to(device, non_blocking=True), inputs)
        row, state = as_stored(inputs[0], streams.env_fields), inputs[1]
        count = row["done"].shape[1]
        if flags.compile and not flags.sync:  # code for few sizes
            row, state = pad((row, state), 1 << (count - 1).bit_length())
        # As in MonoBeast, the agent acts on an unroll's last row before learning.
        if flags.sync and row_number > (num_turns + 1) * flags.unroll_length:
            timings.time("infer")
            group.turns.acquire()
            num_turns += 1
            timings.time("wait")
        bank, policy_version = models.acquire()
        net = models.nets[bank]
        choose: Any = functools.partial(net.distribution.sample, generator=random)
        # The pool also asks for the value of a truncated episode's last observation. It
        # ignores the action, so with --sync don't use a random number for it.
        if flags.sync and bool((row["truncated"] & ~row["done"]).any()):
            choose = net.distribution.mode
        else:
            row_number += 1
        outputs, state = act_step(net, row, state, choose, policy_version)
        answers = map_nested(
            lambda x, count=count: x[:, :count].cpu(), (outputs, tuple(state))
        )
        batch.set_outputs(answers)
        models.release(bank)
        timings.time("infer")


def start_acting(run: Run, envs: RemoteEnvs) -> tuple[Streams, ActingModels]:
    """Starts the pools and the inference threads."""
    flags, learner = run.flags, run.learner
    device = devices.actor_device(flags)
    models = ActingModels(learner.model, device, flags.compile)
    models.publish(learner.model.state_dict(), learner.num_updates)
    streams = Streams(run, envs, device)
    groups = streams.groups
    run.on_stop(streams.close)
    for i, group in enumerate(groups):
        run.start_thread(f"pool-{i}", group.pool.run)
    for i in range(len(groups) if flags.sync else flags.num_inference_threads):
        generator = torch.Generator(device)
        number = ranks.rank() * flags.num_actors + i
        generator.manual_seed(derive_seed(envs.seed, number))
        group = groups[i % len(groups)]
        work = functools.partial(infer, group, streams, models, generator)
        run.start_thread(f"inference-{i}", on_own_stream(device, work))
    return streams, models


def connect(
    start: Start, envs: RemoteEnvs, check_servers: Callable[[], Any]
) -> tuple[Run, Streams, ActingModels]:
    """Finds the spaces of the environments, makes the model and starts to act."""
    flags, checks = start.flags, []
    if start.saved:
        checks.append(fits(flags, start.saved["model_state_dict"]))
    with contextlib.ExitStack() as undo:
        undo.callback(envs.close)
        # Otherwise each environment that joins is refused for these names.
        for name in ("encoder", "core", "explorer", "loss"):
            if ":" in (text := getattr(flags, name, None) or ""):
                find_named(f"--{name}", text)
        while True:
            spec = envs.find_env_spec(check_servers, *checks)
            with contextlib.ExitStack() as undo_run:
                try:
                    run = Run(start, Learner(flags, spec))
                    undo_run.callback(run.abandon)
                    streams, models = start_acting(run, envs)
                except (FileError, CheckpointError):  # not due to the environments
                    raise
                except UserError as error:  # batches are too large
                    envs.refuse(spec.hello, error)
                    continue
                # Environments that join determine the spaces, with their first batch.
                waits = (check_servers, run.stop_requested)
                if not envs.listener or envs.settle(streams.groups[0], spec, waits):
                    undo_run.pop_all()
                    undo.pop_all()
                    return run, streams, models


def learn_from(run: Run, streams: Streams, rollouts: Nested) -> bool:
    """Learns from rollouts [T + 1, k * B, ...]; False if no more updates are wanted."""
    learner, B = run.learner, run.flags.batch_size
    rows, initial_state = rollouts
    rows = as_stored(rows, streams.env_fields)
    for first in range(0, rows["done"].shape[1], B):
        part = slice(first, first + B)
        own = map_nested(lambda x, part=part: x[:, part], (rows, initial_state))
        with devices.copying(learner.device):
            batch, state = map_nested(
                lambda x: devices.move(x.contiguous(), learner.device), own
            )
        with run.updating() as wanted:
            if not wanted:
                return False
            run.add(learn(learner, batch, state))
    run.wake()
    return True


def at_once(run: Run, streams: Streams) -> None:
    """A learner thread: learns from each batch in the queue, while all streams act."""
    (group,) = streams.groups
    for rollouts in group.queue:
        if not learn_from(run, streams, rollouts):
            break
        if group.queue.size() < group.items_per_batch:  # nothing waits
            run.finish_updates()
    run.finish_updates()


def in_rounds(run: Run, streams: Streams) -> None:
    """The learner thread with --sync: a round has one item of each stream."""
    while run.learner.step < run.flags.total_steps and not run.all_stop:
        try:
            items = [next(group.queue) for group in streams.groups]
        except StopIteration:
            break
        rollouts = map_nested(lambda *x: torch.cat(x, dim=1), *items)
        learn_from(run, streams, rollouts)
        run.finish_updates()  # before the streams go on
        for group in streams.groups:
            group.turns.release()


def train(
    start: Start, check_servers: Callable[[], Any] = lambda: None, **places: str | None
) -> int:
    """Trains until flags.total_steps or a stop signal. Returns the exit status.

    Args:
      check_servers: see RemoteEnvs.find_env_spec; also called once per second.
      places: listen or server_addresses of this start; not saved.
    """
    flags = start.flags
    # Before any other thread starts, so that threads share one memory arena.
    keep_freed_memory(devices.learner_device(flags))
    envs = RemoteEnvs(flags.replace(**places), start.env_seed())
    run, streams, models = connect(start, envs, check_servers)

    def finish(update: Update) -> None:
        """Called when the update is made; with a GPU, that is later."""
        columns = update.finish()
        models.publish(update.weights, update.policy_version)
        run.log(columns, streams.columns())

    run.on_update = finish
    with run:
        used = devices.actor_device(flags), run.learner.device
        numbers = flags.num_actors, run.learner.env_spec.num_envs
        text = "%d streams of %d environments; inference on %s, learning on %s"
        log.info(text, *numbers, *used)
        run.stack.callback(streams.end)
        loop = in_rounds if flags.sync else at_once
        for i in range(1 if flags.sync else flags.num_learner_threads):
            work = functools.partial(loop, run, streams)
            run.start_thread(f"learner-{i}", work)
        while run.going():
            if run.save_is_due():
                run.save()
            connection.wait([run.wake_reader], 1.0)
            if not run.stop_requested():  # servers may have got the signal, too
                check_servers()
            streams.report()
    return run.exit_status


def make_parser() -> FlagParser:
    # It starts no environments, so it has no launcher.
    others = [x for x in parts.groups() if "launcher" not in x.declared()]
    groups = *declared_flags.TRAINING, PolyBeast, Connection, *others
    of_servers = {"num_actors": None, "envs_per_actor": None}
    return FlagParser("PolyBeast's learner.", groups, CHOICES, **of_servers)


def resolve_layout(flags: Flags, learners: int = 1) -> Flags:
    """Fills in the flags that depend on others; `learners` share the servers."""
    choose_side(flags)
    if flags.listen and ranks.size() > 1:
        raise FlagError("--listen has one learner: start it without torchrun")
    servers = [] if flags.listen else server_addresses(flags)
    if flags.num_actors is None:
        streams = len(servers) // learners
        flags.num_actors = LISTENING_STREAMS if flags.listen else streams
    if flags.max_learner_queue_size is None:
        flags.max_learner_queue_size = flags.batch_size
    devices.actor_device(flags)  # raises if it does not exist
    number = flags.num_actors * learners
    if flags.sync and len(set(servers)) != number:
        text = f"--sync needs one server per actor: --num_servers {number}, no --listen"
        raise FlagError(text)
    if flags.sync and not flags.disable_checkpoint:
        raise FlagError("PolyBeast can't resume --sync: add --disable_checkpoint")
    return flags


def own_servers(flags: Flags) -> str | None:
    """--server_addresses of this learner: its part of all, see extras/ranks."""
    if ranks.size() == 1:
        return flags.server_addresses
    addresses = server_addresses(flags)
    number, left = divmod(len(addresses), ranks.size())
    if left or not number:
        number = len(addresses)
        raise FlagError(f"{ranks.size()} learners can't share {number} servers equally")
    return ",".join(addresses[ranks.rank() * number :][:number])


def find_player(flags: Flags) -> Any:
    """What tests on servers, if the command line has --server_addresses or --listen."""
    if not flags.typed & {"server_addresses", "listen"}:
        return None
    choose_side(flags)
    from torchbeast.polybeast.evaluate import play_on_servers  # loads extras/play

    return play_on_servers


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 finished, 1 failed, 128 + n ended by signal n."""
    return run_script(
        make_parser(),
        argv,
        lambda flags: resolve_layout(flags, ranks.size()),
        lambda start: train(start, server_addresses=own_servers(start.flags)),
        find_player,
    )
