"""MonoBeast: IMPALA on one machine, in one script.

    actor processes                          learner process (this one)
    step E environments, one batched    ->   main thread hands free slots to actors and
    forward on the CPU, write rows 0..T      finished ones to the learner threads;
    of E slots of shared memory              they gather a batch, free its slots, learn,
    load the newest weights             <-   and publish the weights

Read it top to bottom: act, Weights, Actors, get_batch, Learner, learn, Run, test.
What is pure (V-trace, the loss, rollout fields, distributions) lies in torchbeast/core,
the model in torchbeast/model.py.

    python -m torchbeast.monobeast --env PongNoFrameskip-v4
    python -m torchbeast.monobeast --mode test --xpid NAME
"""

if __name__ == "__main__":
    from torchbeast.core import processes

    processes.exit_on_stop_signals()  # the imports below take seconds

import argparse
import collections
import contextlib
import ctypes
import faulthandler
import logging
import os
import pickle
import queue
import signal
import statistics
import sys
import threading
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.multiprocessing as mp
from gymnasium import spaces
from tqdm.contrib.logging import logging_redirect_tqdm

from torchbeast.core import checkpoint, processes, resume, rollout
from torchbeast.core import flags as flags_lib
from torchbeast.core.env_checks import InvalidEnvironmentError
from torchbeast.core.env_spec import find_env_spec
from torchbeast.core.environment import (
    Environment,
    MissingPackageError,
    UnknownEnvironmentError,
    UnsupportedSpaceError,
)
from torchbeast.core.errors import UserError
from torchbeast.core.file_writer import FileWriter, RunFolder, join_columns
from torchbeast.core.finite import all_finite, find_cause
from torchbeast.core.flags import FlagError, Flags
from torchbeast.core.losses import impala_loss
from torchbeast.core.optim import make_optimizer
from torchbeast.core.prof import Profile, Timings, format_shares
from torchbeast.core.rollout import Nested, map_nested
from torchbeast.core.status import Board, Status, format_return
from torchbeast.core.streams import open_missing_streams
from torchbeast.core.video import Video, has_display
from torchbeast.model import Net, State

log = logging.getLogger("torchbeast.monobeast")

SHUTDOWN_SECONDS = 5.0  # granted to actors and learner threads to end by themselves
TEST_STREAM = 2**31  # apart from every actor's number, so that test games are new ones
THREADS = ("learner-", "inference-", "pool-")  # what the names of a run's begin with


# --- Actors ---------------------------------------------------------------------------


def act(
    flags: Flags,
    index: int,
    pipe: connection.Connection,
    buffers: dict[str, Nested],
    weights_memory: torch.Tensor,
    progress: torch.Tensor,
    saved: bytes | None,
) -> None:
    """The actor process: does what the learner says, until the learner is gone."""
    processes.begin_child()
    faulthandler.register(signal.SIGUSR1)  # prints the stack of a stuck actor
    torch.set_num_threads(1)
    os.nice(5)  # where cores are short, the learner comes first
    try:
        env = Environment(flags, flags.envs_per_actor, index * flags.envs_per_actor)
        with contextlib.closing(env):
            env.on_warning = lambda *warning: pipe.send(("warning", *warning))
            run_actor(flags, index, env, pipe, buffers, weights_memory, progress, saved)
    except InvalidEnvironmentError as error:
        with contextlib.suppress(OSError):
            pipe.send(("error", str(error)))
    except BaseException:
        # Nobody hears it where the learner is gone or has closed the pipe, which is how
        # it ends this process.
        with contextlib.suppress(OSError):
            pipe.send(("error", traceback.format_exc()))


@torch.inference_mode()
def run_actor(
    flags: Flags,
    index: int,
    env: Environment,
    pipe: connection.Connection,
    buffers: dict[str, Nested],
    weights_memory: torch.Tensor,
    progress: torch.Tensor,
    saved: bytes | None,
) -> None:
    """Fills slots: E environments make E rollouts of rows 0..T at a time."""
    E, T = env.num_envs, flags.unroll_length
    model = make_model(flags, env, torch.device("cpu"))
    weights = SharedWeights(
        model, weights_memory
    )  # as the learner's model lays them out
    prepare_to_act(model)
    distribution = model.distribution
    generator = torch.Generator().manual_seed(derive_seed(flags.seed, index))
    version = 0
    timings = Timings()

    def agent_step(env_row: dict[str, Nested], state: State) -> tuple[dict, State]:
        """Joins what the environment said with what the agent then does."""
        inputs = map_nested(to_tensor, env_row)
        truncation_value = torch.zeros(1, E)
        if env_row["truncated"].any():
            final = map_nested(to_tensor, env.final_observation)
            not_done = torch.zeros(1, E, dtype=torch.bool)
            over = {**inputs, "observation": final, "done": not_done}
            over = rollout.show_final_fields(over)
            truncation_value = model(over, state)[0]["baseline"] * inputs["truncated"]
        outputs, state = model(inputs, state)
        outputs["action"] = distribution.sample(outputs["policy_logits"], generator)
        outputs["truncation_value"] = truncation_value
        outputs["policy_version"] = torch.full((1, E), version)
        agent_row = {name: x for name, x in outputs.items() if name in rows}
        return env_row | map_nested(lambda x: x.squeeze(0).numpy(), agent_row), state

    def write(t: int, row: dict[str, Nested]) -> None:
        def copy(buffer: np.ndarray, x: np.ndarray) -> None:
            buffer[slots, t] = x

        map_nested(copy, rows, row)

    # NumPy writes to several slots at once many times faster than torch.
    rows = map_nested(torch.Tensor.numpy, buffers["rows"])
    row: dict[str, Nested] | None = None  # the newest row [E, ...], and the recurrent
    state_before: State = ()  # state before and after it
    state: State = ()
    if saved is not None:
        old = pickle.loads(saved)
        env.load_state_dict(old["env"])
        generator.set_state(old["generator"])
        row, version = map_nested(torch.Tensor.numpy, old["row"]), old["version"]
        state_before, state = old["state_before"], old["state"]

    while True:
        timings.reset()
        command, *arguments = pipe.recv()
        timings.time("wait")
        if command == "save":
            current = {
                "env": env.state_dict(),
                "generator": generator.get_state(),
                "row": map_nested(torch.from_numpy, row),
                "version": version,
                "state_before": state_before,
                "state": state,
            }
            # As bytes: tensors would go through shared memory, which may be full.
            pipe.send(("saved", pickle.dumps(current)))
            continue
        slots, bank, version = arguments
        weights.read(bank, model)
        pipe.send(("loaded", bank))
        if row is None:
            state_before = model.initial_state(E)
            row, state = agent_step(env.initial(), state_before)
            timings.reset()  # the first calls are slow

        write(0, row)
        for buffer, x in zip(buffers["initial_state"], state_before, strict=True):
            buffer[slots] = x.movedim(1, 0)  # [layers, E, ...] -> [E, layers, ...]
        timings.time("write")
        for t in range(1, T + 1):
            env_row = env.step(row["action"])
            timings.time("env")
            state_before = state
            row, state = agent_step(env_row, state)
            timings.time("act")
            write(t, row)
            timings.time("write")
            progress[index] += 1
        pipe.send(("done", arguments[0], timings.shares()))


