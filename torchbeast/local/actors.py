"""MonoBeast's actor processes: their main function, and the learner's view of them."""

import contextlib
import logging
import os
import pickle
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from numpy.random import mtrand

from torchbeast.base import ranks
from torchbeast.base.nested import Nested
from torchbeast.base.seeds import derive_seed
from torchbeast.core.buffers import step_counters
from torchbeast.core.weights import SharedWeights
from torchbeast.flags import Flags
from torchbeast.local.env_spec import EnvSpec, find_env_spec
from torchbeast.procs import children

log = logging.getLogger(__name__)

GLOBALS = 1  # sets these seeds apart from those of games and actions
STOP_SECONDS = 2.5  # actors that don't exit within this time are killed


def actor_context() -> Any:
    """The start method of processes that run environments."""
    # Never fork a process that has threads: the copy can inherit a locked lock.
    context: Any = mp.get_context("forkserver")
    shared = ["model", "envs.environment", "extras.envs.atari"]  # in all copies' memory
    context.set_forkserver_preload([f"torchbeast.{name}" for name in shared])
    return context


def seed_globals(*entropy: int) -> None:
    """Seeds the global generators: forked processes inherit one state of them."""
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
        self._others = [get() for get, _ in self.SETTINGS]

    def __enter__(self, *_: object) -> None:
        """Exchanges the two sets."""
        before = [get() for get, _ in self.SETTINGS]
        if before != self._others:
            for (_, set_to), value in zip(self.SETTINGS, self._others, strict=True):
                set_to(value)
        self._others = before

    __exit__ = __enter__


def run_actor(
    actor_class: Callable[..., Any],
    flags: Flags,
    env_spec: EnvSpec,
    index: int,
    buffers: dict[str, Nested],
    weights_memory: torch.Tensor,
    saved: bytes | None,
    num_steps: torch.Tensor,
    pipe: connection.Connection,
) -> None:
    """The main function of an actor process; see Actors for the messages."""
    from torchbeast.envs.seeded_games import check_same_spaces

    children.begin_child()
    torch.set_num_threads(1)
    os.nice(5)  # the learner has priority
    with (
        children.sending_errors(pipe, f"actor {index} failed"),
        contextlib.closing(make_envs(flags, index)) as env,
        children.sending_errors(pipe, f"actor {index} failed"),  # close() may hang
    ):
        check_same_spaces(flags.env, env_spec, env)
        actor = actor_class(flags, env, buffers, weights_memory, index, num_steps)
        if saved is not None:
            actor.load_state_dict(pickle.loads(saved))
        while True:
            actor.timings.reset()
            try:
                command, *arguments = pipe.recv()
            except EOFError:  # the learner has closed the pipe
                return
            actor.timings.time("wait")
            if command == "save":
                # As bytes: pipes send tensors through shared memory, which may be full.
                pipe.send(("saved", pickle.dumps(actor.state_dict())))
                continue
            i, slots, bank, policy_version = arguments
            actor.load_weights(bank, policy_version)
            pipe.send(("loaded", bank))
            actor.unroll(slots)
            pipe.send(("done", i, slots, actor.timings.shares()))


def make_envs(flags: Flags, index: int) -> Any:
    """The environments of actor number `index`, and its process's global generators."""
    from torchbeast.envs.environment import Environment  # the learner runs none

    seed_globals(flags.seed, index)
    E = flags.envs_per_actor
    return Environment(flags, E, index * E, around=TorchSettings())


