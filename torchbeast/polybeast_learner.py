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

import argparse
import contextlib
import copy
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

import libtorchbeast
from torchbeast import atari_wrappers, monobeast, polybeast_env
from torchbeast.core import checkpoint, rollout
from torchbeast.core import flags as flags_lib
from torchbeast.core.file_writer import FileWriter
from torchbeast.core.flags import FlagError, Flags
from torchbeast.core.prof import Timings, format_shares
from torchbeast.core.rollout import Nested, map_nested
from torchbeast.core.status import Board, Status, format_return
from torchbeast.model import Net

log = logging.getLogger("torchbeast.polybeast_learner")

PROBE_SECONDS = 10.0  # granted to a server that is there to introduce itself


# --- Environments, as their servers describe them -------------------------------------


class EnvDescription(NamedTuple):
    """What the learner needs to know of the environments."""

    observation_space: spaces.Space
    action_space: spaces.Space
    frames_per_step: int
    num_envs: int  # of one stream


def make_space(description: dict[str, Any]) -> spaces.Space:
    """The Gymnasium space that a server has described."""
    kind = description["type"]
    if kind == "Box":
        shape, dtype = description["shape"], np.dtype(description["dtype"])
        low, high = (
            np.broadcast_to(np.asarray(description[end], dtype), shape)
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


def find_environments(
    flags: Flags, addresses: Sequence[str], keep_going: Callable[[], None]
) -> EnvDescription:
    """Waits for the first server and asks it what it serves.

    Args:
      keep_going: is called again and again; may raise to end the wait.

    Raises:
      TransportError: it does not answer within --connect_timeout seconds.
      FlagError: it serves another environment than --env.
    """
    deadline = time.monotonic() + flags.connect_timeout
    said = False
    while True:
        keep_going()
        try:
            found = libtorchbeast.probe(
                addresses[0], timeout_s=PROBE_SECONDS, **security(flags)
            )
            break
        except libtorchbeast.RefusedError:
            raise
        except libtorchbeast.TransportError:
            if time.monotonic() > deadline:
                raise
        if not said:
            log.info("Waiting for an environment server at %s.", addresses[0])
            said = True
        time.sleep(0.2)
    if found["name"] and found["name"] != flags.env:
        raise FlagError(
            f"--env is {flags.env}, but {addresses[0]} serves {found['name']}"
        )
    if found["action_space"] is None:
        raise FlagError(f"the server at {addresses[0]} does not tell its action space")
    is_atari = atari_wrappers.atari_game(flags.env) is not None
    return EnvDescription(
        make_space(found["observation_space"]),
        make_space(found["action_space"]),
        flags.frame_skip if is_atari else 1,
        found["num_envs"],
    )


def to_row(env_outputs: tuple) -> dict[str, Nested]:
    """What the pool hands out, by the names that rows have (core/rollout.py)."""
    observation, reward, done, episode_step, episode_return, extra = env_outputs
    return {
        "observation": observation,
        "reward": reward,
        "done": done,
        "episode_step": episode_step,
        "episode_return": episode_return,
        **extra,
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


@torch.inference_mode()
def infer(
    batcher: Any,
    models: ActingModels,
    fields: dict[str, Nested],
    device: torch.device,
    generator: torch.Generator,
    timings: Timings,
) -> None:
    """Answers batches [1, n, ...] until the batcher is closed."""

    def to_device(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, non_blocking=True)

    timings.reset()
    for batch in batcher:
        timings.time("wait")
        env_outputs, state = map_nested(to_device, batch.get_inputs())
        bank, version = models.lend()
        net = models.nets[bank]
        outputs, state = net(to_row(env_outputs), state)
        outputs["action"] = net.distribution.sample(outputs["policy_logits"], generator)
        n = len(batch)
        outputs["truncation_value"] = torch.zeros(1, n)  # the pool fills it in
        outputs["policy_version"] = torch.full((1, n), version)
        agent_row = {name: x for name, x in outputs.items() if name in fields}
        batch.set_outputs(map_nested(torch.Tensor.cpu, (agent_row, tuple(state))))
        models.take_back(bank)
        timings.time("infer")


# --- Training -------------------------------------------------------------------------


def train(flags: Flags, keep_going: Callable[[], None] = lambda: None) -> int:
    """Trains until flags.total_steps, or until SIGINT or SIGTERM.

    Args:
      keep_going: is called at least once a second; ends the run by raising.

    Returns:
      The exit status: 0 finished, 1 failed (the log says why), 128 + n for signal n.

    Raises:
      What keeps the run from starting, before anything is written to its folder.
    """
    checkpoint_path = Path(flags.savedir, flags.xpid, "model.tar")
    saved = None
    if checkpoint_path.exists() and not flags.disable_checkpoint:
        saved = monobeast.load_checkpoint(checkpoint_path, flags)
    addresses = server_addresses(flags)
    env = find_environments(flags, addresses, keep_going)
    if flags.batch_size % env.num_envs and env.num_envs % flags.batch_size:
        raise FlagError(
            f"--batch_size {flags.batch_size}: the {env.num_envs} environments of a "
            "stream are learned from together, so it must be a multiple of them"
        )
    batch_size = max(flags.batch_size, env.num_envs)
    learner = monobeast.Learner(flags, env)
    if saved:
        learner.load_state_dict(saved)
    device = actor_device(flags)
    models = ActingModels(learner.model, device)
    models.publish(learner.model, learner.version)
    fields = rollout.row_spec(env.observation_space, learner.model.distribution)
    if learner.device.type == "cpu":
        torch.set_num_threads(flags.torch_threads)
        monobeast.keep_freed_memory()

    num_actors = flags.num_actors
    queue = libtorchbeast.BatchingQueue(
        minimum_batch_size=batch_size,
        maximum_batch_size=batch_size,
        maximum_queue_size=flags.max_learner_queue_size,
    )
    batcher = libtorchbeast.DynamicBatcher(maximum_batch_size=num_actors * env.num_envs)
    pool = libtorchbeast.ActorPool(
        flags.unroll_length,
        queue,
        batcher,
        [addresses[i % len(addresses)] for i in range(num_actors)],
        tuple(learner.model.initial_state(1)),
        step_timeout_s=flags.actor_timeout,
        maximum_downtime_s=flags.connect_timeout,
        **security(flags),
    )
    learn_lock = threading.Lock()
    errors: list[BaseException] = []
    learner_timings = Timings()  # guarded by learn_lock
    inference_timings = [Timings() for _ in range(flags.num_inference_threads)]
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_reader, False)
    os.set_blocking(wake_writer, False)

    def wake() -> None:
        with contextlib.suppress(BlockingIOError):  # full: already awake
            os.write(wake_writer, b"w")

    def reporting(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)
            finally:
                wake()

        return run

    def learn_from_queue() -> None:
        for (env_outputs, agent_outputs), initial_state in queue:
            rows = map_nested(to_learner, to_row(env_outputs) | agent_outputs)
            state = map_nested(to_learner, initial_state)
            with learn_lock:
                if learner.step >= flags.total_steps:
                    break
                learner_timings.time("wait")
                started = time.monotonic()
                row = monobeast.learn(flags, learner, rows, state)
                seconds = time.monotonic() - started
                learner.longest_update = max(learner.longest_update, seconds)
                models.publish(learner.model, learner.version)
                lost = pool.stats()
                row["reconnects"] = lost["num_reconnects"]
                row["dropped_steps"] = lost["num_dropped_steps"]
                writer.log(row)
                if board:
                    board.log(row)
                learner_timings.time("learn")
            wake()

    def to_learner(x: torch.Tensor) -> torch.Tensor:
        return x.to(learner.device, non_blocking=True)

    def inference(index: int) -> Callable[[], None]:
        generator = torch.Generator(device).manual_seed(
            monobeast.derive_seed(flags.seed, index, learner.step)
        )
        return lambda: infer(
            batcher, models, fields, device, generator, inference_timings[index]
        )

    stop_signal, stopped_at = 0, 0.0
    saved_version = learner.version

    def on_signal(number: int, frame: Any) -> None:
        nonlocal stop_signal, stopped_at
        now = time.monotonic()
        if stop_signal and now - stopped_at < monobeast.SAME_SIGNAL_SECONDS:
            return
        if stop_signal:
            raise KeyboardInterrupt(number)  # the second time: don't wait, don't save
        stop_signal, stopped_at = number, now
        log.warning("%s: ending the run.", signal.Signals(number).name)

    def save() -> bool:
        """Saves a checkpoint; False if the run is to end in the middle of an update."""
        nonlocal saved_version
        if flags.disable_checkpoint or learner.version == saved_version:
            return True
        while not learn_lock.acquire(timeout=1.0):
            if stop_signal:
                return False
        try:
            state = learner.state_dict() | {"flags": flags.as_dict()}
            checkpoint.save(checkpoint_path, state)
            saved_version = learner.version
        finally:
            learn_lock.release()
        log.info("Saved %s at step %d.", checkpoint_path, state["stats"]["step"])
        return True

    def end_threads() -> bool:
        """Has all threads end; False if one is still busy."""
        pool.close()
        for closable in (batcher, queue):
            if not closable.is_closed():
                closable.close()
        deadline = time.monotonic() + max(
            monobeast.SHUTDOWN_SECONDS, 2 * learner.longest_update
        )
        for thread in threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    writer = FileWriter(
        flags.savedir, flags.xpid, flags.as_dict(), learner.step if saved else None
    )
    stop_signals = monobeast.STOP_SIGNALS
    old_handlers = {number: signal.signal(number, on_signal) for number in stop_signals}
    old_wakeup = signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    work = [("pool", pool.run)]
    work += [
        (f"inference-{i}", inference(i)) for i in range(flags.num_inference_threads)
    ]
    work += [
        (f"learner-{i}", learn_from_queue) for i in range(flags.num_learner_threads)
    ]
    threads = [
        threading.Thread(target=reporting(f), name=name, daemon=True)
        for name, f in work
    ]
    board = None
    status_line = Status(learner.step, flags.total_steps)
    status = 1
    worth_saving = False
    try:
        try:
            log.info("Run %s; files in %s", flags.xpid, writer.path)
            log.info(
                "%d streams of %d environments; inference on %s, learning on %s",
                *(num_actors, env.num_envs, device, learner.device),
            )
            if saved:
                log.info("Resuming at step %d.", learner.step)
            if flags.tensorboard:
                board = Board(writer.path, learner.step)
            learner_timings.reset()
            for thread in threads:
                thread.start()
            worth_saving = True
            last_save = time.monotonic()
            while not stop_signal and learner.step < flags.total_steps:
                monobeast.connection.wait([wake_reader], 1.0)
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_reader, 4096)
                if errors:
                    raise errors[0]
                keep_going()
                if time.monotonic() - last_save > flags.checkpoint_interval and save():
                    last_save = time.monotonic()
                status_line.show(
                    learner.step,
                    learner.sps(),
                    learner.mean_return(),
                    learner.games,
                    learner.policy_lag,
                    queued=queue.size() * env.num_envs,
                )
            status = 0 if learner.step >= flags.total_steps else 128 + stop_signal
        except BaseException as error:
            status = report(error)
            unwanted = isinstance(error, checkpoint.CheckpointError | KeyboardInterrupt)
            worth_saving = worth_saving and not unwanted
        try:
            ended = end_threads()
            if errors and status != 1:
                status = report(errors[0])
            if not ended:
                log.error("A thread is still busy: its state is not saved.")
                status = 1
            elif worth_saving:
                save()
        except BaseException as error:
            status = report(error)
    finally:
        for number in stop_signals:
            signal.signal(number, signal.SIG_IGN)
        status_line.close()
        log.info(
            "%s", who_waited(learner_timings, inference_timings, pool, batcher, queue)
        )
        if board:
            board.close()
        log.info(
            "%s at step %d, %.0f SPS, %d games, mean return of the last %d: %s",
            "Failed" if status == 1 else "Stopped" if status else "Finished",
            learner.step,
            learner.sps() or 0,
            learner.games,
            len(learner.game_returns),
            format_return(learner.mean_return()),
        )
        writer.close(status == 0)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_wakeup)
        if not any(thread.is_alive() for thread in threads):
            os.close(wake_reader)
            os.close(wake_writer)
    return status