class HasSpaces(Protocol):
    """An Environment, or what is known of one elsewhere."""

    @property
    def observation_space(self) -> spaces.Space: ...
    @property
    def action_space(self) -> spaces.Space: ...
    @property
    def frames_per_step(self) -> int: ...


def make_model(flags: Flags, env: HasSpaces, device: torch.device) -> Net:
    """The model that the flags ask for."""
    model = Net(
        env.observation_space,
        env.action_space,
        torso=flags.model,
        use_lstm=flags.use_lstm,
        bf16=flags.precision == "bf16",
    )
    return model.to(device)


def prepare_to_act(model: Net) -> None:
    """Sets the model up to act on the CPU: no dropout, encoders cast once for all."""
    model.eval()
    bf16 = model.bf16 and flags_lib.fast_bf16(torch.device("cpu"))
    model.encoders_to(torch.bfloat16 if bf16 else torch.float32)


def to_tensor(x: np.ndarray) -> torch.Tensor:
    """[E, ...] of one step -> [1, E, ...], sharing memory."""
    return torch.from_numpy(x).unsqueeze(0)


def keep_freed_memory() -> None:
    """Has glibc keep big blocks that are freed, for the next update to use again.

    By default it gives them back to the kernel, which then has to clear and map every
    page anew: a tenth of the learner's CPU time.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: map bigger blocks only
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: give back nothing
            libc.mallopt(-8, 1)  # M_ARENA_MAX: threads use the same memory


def derive_seed(*entropy: int) -> int:
    """One seed from several numbers; different numbers give independent streams."""
    # With their count, because NumPy takes (1,) and (1, 0) for the same.
    sequence = np.random.SeedSequence((len(entropy), *entropy))
    return int(sequence.generate_state(1)[0])


class Weights:
    """The learner's newest weights, in banks that others read while it goes on.

    The learner writes into a bank that is neither the newest nor being read, and then
    makes it the newest; whoever reads borrows the newest bank and gives it back. So
    nobody ever reads half-written weights.

    Args:
      banks: NUM_BANKS state dicts of a model.
    """

    NUM_BANKS = 3

    def __init__(self, banks: list[dict[str, torch.Tensor]]) -> None:
        self.banks = banks
        self._newest = (0, 0)  # bank and version
        self._readers: collections.Counter[int] = collections.Counter()
        self._lock = threading.Lock()  # of this process's threads

    def publish(self, model: torch.nn.Module, version: int) -> bool:
        """Makes the model's weights the newest; False if every bank is being read."""
        with self._lock:
            for bank in range(self.NUM_BANKS):
                if bank != self._newest[0] and not self._readers[bank]:
                    for name, x in model.state_dict().items():
                        self.banks[bank][name].copy_(x)
                    self._newest = bank, version
                    return True
        return False

    def lend(self) -> tuple[int, int]:
        """Bank and version of the newest weights; the bank is kept until returned."""
        with self._lock:
            bank, version = self._newest
            self._readers[bank] += 1
            return bank, version

    def take_back(self, bank: int) -> None:
        with self._lock:
            self._readers[bank] -= 1


