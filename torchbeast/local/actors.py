"""MonoBeast's actor processes: their main function, and the learner's view of them."""

import contextlib
import logging
import os
import pickle
import random
import signal
import socket
import statistics
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any, NoReturn

import numpy as np
import torch
import torch.multiprocessing as mp
from numpy.random import mtrand

from torchbeast.base.errors import text_of
from torchbeast.base.nested import Nested
from torchbeast.base.seeds import derive_seed
from torchbeast.base.seldom import Seldom
from torchbeast.core import rollout
from torchbeast.core.acting import SharedWeights
from torchbeast.envs import checks
from torchbeast.envs.environment import Environment
from torchbeast.procs import children
from torchbeast.procs.step_watch import StepWatch
from torchbeast.runs.flagset import Flags
from torchbeast.runs.prof import format_shares

log = logging.getLogger(__name__)

GLOBALS = 1  # sets these seeds apart from those of games and actions
COUNTED = ". logs.csv counts it in env_warnings."
STOP_SECONDS = 2.5  # actors that don't exit within this time are killed


class ActorError(children.ProcessError):
    """An actor process died, raised or got stuck."""


def actor_context() -> Any:
    """The start method of processes that run environments.

    Never fork a process that has threads: the copy can inherit a locked lock.
    """
    methods = mp.get_all_start_methods()
    context: Any = mp.get_context("forkserver" if "forkserver" in methods else "spawn")
    context.set_forkserver_preload(["torchbeast.model", "torchbeast.core.rollout"])
    return context


def seed_globals(*entropy: int) -> None:
    """Seeds the global generators of Python, NumPy and torch, for environments.

    Forked processes inherit one state of them, so each process needs its own seed.
    """
    seed = derive_seed(GLOBALS, *entropy)
    random.seed(seed)
    mtrand.set_bit_generator(np.random.MT19937(seed))
    torch.default_generator.manual_seed(seed)  # not those of GPUs