def who_waited(
    learner: Timings, inference: list[Timings], pool: Any, batcher: Any, queue: Any
) -> str:
    """Where the time went: learner, inference, streams."""
    seconds: dict[str, float] = {}
    for timings in inference:
        for name, s in timings.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + s
    total = sum(seconds.values()) or 1.0
    stats, batches = pool.stats(), batcher.stats()
    waits = {
        "environments": stats["env_wait_seconds"],
        "inference": stats["inference_wait_seconds"],
        "learner": stats["queue_wait_seconds"],
    }
    all_waits = sum(waits.values()) or 1.0
    return (
        f"Learner: {format_shares(learner.shares())}. "
        f"Inference: {format_shares({k: s / total for k, s in seconds.items()})}, "
        f"mean batch {batches['num_entries'] / max(1, batches['num_batches']):.1f}. "
        "Streams wait for: "
        f"{format_shares({k: s / all_waits for k, s in waits.items()})}. "
        f"Reconnects {stats['num_reconnects']}, dropped steps "
        f"{stats['num_dropped_steps']}."
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
    addresses = given.replace(",", " ").split()
    if not addresses:
        raise FlagError("--server_addresses names no address")
    return addresses


def security(flags: argparse.Namespace) -> dict[str, Any]:
    """Arguments of libtorchbeast that the connection flags stand for."""
    return {
        **polybeast_env.security(flags),
        "tls_server_name": flags.tls_server_name,
    }


def actor_device(flags: Flags) -> torch.device:
    if flags.actor_device:
        return torch.device(flags.actor_device)
    return flags_lib.learner_device(flags)


def add_learner_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(num_actors=None)
    add = parser.add_argument_group("PolyBeast").add_argument
    add(
        "--server_addresses",
        help="host:port,... of the servers, or @FILE with one a line",
    )
    add("--tls_server_name", help="the name in the servers' certificates")
    add("--connect_timeout", type=float, default=60.0, help="seconds without a server")
    add(
        "--actor_timeout",
        type=float,
        default=120.0,
        help="seconds that a step may take",
    )
    add("--num_inference_threads", type=int, default=1)
    add("--num_learner_threads", "--num_threads", type=int, default=1)
    add("--max_learner_queue_size", type=int, help="rollouts of streams that may wait")
    add("--torch_threads", type=int, help="CPU threads of one operation")
    add("--actor_device", help="of inference, such as cuda:1 (default: the learner's)")


def make_parser() -> argparse.ArgumentParser:
    parser = flags_lib.make_parser("PolyBeast's learner.")
    add_learner_flags(parser)
    polybeast_env.add_connection_flags(parser)
    return parser


def resolve_layout(flags: Flags) -> Flags:
    """Fills in what follows from other flags, and checks the rest.

    Raises:
      FlagError: a value can't work.
    """
    if flags.num_actors is None:
        flags.num_actors = len(server_addresses(flags))
    if flags.torch_threads is None:
        flags.torch_threads = max(1, monobeast.num_cpus() // 2)
    if flags.max_learner_queue_size is None:
        flags.max_learner_queue_size = max(1, flags.batch_size)
    for name in ("connect_timeout", "actor_timeout"):
        if not getattr(flags, name) > 0:
            raise FlagError(f"--{name} must be above 0, got {getattr(flags, name)}")
    for name in (
        *("num_servers", "envs_per_actor", "num_inference_threads"),
        *("num_learner_threads", "max_learner_queue_size", "torch_threads"),
    ):
        if getattr(flags, name) < 1:
            raise FlagError(f"--{name} must be at least 1, got {getattr(flags, name)}")
    if flags.sync:
        raise FlagError("--sync is MonoBeast's so far")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 finished, 1 failed, 128 + n ended by signal n."""
    return run(argv, make_parser(), resolve_layout, train)


def run(
    argv: Sequence[str] | None,
    parser: argparse.ArgumentParser,
    resolve_layout: Callable[[Flags], Flags],
    train: Callable[[Flags], int],
) -> int:
    """What the flags ask for: trains with `train`, or tests as MonoBeast does."""
    return monobeast.run(argv, parser, resolve_layout, train, report)


# What a person can put right: the message says it all, a traceback would only hide it.
EXPECTED_ERRORS = (libtorchbeast.TransportError, polybeast_env.ServerError)


def report(error: BaseException) -> int:
    """Says in the log what ended the run; returns the exit status for it."""
    if isinstance(error, EXPECTED_ERRORS):
        log.error("%s: %s", type(error).__name__, error)
        return 1
    return monobeast.report(error)


if __name__ == "__main__":
    sys.exit(main())