class SharedWeights(Weights):
    """Weights in shared memory, which actor processes read.

    The learner names a bank in its commands to actors; an actor says when it has read
    it. So no lock is shared between processes.
    """

    def __init__(
        self, model: torch.nn.Module, memory: torch.Tensor | None = None
    ) -> None:
        offset, places = 0, {}
        for name, x in model.state_dict().items():
            places[name] = (offset, x.shape, x.dtype)
            offset += -(-x.nbytes // 64) * 64  # aligned for every dtype
        if memory is None:
            spec = rollout.Spec((max(offset, 1),), torch.uint8)
            memory = rollout.create_buffers(
                spec,
                (self.NUM_BANKS,),
                what=f"{self.NUM_BANKS} copies of the model's weights",
                lower="take a smaller --model",
            )
        self.memory = memory  # [banks, bytes] uint8, shared
        super().__init__(
            [
                {
                    name: bank[at : at + shape.numel() * dtype.itemsize]
                    .view(dtype)
                    .view(shape)
                    for name, (at, shape, dtype) in places.items()
                }
                for bank in memory
            ]
        )

    def read(self, bank: int, model: torch.nn.Module) -> None:
        """Loads a bank into an actor's model, in the precision that this has."""
        model.load_state_dict(self.banks[bank])


class ActorError(processes.ProcessError):
    """An actor process died, raised or got stuck."""


def actor_context() -> Any:
    """How processes that run environments are started.

    Never by a fork of a process that has threads: the copy can inherit a locked lock.
    """
    methods = mp.get_all_start_methods()
    context: Any = mp.get_context("forkserver" if "forkserver" in methods else "spawn")
    context.set_forkserver_preload(["torchbeast.model", "torchbeast.core.rollout"])
    return context


class Actors:
    """The actor processes, seen from the learner.

    Every actor has a pipe of its own. The learner waits on all pipes and on the ends of
    all processes at once, so that it sees the death of an actor immediately.
    """

    def __init__(
        self,
        flags: Flags,
        buffers: dict[str, Nested],
        weights: SharedWeights,
        saved: Sequence[dict[str, Any]] | None,
    ) -> None:
        context = actor_context()
        self.timeout = flags.actor_timeout
        self.weights = weights
        spec = rollout.Spec((), torch.int64)
        self.progress = rollout.create_buffers(spec, (flags.num_actors,))
        self.pipes: list[connection.Connection] = []
        self.processes: list[Any] = []
        self.idle = list(range(flags.num_actors))  # who waits longest comes first
        self.timings: list[dict[str, float]] = [{} for _ in self.idle]
        self._warned: set[str] = set()  # of what about the environments
        self._seen = [(-1, 0.0)] * flags.num_actors  # progress, and when it was new
        self._awake = 0.0  # seconds; stands still while the whole run is suspended
        self._looked = time.monotonic()
        self._guardian = processes.Guardian(SHUTDOWN_SECONDS / 2)
        try:
            for index in range(flags.num_actors):
                pipe, actor_pipe = context.Pipe()
                self.pipes.append(pipe)
                process = context.Process(
                    target=act,
                    name=f"actor-{index}",
                    args=(
                        flags,
                        index,
                        actor_pipe,
                        buffers,
                        weights.memory,
                        self.progress,
                        pickle.dumps(saved[index]) if saved else None,
                    ),
                    daemon=True,
                )
                self._guardian.start(process)
                self.processes.append(process)
                actor_pipe.close()
        except BaseException:
            self.stop()
            raise

    def unroll(self, index: int, slots: list[int]) -> None:
        """Has an idle actor fill the slots, acting with the newest weights."""
        self.idle.remove(index)
        self._seen[index] = (-1, self._awake)
        self._send(index, ("unroll", slots, *self.weights.lend()))

    def finished(self, timeout: float, wake_up: int) -> Iterator[tuple[int, list[int]]]:
        """Waits for actors and yields (index, slots) of every unroll that is complete.

        Raises:
          ActorError: an actor died, raised, or took no step for --actor_timeout s.
        """
        sentinels = [process.sentinel for process in self.processes]
        ready = connection.wait([*self.pipes, *sentinels, wake_up], timeout)
        for index, pipe in enumerate(self.pipes):
            if pipe in ready or sentinels[index] in ready:
                for message in self._receive(index):
                    if message[0] == "done":
                        self.idle.append(index)
                        self.timings[index] = message[2]
                        yield index, message[1]
        self._check_stuck()

    def save(self) -> list[dict[str, Any]]:
        """The states of all actors, which have to be idle, for an exact resume."""
        for index in range(len(self.pipes)):
            self._send(index, ("save",))
        states = []
        for index, pipe in enumerate(self.pipes):
            if not pipe.poll(self.timeout):
                self._raise_stuck(index)
            (message,) = self._receive(index)
            states.append(pickle.loads(message[1]))
        return states

    def stop(self) -> None:
        """Ends all processes and what their environments have started.

        Those that don't end in time are killed.
        """
        for pipe in self.pipes:
            pipe.close()
        self._guardian.end(self.processes, SHUTDOWN_SECONDS / 2)
        self._guardian.close()

    def _send(self, index: int, message: tuple) -> None:
        try:
            self.pipes[index].send(message)
        except OSError:
            for _ in self._receive(index):  # raises its own error, if it sent one
                pass
            self._raise_dead(index)

    def _receive(self, index: int) -> Iterator[tuple]:
        """What an actor has sent by now."""
        try:
            while self.pipes[index].poll():
                message = self.pipes[index].recv()
                if message[0] == "error":
                    raise ActorError(f"actor {index} failed:\n{message[1]}")
                if message[0] == "loaded":
                    self.weights.take_back(message[1])
                elif message[0] == "warning":
                    self._warn_once(*message[1:])
                else:
                    yield message
        except (EOFError, OSError):
            self._raise_dead(index)
        if not self.processes[index].is_alive():
            self._raise_dead(index)

    def _warn_once(self, key: str, message: str) -> None:
        """Logs what an actor's environment said, unless another's said it before."""
        if key not in self._warned:
            self._warned.add(key)
            log.warning("%s. logs.csv counts it in env_warnings.", message)

    def _raise_dead(self, index: int) -> None:
        process = self.processes[index]
        process.join(1.0)
        code = process.exitcode
        if code == processes.FORK_SERVER_IS_GONE:  # or the actor's own exit code
            processes.check_fork_server()
        how = processes.how_it_ended(code)
        hint = f" (is {rollout.SHARED_MEMORY} full?)" if code == -signal.SIGBUS else ""
        raise ActorError(f"actor {index} (pid {process.pid}) died {how}{hint}")

    def _check_stuck(self) -> None:
        now = time.monotonic()
        self._awake += min(now - self._looked, 2.0)
        self._looked = now
        for index, steps in enumerate(self.progress.tolist()):
            seen, since = self._seen[index]
            if steps != seen:
                self._seen[index] = (steps, self._awake)
            elif index not in self.idle and self._awake - since > self.timeout:
                self._raise_stuck(index)

    def _raise_stuck(self, index: int) -> None:
        pid = self.processes[index].pid
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR1)  # prints its Python stack
            time.sleep(0.5)
        raise ActorError(
            f"actor {index} (pid {pid}) made no step for {self.timeout:g} s. Its stack "
            "is printed above if it could still answer. If its environment is that "
            "slow, raise --actor_timeout"
        )