class Actors:
    """The actor processes, seen from the learner. For its main thread only.

    Each actor has its own pipe. Commands to an actor, and its replies:

        ("unroll", index, slots, bank, policy_version)
                    ("loaded", bank), ("done", index, slots, timings)
        ("save",)   ("saved", state)

    An actor also sends ("log", level, message), and what it raises. The learner waits
    on all pipes and all processes at once, so that it sees at once if one dies.
    """

    def __init__(
        self,
        actor_class: Callable[..., Any],
        flags: Flags,
        env_spec: EnvSpec,
        buffers: dict[str, Nested],
        weights: SharedWeights,
        saved: Sequence[dict[str, Any]] | None,
    ) -> None:
        self.flags, self.weights, self.publish = flags, weights, weights.publish
        self.idle = list(range(flags.num_actors))  # the one idle for longest is first
        self.num_learner_threads = 1 if flags.sync else flags.num_learner_threads
        self.timings: list[dict[str, float]] = [{} for _ in self.idle]  # shares so far
        self.steps = step_counters(flags.num_actors)
        self.watch = children.StepWatch(flags.actor_timeout)
        self.group = children.Children(actor_context(), STOP_SECONDS)
        try:
            self.children = self.start(actor_class, env_spec, buffers, saved)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def find_env_spec(flags: Flags) -> EnvSpec:
        """The properties of the environment. Raises UserError: it can't be used."""
        return find_env_spec(flags, actor_context(), flags.actor_timeout)

    def start(
        self, actor_class: Any, env_spec: EnvSpec, buffers: Any, saved: Any
    ) -> list[children.Child]:
        """Starts the processes. Returns them by the actor's index."""
        first = ranks.rank() * self.flags.num_actors  # each rank plays other games
        for i, steps in enumerate(self.steps):
            state, memory = saved and pickle.dumps(saved[i]), self.weights.memory
            about = actor_class, self.flags, env_spec, first + i, buffers, memory
            name = f"actor {first + i}"
            self.group.start(name, run_actor, *about, state, steps).steps = steps
        return list(self.group.alive)

    def timing_shares(self) -> dict[str, float]:
        """How the actors spent their time, on average."""
        known = [t for t in self.timings if t]
        return {k: statistics.fmean(t[k] for t in known) for k in (known or [{}])[0]}

    def start_unroll(self, index: int, slots: list[int]) -> int:
        """Makes an idle actor fill the slots. Returns the version of its weights."""
        self.idle.remove(index)
        self.watch.restart(self.children[index])
        bank, policy_version = self.weights.acquire()
        self.children[index].send(("unroll", index, slots, bank, policy_version))
        return policy_version

    def finished(self, timeout: float, wake_up: int) -> Iterator[tuple[int, list[int]]]:
        """Waits for actors and yields (index, slots) of each complete unroll.

        Waits for `timeout` seconds, or until the file descriptor `wake_up` is readable.
        Raises UserError: an actor died, raised, or took no step for --actor_timeout.
        """
        for child in children.wait(self.group.alive, timeout, [wake_up]):
            for _, index, slots, timings in self._receive(child):
                self.idle.append(index)
                self.timings[index] = timings
                yield index, slots
        self.watch.check(c for i, c in enumerate(self.children) if i not in self.idle)

    def save(self) -> list[dict[str, Any]]:
        """Returns the states of all actors, for an exact resume. All must be idle."""
        for child in self.children:
            child.send(("save",))
        states = []
        for child in self.children:
            if not children.wait([child], self.watch.timeout):
                child.fail_stuck(self.watch.timeout)
            ((_, state),) = self._receive(child)
            states.append(pickle.loads(state))
        return states

    def num_steps(self) -> int:
        """Environment steps taken since the start."""
        return int(self.steps.sum()) * self.flags.envs_per_actor

    def close(self) -> None:
        """Ends all processes and the programs that their environments have started."""
        for child in self.group.alive:
            child.pipe.close()  # asks it to exit
        self.group.end(STOP_SECONDS)
        self.group.close()

    def _receive(self, child: children.Child) -> Iterator[tuple]:
        """Yields the "done" and "saved" that have arrived from an actor."""
        while message := child.receive():
            if message[0] == "loaded":
                self.weights.release(message[1])
            elif message[0] == "log":
                log.log(*message[1:])
            else:
                yield message