class TorchSettings:
    """PyTorch's settings, one set for environments and one for all else.

    Inside a `with` block those of the environments are set, outside our own. For
    processes in which only one thread uses PyTorch.
    """

    SETTINGS: Any = (
        (torch.get_default_dtype, torch.set_default_dtype),
        # get_default_device() is slow. With a device, not None, all calls are slower.
        (
            lambda: torch.empty(0).device,
            lambda x: torch.set_default_device(None if x.type == "cpu" else x),
        ),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.is_grad_enabled, torch.set_grad_enabled),
    )

    def __init__(self) -> None:
        self._inside = self._outside = self._now()

    def _now(self) -> list[Any]:
        return [get() for get, _ in self.SETTINGS]

    def __enter__(self) -> None:
        if self._inside != self._outside:
            self._set(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = self._now()
        if self._inside != self._outside:
            self._set(self._outside)

    def _set(self, values: list[Any]) -> None:
        for (_, set_to), value in zip(self.SETTINGS, values, strict=True):
            set_to(value)


def run_actor(
    actor_class: Callable[..., Any],
    flags: Flags,
    index: int,
    buffers: dict[str, Nested],
    weights_memory: torch.Tensor,
    num_steps: torch.Tensor,
    saved: bytes | None,
    pipe: connection.Connection,
) -> None:
    """The main function of an actor process; see Actors for the messages."""
    children.begin_child()
    torch.set_num_threads(1)
    os.nice(5)  # the learner has priority
    try:
        with contextlib.closing(make_envs(flags, index)) as env:
            env.on_warning = lambda *warning: pipe.send(("warning", *warning))
            actor = actor_class(flags, env, buffers, weights_memory, index, num_steps)
            if saved is not None:
                actor.load_state_dict(pickle.loads(saved))
            while True:
                obey(actor, pipe)
    except BaseException as error:  # EOFError: the learner has closed the pipe
        # The send fails if the learner has exited or closed the pipe.
        with contextlib.suppress(OSError):
            pipe.send(("error", text_of(error)))


def make_envs(flags: Flags, index: int) -> Environment:
    """The environments of actor number `index`, and its process's global generators."""
    seed_globals(flags.seed, index)
    E = flags.envs_per_actor
    return Environment(flags, E, index * E, around=TorchSettings())


def obey(actor: Any, pipe: connection.Connection) -> None:
    """Waits for one command of the learner and carries it out.

    Raises:
      EOFError: the learner has closed the pipe.
    """
    actor.timings.reset()
    command, *arguments = pipe.recv()
    actor.timings.time("wait")
    if command == "save":
        # As bytes: pipes send tensors through shared memory, which may be full.
        pipe.send(("saved", pickle.dumps(actor.state_dict())))
        return
    slots, bank, policy_version = arguments
    actor.load_weights(bank, policy_version)
    pipe.send(("loaded", bank))
    actor.unroll(slots)
    pipe.send(("done", slots, actor.timings.shares()))


def mean_timings(timings: Sequence[dict[str, float]]) -> str:
    """Describes how actors spent their time, on average. {}: not known yet."""
    known = [t for t in timings if t]
    names = known[0] if known else {}
    return format_shares({k: statistics.fmean(t[k] for t in known) for k in names})


class Actors:
    """The actor processes, seen from the learner. For its main thread only.

    Each actor has its own pipe. Commands to an actor, and its replies:

        ("unroll", slots, bank, policy_version)   ("loaded", bank),
                                                  ("done", slots, timings)
        ("save",)                                 ("saved", state)

    An actor also sends ("warning", key, message) and ("error", text). The learner
    waits on all pipes and all processes at once, so that it sees at once if one dies.
    """

    def __init__(
        self,
        actor_class: Callable[..., Any],
        flags: Flags,
        buffers: dict[str, Nested],
        weights: SharedWeights,
        saved: Sequence[dict[str, Any]] | None,
    ) -> None:
        self.weights = weights
        self.watch = StepWatch(
            rollout.step_counters(flags.num_actors), flags.actor_timeout
        )
        self.pipes: list[connection.Connection] = []
        self.children: list[children.Child] = []
        self.idle = list(range(flags.num_actors))  # idle for longest: first
        self.timings: list[dict[str, float]] = [{} for _ in self.idle]
        self.envs_per_actor = flags.envs_per_actor
        self._group = children.Children(actor_context(), STOP_SECONDS)
        self._is_new = Seldom()  # warnings, by key
        try:
            for index in range(flags.num_actors):
                child = self._group.start(
                    f"actor {index}",
                    run_actor,
                    actor_class,
                    flags,
                    index,
                    buffers,
                    weights.memory,
                    self.watch.steps[index],
                    pickle.dumps(saved[index]) if saved else None,
                )
                self.children.append(child)
                self.pipes.append(child.pipe)
        except BaseException:
            self.close()
            raise

    def start_unroll(self, index: int, slots: list[int]) -> None:
        """Makes an idle actor fill the slots with the newest weights."""
        self.idle.remove(index)
        self.watch.restart(index)
        self._send(index, ("unroll", slots, *self.weights.acquire()))

    def finished(self, timeout: float, wake_up: int) -> Iterator[tuple[int, list[int]]]:
        """Waits for actors and yields (index, slots) of each complete unroll.

        Args:
          timeout: maximal seconds to wait.
          wake_up: a file descriptor that ends the wait when it is readable.

        Raises:
          ActorError: an actor died, raised, or took no step for --actor_timeout s.
        """
        sentinels = [child.process.sentinel for child in self.children]
        ready = connection.wait([*self.pipes, *sentinels, wake_up], timeout)
        for index, pipe in enumerate(self.pipes):
            if pipe in ready or sentinels[index] in ready:
                for message in self._receive(index):
                    if message[0] == "done":
                        self.idle.append(index)
                        self.timings[index] = message[2]
                        yield index, message[1]
        running = set(range(len(self.pipes))) - set(self.idle)
        stuck = self.watch.find_stuck(running)
        if stuck is not None:
            self._raise_stuck(stuck)

    def save(self) -> list[dict[str, Any]]:
        """Returns the states of all actors, for an exact resume. All must be idle."""
        for index in range(len(self.pipes)):
            self._send(index, ("save",))
        states = []
        for index, pipe in enumerate(self.pipes):
            if not pipe.poll(self.watch.timeout):
                self._raise_stuck(index)
            (message,) = self._receive(index)
            states.append(pickle.loads(message[1]))
        return states

    def num_steps(self) -> int:
        """Environment steps taken since the start."""
        return int(self.watch.steps.sum()) * self.envs_per_actor

    def timing_summary(self) -> str:
        """Describes how the actors spent their time, on average."""
        return mean_timings(self.timings)

    def close(self) -> None:
        """Ends all processes and the programs that their environments have started."""
        for pipe in self.pipes:  # the actors can still send what close() raises
            with contextlib.suppress(OSError):
                socket.socket(fileno=os.dup(pipe.fileno())).shutdown(socket.SHUT_WR)
        self._group.end(STOP_SECONDS)
        self._group.close()
        for pipe in self.pipes:
            with contextlib.suppress(EOFError, OSError):
                while pipe.poll():
                    message = pipe.recv()
                    if message[:2] == ("warning", checks.CLOSE):
                        self._warn_once(*message[1:])
            pipe.close()

    def _send(self, index: int, message: tuple) -> None:
        try:
            self.pipes[index].send(message)
        except OSError:
            for _ in self._receive(index):  # raises the error that the actor sent
                pass
            self._raise_dead(index)

    def _receive(self, index: int) -> Iterator[tuple]:
        """Yields the messages that have arrived from an actor."""
        try:
            while self.pipes[index].poll():
                message = self.pipes[index].recv()
                if message[0] == "error":
                    raise ActorError(f"actor {index} failed:\n{message[1]}")
                if message[0] == "loaded":
                    self.weights.release(message[1])
                elif message[0] == "warning":
                    self._warn_once(*message[1:])
                else:
                    yield message
        except (EOFError, OSError):
            self._raise_dead(index)
        if not self.children[index].process.is_alive():
            self._raise_dead(index)

    def _warn_once(self, key: str, message: str) -> None:
        """Logs a warning of an environment, unless another actor has sent it."""
        if self._is_new(key):
            counted = "" if key == checks.CLOSE else COUNTED
            log.warning("%s%s", message, counted)

    def _raise_dead(self, index: int) -> None:
        child = self.children[index]
        how = child.how_it_died()
        full = child.process.exitcode == -signal.SIGBUS
        hint = f" (is {rollout.SHARED_MEMORY} full?)" if full else ""
        raise ActorError(f"actor {index} (pid {child.process.pid}) {how}{hint}")

    def _raise_stuck(self, index: int) -> NoReturn:
        pid = self.children[index].process.pid
        raise ActorError(self.watch.explain(index, f"actor {index}", pid))