# --- Learner --------------------------------------------------------------------------


def get_batch(
    buffers: dict[str, Nested], slots: list[int], device: torch.device
) -> tuple[dict[str, Nested], State]:
    """Copies slots into a batch: rows [T + 1, B, ...] and the state before row 0."""
    index = torch.tensor(slots)

    def gather(buffer: torch.Tensor) -> torch.Tensor:
        rows = buffer.transpose(0, 1)  # [T + 1, slots, ...], a view
        return torch.stack([rows[:, i] for i in slots], dim=1).to(device)

    def gather_state(buffer: torch.Tensor) -> torch.Tensor:
        # [B, layers, hidden] -> [layers, B, hidden]
        return buffer[index].movedim(0, 1).contiguous().to(device)

    batch = map_nested(gather, buffers["rows"])
    return batch, map_nested(gather_state, buffers["initial_state"])


class Learner:
    """What learning changes: model, optimizer, schedule, counters."""

    def __init__(self, flags: Flags, env: HasSpaces) -> None:
        torch.manual_seed(flags.seed)
        self.flags = flags
        self.device = flags_lib.learner_device(flags)
        self.model = make_model(flags, env, self.device)
        self.optimizer, self.scheduler = make_optimizer(self.model, flags)
        self.frames_per_step = env.frames_per_step
        self.diverged = False  # the weights are not finite
        self.step = 0  # environment steps learned from
        self.version = 0  # updates made
        self.episodes = 0
        self.games = 0
        self.game_returns: collections.deque[float] = collections.deque(maxlen=100)
        # (time, step) of the last updates, for the speed.
        self.ticks: collections.deque = collections.deque(maxlen=50)
        self.policy_lag = 0.0
        self.longest_update = 0.0  # seconds

    def state_dict(self) -> dict[str, Any]:
        return {
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "scheduler_state_dict": self.scheduler.state_dict(),
            "rng": checkpoint.rng_state(),
            "stats": {
                "step": self.step,
                "version": self.version,
                "episodes": self.episodes,
                "games": self.games,
                "game_returns": list(self.game_returns),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint, which has to fit the model.

        Raises:
          CheckpointError: it does not.
        """
        checkpoint.check_fit(state["model_state_dict"], self.model)
        try:
            self._load_state_dict(state)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise checkpoint.CheckpointError(
                "the checkpoint does not fit this model and optimizer: "
                f"{type(error).__name__}: {error}. Choose another --xpid"
            ) from error

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model_state_dict"])
        checkpoint.set_rng_state(state["rng"])
        stats = state["stats"]
        self.step, self.version = stats["step"], stats["version"]
        optimizer_state = state["optimizer_state_dict"]
        if flags_lib.changed(state["flags"], self.flags):
            # The new flags' settings and schedule win over the saved ones.
            optimizer_state["param_groups"] = self.optimizer.state_dict()[
                "param_groups"
            ]
            self.optimizer.load_state_dict(optimizer_state)
            updates = self.step // (self.flags.batch_size * self.flags.unroll_length)
            with warnings.catch_warnings():  # of a schedule that runs ahead
                warnings.simplefilter("ignore", UserWarning)
                for _ in range(updates):
                    self.scheduler.step()
        else:
            self.optimizer.load_state_dict(optimizer_state)
            self.scheduler.load_state_dict(state["scheduler_state_dict"])
        self.episodes, self.games = stats["episodes"], stats["games"]
        self.game_returns.extend(stats["game_returns"])

    def sps(self) -> float | None:
        """Steps a second over the last updates; None before the second."""
        if len(self.ticks) < 2:
            return None
        (t0, step0), (t1, step1) = self.ticks[0], self.ticks[-1]
        return (step1 - step0) / (t1 - t0)

    def mean_return(self) -> float | None:
        """Over the last 100 games; None before the first."""
        return statistics.fmean(self.game_returns) if self.game_returns else None


def learn(
    flags: Flags, learner: Learner, batch: dict[str, Nested], initial_state: State
) -> dict[str, Any]:
    """One update from one batch [T + 1, B, ...]. Returns a row for logs.csv.

    Raises:
      FloatingPointError: loss or gradient are not finite, and the model is left as it
        was; or the new weights are not, and the learner can't be used any more.
    """
    learning_rate = learner.scheduler.get_last_lr()[0]
    outputs, _ = learner.model(batch, initial_state)
    auxiliary_losses = learner.model.auxiliary_losses(batch, outputs)
    loss, stats = impala_loss(
        batch, outputs, learner.model.distribution, flags, auxiliary_losses
    )
    learner.optimizer.zero_grad()
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(
        learner.model.parameters(), flags.grad_norm_clipping
    )
    lag = learner.version - batch["policy_version"][:-1].float().mean()
    suspect = batch["env_warnings"][1:].sum()
    more = {"grad_norm": grad_norm, "policy_lag": lag, "env_warnings": suspect}
    stats = join_columns(stats, more)
    values = torch.stack([x.float() for x in stats.values()]).tolist()  # one transfer
    scalars = dict(zip(stats, values, strict=True))
    if not all(np.isfinite([scalars["total_loss"], scalars["grad_norm"]])):
        cause = find_cause(batch, flags.reward_clipping == "abs_one")
        raise FloatingPointError(
            f"loss or gradient are not finite at step {learner.step}: {scalars}. "
            f"{cause}"
        )
    learner.optimizer.step()
    if not all_finite(learner.model):
        learner.diverged = True
        raise FloatingPointError(
            f"the update at step {learner.step} made weights that are not finite, "
            "from a finite loss and gradient. They are neither saved nor acted with: "
            "the run goes on from its last checkpoint, if there is one. Lower "
            f"--learning_rate (now {learning_rate:g}), or raise --epsilon (now "
            f"{flags.epsilon:g})"
        )
    learner.scheduler.step()

    learner.version += 1
    learner.step += batch["reward"][1:].numel()
    learner.ticks.append((time.perf_counter(), learner.step))
    learner.policy_lag = scalars["policy_lag"]
    ends = rollout.episode_ends(batch)
    learner.episodes += len(ends["episode_return"])
    learner.games += len(ends["game_return"])
    learner.game_returns.extend(ends["game_return"])
    means = {
        f"mean_{name}": statistics.fmean(x) if x else None for name, x in ends.items()
    }
    before = {
        "step": learner.step,
        "frames": learner.step * learner.frames_per_step,
        "sps": learner.sps(),
    }
    after = {
        **means,
        "mean_game_return_100": learner.mean_return(),
        "episodes": learner.episodes,
        "games": learner.games,
        "learning_rate": learning_rate,
    }
    return join_columns(before, scalars, after)


# --- Training -------------------------------------------------------------------------


class Run(ABC):
    """What surrounds the loop of a training run: files, signals, threads, the end.

    A variant adds how rollouts are made: what to start, what to do in a turn of the
    main loop, how its threads end. However the run ends, what was started has ended
    then, meta.json tells of it, and a checkpoint is saved where that makes sense.

    Args:
      beginning: flags, folder and checkpoint.
      weights: those to act with.

    Attributes:
      errors: of threads; the first ends the run.
      stop_signal: the signal that asks for the end, or 0.
      timings: of the learner threads; guarded by the lock, as the learner is.
    """

    def __init__(
        self, beginning: resume.Beginning, learner: Learner, weights: Weights
    ) -> None:
        self.beginning, self.learner, self.weights = beginning, learner, weights
        self.flags = flags = beginning.flags
        self.resumed = beginning.saved is not None
        if beginning.saved:
            learner.load_state_dict(beginning.saved)
        weights.publish(learner.model, learner.version)
        if learner.device.type == "cpu":
            torch.set_num_threads(flags.torch_threads)
            keep_freed_memory()
        self.errors: list[BaseException] = []
        self._error: str | None = None  # what ended the run, for meta.json
        self.stop_signal, self._stopped_at, self._told = 0, 0.0, False
        self._saving = False  # then a second signal does not end the run at once
        self.timings = Timings()
        self.threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._saved_version, self._last_save = learner.version, time.monotonic()
        self._profile = Profile(flags, learner.version)
        self._status_line = Status(learner.step, flags.total_steps)
        self._board: Board | None = None
        self.wake_reader, self._wake_writer = os.pipe()  # wakes the main thread
        os.set_blocking(self.wake_reader, False)
        os.set_blocking(self._wake_writer, False)

    # What a variant defines.

    @abstractmethod
    def start(self) -> None:
        """Starts processes; threads are started after it."""

    @abstractmethod
    def turn(self) -> bool:
        """One turn of the main loop, which waits a second at most. False: the end."""

    @abstractmethod
    def end_work(self) -> None:
        """Has the threads end, but for those that are busy."""

    @abstractmethod
    def close(self) -> None:
        """Ends what else was started."""

    def queued(self) -> int:
        """The rollouts that wait to be learned from."""
        return 0

    @abstractmethod
    def acted(self) -> int:
        """The environment steps taken since the start."""

    def streams_connected(self) -> str | None:
        """How many streams there are of those expected, if environments have any."""
        return None

    def columns(self) -> dict[str, Any]:
        """What else to log of an update."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What else to save."""
        return {}

    @abstractmethod
    def who_waited(self) -> str:
        """What to say at the end of where the time went."""

    def report(self, error: BaseException) -> int:
        return report(error)

    # What is common.

    def _report(self, error: BaseException) -> int:
        if self._error is None and not isinstance(error, KeyboardInterrupt):
            self._error = f"{type(error).__name__}: {error}"
        return self.report(error)

    def add_thread(self, name: str, work: Callable[[], None]) -> None:
        """Has a thread do the work; what it raises ends the run."""

        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)
            finally:
                self.wake()

        self.threads.append(threading.Thread(target=guarded, name=name, daemon=True))

    def wake(self) -> None:
        """Ends the main thread's wait."""
        with contextlib.suppress(BlockingIOError):  # full: already awake
            os.write(self._wake_writer, b"w")

    def learn(self, batch: dict[str, Nested], initial_state: State) -> bool:
        """One update, published and logged; False if the run has enough of them."""
        learner = self.learner
        with self._lock:
            enough = learner.step >= self.flags.total_steps and not self.flags.sync
            if enough or learner.diverged:
                return False
            if not self.timings.seconds:
                self.timings.reset()  # the start of the actors is not counted
            self.timings.time("wait")
            started = time.monotonic()
            row = learn(self.flags, learner, batch, initial_state)
            seconds = time.monotonic() - started
            learner.longest_update = max(learner.longest_update, seconds)
            self.weights.publish(learner.model, learner.version)
            row = join_columns(row, self.columns())
            self.writer.log(row)
            if self._board:
                self._board.log(row)
            self.timings.time("learn")
        return True

    def save_if_due(self) -> None:
        flags, seconds = self.flags, time.monotonic() - self._last_save
        if seconds > flags.checkpoint_interval and self.save():
            self._last_save = time.monotonic()

    def save(self) -> bool:
        """Saves a checkpoint; False if the run is to end in the middle of an update."""
        learner = self.learner
        if self.flags.disable_checkpoint or learner.version == self._saved_version:
            return True  # there is nothing new
        while not self._lock.acquire(timeout=1.0):
            if self.stop_signal:
                return False
        try:
            if learner.diverged:
                return True  # the last checkpoint is better
            self._saving = True
            state = learner.state_dict() | {
                "flags": self.flags.as_dict(),
                "flags_left_open": self.beginning.left_open,
            }
            state |= self.state_dict()
            path = self.beginning.folder.path / "model.tar"
            checkpoint.save(path, state)
            self._saved_version = learner.version
        finally:
            self._saving = False
            self._lock.release()
        log.info("Saved %s at step %d.", path, state["stats"]["step"])
        return True

    def _on_signal(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        same = now - self._stopped_at < processes.SAME_REQUEST_SECONDS
        if self.stop_signal and (same or self._saving):
            return
        if self.stop_signal:
            raise KeyboardInterrupt(number)  # the second time: don't wait, don't save
        # Nothing is logged here: the signal may have come in the middle of a log line.
        self.stop_signal, self._stopped_at = number, now

    def _tell_signal(self) -> None:
        if self.stop_signal and not self._told:
            self._told = True
            log.warning("%s: ending the run.", signal.Signals(self.stop_signal).name)

    def _end_threads(self) -> bool:
        """Has all threads end; False if one is still busy."""
        self.end_work()
        # An update in progress is waited for, even if updates take long.
        seconds = max(SHUTDOWN_SECONDS, 2 * self.learner.longest_update)
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)

    def train(self) -> int:
        """Runs until flags.total_steps, or until a stop signal (see core/processes.py).

        It leaves the stop signals ignored.

        Returns:
          The exit status: 0 finished, 1 failed (the log says why), 128 + n by signal n.

        Raises:
          What keeps the run from starting, before anything is written to its folder.
        """
        flags, learner = self.flags, self.learner
        # From here on a signal is noted, so that meta.json tells how the run ended.
        for number in processes.handled_signals():
            signal.signal(number, self._on_signal)
        self.writer = FileWriter(
            flags.savedir,
            flags.xpid,
            flags.as_dict(),
            resume_step=learner.step if self.resumed else None,
            folder=self.beginning.folder,
            anew=self.beginning.anew,
        )
        old_wakeup = signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        status = 1
        worth_saving = False
        try:
            try:
                log.info("Run %s; files in %s", flags.xpid, self.writer.path)
                if self.resumed:
                    log.info("Resuming at step %d.", learner.step)
                elif self.beginning.anew:
                    log.warning("%s died before its first checkpoint.", flags.xpid)
                for note in self.beginning.notes:
                    log.info("%s", note)
                if flags.tensorboard:
                    self._board = Board(self.writer.path, learner.step)
                self.start()
                for thread in self.threads:
                    thread.start()
                worth_saving = True
                self._last_save = time.monotonic()
                while self.turn():
                    self._tell_signal()
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake_reader, 4096)
                    if self.errors:
                        raise self.errors[0]
                    self._profile.update(learner.version, self.writer.path)
                    self._status_line.show(
                        learner.step,
                        learner.sps(),
                        learner.mean_return(),
                        learner.games,
                        learner.policy_lag,
                        self.queued(),
                        self.acted(),
                        self.streams_connected(),
                    )
                self._tell_signal()
                finished = learner.step >= flags.total_steps
                status = 0 if finished else 128 + self.stop_signal
            except BaseException as error:
                status = self._report(error)
                # In sync mode only whole turns resume; a save that failed would again.
                unwanted = isinstance(
                    error, checkpoint.CheckpointError | KeyboardInterrupt
                )
                worth_saving = worth_saving and not flags.sync and not unwanted
            try:
                ended = self._end_threads()
                if self.errors and status != 1:  # after the last turn
                    status = self._report(self.errors[0])
                if not ended:
                    busy = [t.name for t in self.threads if t.is_alive()]
                    self._error = f"{', '.join(busy)} still busy: nothing is saved."
                    log.error("%s", self._error)
                    status = 1
                elif worth_saving:
                    self.save()
            except checkpoint.CheckpointError as error:
                if status == 1:  # after another failure, of the same disk perhaps
                    log.warning("%s", error)
                else:
                    status = self._report(error)
            except BaseException as error:
                status = self._report(error)
        finally:
            # The end is bounded in time. The caller restores the handlers.
            for number in processes.STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            self._status_line.close()
            self.close()
            log.info("%s", self.who_waited())
            self._profile.close(self.writer.path)
            if self._board:
                self._board.close()  # logs what it can't write
            log.info(
                "%s at step %d, %.0f SPS, %d games, mean return of the last %d: %s",
                "Failed" if status == 1 else "Stopped" if status else "Finished",
                learner.step,
                learner.sps() or 0,
                learner.games,
                len(learner.game_returns),
                format_return(learner.mean_return()),
            )
            self.writer.close(
                status == 0,
                last_step=learner.step,
                exit_status=status,
                signal=signal.Signals(status - 128).name if status > 128 else None,
                error=self._error if status == 1 else None,
            )
            signal.set_wakeup_fd(old_wakeup)
            if not any(thread.is_alive() for thread in self.threads):
                os.close(self.wake_reader)
                os.close(self._wake_writer)
        return status


class MonoRun(Run):
    """Slots go around: free -> an actor fills them -> filled -> in a batch -> free."""

    def __init__(
        self,
        beginning: resume.Beginning,
        learner: Learner,
        observation_space: spaces.Space,
    ) -> None:
        self.shared_weights = SharedWeights(learner.model)
        super().__init__(beginning, learner, self.shared_weights)
        flags = self.flags
        saved = beginning.saved
        self.saved_actors = saved["actors"] if saved and flags.sync else None
        spec = rollout.row_spec(observation_space, learner.model.distribution)
        states = [
            rollout.Spec((x.shape[0], *x.shape[2:]), x.dtype)
            for x in learner.model.initial_state(1)
        ]
        rows = (flags.num_buffers, flags.unroll_length + 1)
        self.buffers = {
            "rows": rollout.create_buffers(spec, rows),
            "initial_state": rollout.create_buffers(tuple(states), rows[:1]),
        }
        self.free = collections.deque(range(flags.num_buffers))
        self.filled: collections.deque[int] = collections.deque()
        self.batches: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self.round_slots: dict[int, list[int]] = {}  # sync: what each actor has filled
        self.actors: Actors | None = None
        for i in range(1 if flags.sync else flags.num_learner_threads):
            self.add_thread(f"learner-{i}", self.learn_from_batches)

    def start(self) -> None:
        actor_flags = self.flags
        if self.resumed and not self.flags.sync:  # no episode and no noise comes twice
            seed = derive_seed(self.flags.seed, self.learner.step)
            actor_flags = self.flags.replace(seed=seed)
        self.actors = Actors(
            actor_flags, self.buffers, self.shared_weights, self.saved_actors
        )

    def learn_from_batches(self) -> None:
        """A learner thread."""
        while (slots := self.batches.get()) is not None:
            batch, initial_state = get_batch(self.buffers, slots, self.learner.device)
            if not self.flags.sync:
                self.release(slots)
            if not self.learn(batch, initial_state):
                break
            if self.flags.sync:
                self.release(slots)

    def release(self, slots: list[int]) -> None:
        self.free.extend(slots)
        self.wake()

    def turn(self) -> bool:
        flags, actors = self.flags, self.actors
        assert actors is not None
        # In sync mode actors and learner take turns: nothing is handed out or saved
        # until everything handed out before was learned from.
        may_act = not flags.sync or len(self.free) == flags.num_buffers
        if may_act and (self.stop_signal or self.learner.step >= flags.total_steps):
            return False
        if may_act:
            self.save_if_due()
            for index in actors.idle[:]:
                if len(self.free) >= flags.envs_per_actor:
                    slots = [self.free.popleft() for _ in range(flags.envs_per_actor)]
                    actors.unroll(index, slots)
        for index, slots in actors.finished(1.0, self.wake_reader):
            self.round_slots[index] = slots
            if not flags.sync or len(self.round_slots) == flags.num_actors:
                for _, ready in sorted(self.round_slots.items()):
                    self.filled.extend(ready)
                self.round_slots.clear()
        while len(self.filled) >= flags.batch_size:
            self.batches.put([self.filled.popleft() for _ in range(flags.batch_size)])
        return True

    def queued(self) -> int:
        return len(self.filled) + self.batches.qsize() * self.flags.batch_size

    def acted(self) -> int:
        turns = int(self.actors.progress.sum()) if self.actors else 0
        return turns * self.flags.envs_per_actor

    def state_dict(self) -> dict[str, Any]:
        if self.flags.sync and self.actors:
            return {"actors": self.actors.save()}
        return {}

    def end_work(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:  # not what is left to learn from
                self.batches.get_nowait()
        for _ in self.threads:
            self.batches.put(None)

    def close(self) -> None:
        if self.actors:
            self.actors.stop()

    def who_waited(self) -> str:
        """Shares of the time that learner and actors spent on what."""
        known = [t for t in self.actors.timings if t] if self.actors else []
        mean = (
            {k: statistics.fmean(t[k] for t in known) for k in known[0]}
            if known
            else {}
        )
        learner = format_shares(self.timings.shares())
        return f"Learner: {learner}. Actors: {format_shares(mean)}."


def train(beginning: resume.Beginning) -> int:
    """Trains until flags.total_steps, or until a stop signal; see Run.train."""
    flags = beginning.flags
    resume.announce_environment(flags, beginning.saved)
    env = find_env_spec(flags, actor_context(), flags.actor_timeout)
    if flags.sync and not flags.disable_checkpoint and not env.exact_resume:
        raise FlagError(
            "--sync saves the games in progress, which native Atari environments "
            "can't do: add --envs python, or --disable_checkpoint"
        )
    learner = Learner(flags, env)
    run = MonoRun(beginning, learner, env.observation_space)
    return run.train()


# --- Testing --------------------------------------------------------------------------


@torch.inference_mode()
def test(flags: Flags, model_state: dict[str, torch.Tensor]) -> list[float]:
    """Plays flags.num_test_episodes games and returns their game returns.

    Every environment plays its share of the games, so that short games don't count more
    often than long ones.
    """
    wants_window = flags.mode == "test_render" and not flags.video
    if wants_window and not has_display():
        raise FlagError(
            "--mode test_render needs a display, and neither DISPLAY nor "
            "WAYLAND_DISPLAY is set; record a video instead: --video FILE.mp4"
        )
    render_mode = "human" if wants_window else "rgb_array" if flags.video else None
    num_envs = 1 if render_mode else min(flags.num_test_episodes, 16)
    flags = flags.replace(seed=derive_seed(flags.seed, TEST_STREAM))
    env = Environment(flags, num_envs, render_mode=render_mode)
    model = make_model(flags, env, torch.device("cpu"))
    checkpoint.check_fit(model_state, model)
    model.load_state_dict(model_state)
    prepare_to_act(model)
    generator = torch.Generator().manual_seed(derive_seed(flags.seed))
    quota = [len(range(i, flags.num_test_episodes, num_envs)) for i in range(num_envs)]
    returns: list[float] = []
    state = model.initial_state(num_envs)
    row = env.initial()
    with contextlib.ExitStack() as stack:
        stack.callback(env.close)
        video = stack.enter_context(Video(flags.video)) if flags.video else None
        while any(quota):
            if video:
                video.add(np.asarray(env.render()))
            outputs, state = model(map_nested(to_tensor, row), state)
            logits = outputs["policy_logits"].squeeze(0)
            if flags.greedy:
                action = model.distribution.mode(logits)
            else:
                action = model.distribution.sample(logits, generator)
            row = env.step(action.numpy())
            for i in np.flatnonzero(row["game_over"]):
                if quota[i]:
                    quota[i] -= 1
                    returns.append(float(row["game_return"][i]))
                    log.info(
                        "Game %d: return %.2f after %d steps",
                        *(len(returns), returns[-1], row["game_step"][i]),
                    )
    deviation = statistics.stdev(returns) if len(returns) > 1 else 0.0
    log.info(
        "%d games: mean return %.2f, standard deviation %.2f, min %.2f, max %.2f",
        *(len(returns), statistics.fmean(returns), deviation),
        *(min(returns), max(returns)),
    )
    if flags.video:
        log.info("Video in %s", flags.video)
    return returns


# --- Command line ---------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = flags_lib.make_parser("MonoBeast: IMPALA on one machine.")
    add = parser.add_argument_group("MonoBeast").add_argument
    add("--envs_per_actor", type=int, help="environments an actor steps together")
    add("--num_buffers", type=int, help="rollouts in shared memory")
    add(
        *("--num_learner_threads", "--num_threads"),
        dest="num_learner_threads",
        type=int,
        default=1,
        help="threads that gather batches; one of them learns at a time",
    )
    add("--torch_threads", type=int, help="CPU threads of the learner's operations")
    add(
        "--actor_timeout",
        type=float,
        default=120.0,
        help="seconds without a step after which an actor counts as stuck",
    )
    return parser


def num_cpus() -> int:
    """The CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resolve_layout(flags: Flags) -> Flags:
    """Fills in the layout flags that depend on each other, and checks them.

    Raises:
      FlagError: actors and learner would wait for each other for ever.
    """
    A, B = flags.num_actors, flags.batch_size
    if flags.envs_per_actor is None:
        flags.envs_per_actor = 8
        if flags.num_buffers is not None:  # as many as there are slots for
            flags.envs_per_actor = max(1, min(8, flags.num_buffers // A, B))
    E = flags.envs_per_actor
    if flags.num_buffers is None:
        flags.num_buffers = A * E if flags.sync else A * E + max(B, E)
    if flags.torch_threads is None:
        # The actors need the other half.
        flags.torch_threads = max(1, num_cpus() // 2)
    least = A * E if flags.sync else max(A * E, E + B - 1)
    if flags.num_buffers < least:
        raise FlagError(
            f"--num_buffers {flags.num_buffers} is too small: {A} actors with {E} "
            f"environments each and a batch of {B} rollouts need at least {least}"
        )
    if flags.sync and (A * E % B or flags.num_buffers != A * E):
        raise FlagError(
            f"--sync learns from all {A * E} environments in turn (--num_actors {A} "
            f"times --envs_per_actor {E}): --batch_size must divide that, got {B}, and "
            f"--num_buffers must equal it, got {flags.num_buffers}"
        )
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 finished, 1 failed, 128 + n ended by signal n."""
    return run(argv, make_parser(), resolve_layout, train, report)


@processes.raise_on_stop_signals()  # until a run handles them itself
def run(
    argv: Sequence[str] | None,
    parser: argparse.ArgumentParser,
    resolve_layout: Callable[[Flags], Flags],
    train: Callable[[resume.Beginning], int],
    report: Callable[[BaseException], int],
) -> int:
    """What the flags ask for: trains or tests; `report` tells what went wrong."""
    open_missing_streams()
    logging.basicConfig(
        level=logging.INFO, format="[%(levelname)s %(asctime)s %(name)s] %(message)s"
    )
    flags = flags_lib.parse(parser, argv)
    try:
        with logging_redirect_tqdm():
            if flags.mode != "train":
                evaluate(parser, argv, flags)
                return 0
            flags_lib.resolve_folder(flags)
            with RunFolder(flags.savedir, flags.xpid) as folder:
                beginning = resume.begin(
                    *(parser, argv, folder),
                    lambda flags: resolve_layout(flags_lib.resolve(flags)),
                )
                status = 0 if beginning.is_finished() else train(beginning)
                if any(t.name.startswith(THREADS) for t in threading.enumerate()):
                    # Python can't end cleanly under a thread that is inside of torch.
                    logging.shutdown()
                    os._exit(status)
            return status
    except (Exception, KeyboardInterrupt) as error:
        return report(error)


def evaluate(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, flags: Flags
) -> None:
    """Tests the checkpoint that the flags name, with the flags that it has."""
    xpid = flags.xpid or "latest"
    path = Path(os.path.expanduser(flags.savedir), xpid, "model.tar")
    saved = checkpoint.load(path)
    checkpoint.check(saved, path, for_test=True)
    flags = flags_lib.parse(parser, argv, saved["flags"])
    flags.xpid = None  # nothing is written there
    resume.announce_environment(flags, saved)
    test(flags_lib.resolve(flags).freeze(), saved["model_state_dict"])


# What a person can put right: the message says it all, a traceback would only hide it.
EXPECTED_ERRORS = (
    UserError,
    UnknownEnvironmentError,
    UnsupportedSpaceError,
    MissingPackageError,
    processes.ProcessError,
    rollout.SharedMemoryError,
    FileExistsError,  # of a run's folder
    BlockingIOError,
)


def report(error: BaseException) -> int:
    """Says in the log what ended the run; returns the exit status for it."""
    if isinstance(error, KeyboardInterrupt):
        number = error.args[0] if error.args else signal.SIGINT
        log.warning("%s: ends without saving.", signal.Signals(number).name)
        return 128 + number
    if isinstance(error, EXPECTED_ERRORS):
        log.error("%s: %s", type(error).__name__, error)
    else:
        log.error("The run failed.", exc_info=error)
    return 1


if __name__ == "__main__":
    processes.run_script(main)
