"""MonoBeast's actors as Ray actors, on one machine or a cluster.

Ray places the actors, moves their rollouts through its object store and replaces dead
ones. Each Ray actor has an Actor of monobeast.py, with slots in its own process.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import ray
import torch

from torchbeast.base.errors import text_of
from torchbeast.base.nested import Nested, map_nested
from torchbeast.base.seeds import derive_seed
from torchbeast.base.seldom import Seldom
from torchbeast.core import rollout
from torchbeast.extras.ray import cluster
from torchbeast.flags import Flags
from torchbeast.local.actors import Actors, make_envs
from torchbeast.procs import children, processes

log = logging.getLogger(__name__)


class Player:
    """One Ray actor: E environments and an Actor, which fills E slots.

    Args:
      actor_class: monobeast.Actor.
      memory_shape: of the weights' memory, see SharedWeights.
      specs: shape and dtype of a slot, nested as the buffers are.
    """

    def __init__(
        self,
        actor_class: Callable[..., Any],
        flags: Flags,
        index: int,
        memory_shape: tuple[int, ...],
        specs: dict[str, Nested],
    ) -> None:
        torch.set_num_threads(1)
        os.nice(5)  # the learner has priority
        self.replaces_a_dead_one = (
            ray.get_runtime_context().was_current_actor_reconstructed
        )
        if self.replaces_a_dead_one:
            # Don't repeat the games of the one that died.
            flags = flags.replace(seed=derive_seed(flags.seed, time.time_ns()))
        self.slots = list(range(flags.envs_per_actor))
        self.memory = torch.zeros(memory_shape, dtype=torch.uint8)
        self.buffers = map_nested(
            lambda s: torch.zeros(len(self.slots), *s.shape, dtype=s.dtype), specs
        )
        self.arguments = actor_class, flags, index
        self.actor: Any = None

    def unroll(self, weights: list[ray.ObjectRef], policy_version: int) -> tuple:
        """One unroll.

        Args:
          weights: one reference to a bank of weights; it is fetched if it is new.

        Returns:
          The slots [E, ...] as NumPy, timings, and whether it is the first
          unroll of an actor that replaces a dead one.

        Raises:
          RuntimeError: the environments can't be made, or an exception in the unroll.
        """
        try:
            if self.actor is None:
                actor_class, flags, index = self.arguments
                env = make_envs(flags, index)
                self.actor = actor_class(flags, env, self.buffers, self.memory, index)
                self.actor.policy_version = -1
            self.actor.timings.reset()
            if policy_version != self.actor.policy_version:
                self.memory[0] = torch.from_numpy(ray.get(weights[0]).copy())
                self.actor.load_weights(0, policy_version)
            self.actor.unroll(self.slots)
        except Exception as error:  # may be one that Ray can't pickle
            raise RuntimeError(text_of(error)) from None
        rollouts = map_nested(torch.Tensor.numpy, self.buffers)
        is_replacement, self.replaces_a_dead_one = self.replaces_a_dead_one, False
        return rollouts, self.actor.timings.shares(), is_replacement


class RayActors(Actors):
    """Actors whose processes Ray has started: one child calls Ray for all of them."""

    def _start(self, saved: Any) -> None:
        actor_class, _, buffers = self._arguments
        self.watch.timeout *= 2  # the child itself raises in time
        child, started = cluster.start_caller(
            *(self._group, call_ray, self.flags, actor_class),
            *(buffers, self.weights.memory, self.steps),
        )
        child.steps = self.steps[0]
        self.children = [child] * self.flags.num_actors
        log.info("%s", started)


def call_ray(
    flags: Flags,
    actor_class: Callable[..., Any],
    buffers: dict[str, Nested],
    memory: torch.Tensor,
    steps: torch.Tensor,
    pipe: connection.Connection,
) -> None:
    """The main function of the child. All steps are counted in steps[0]."""
    torch.set_num_threads(1)
    # The script's own classes: in this process it is not __main__, and in others it may
    # be missing.
    ray.cloudpickle.register_pickle_by_value(sys.modules[actor_class.__module__])
    specs = map_nested(lambda x: rollout.Spec(tuple(x.shape[1:]), x.dtype), buffers)
    shape = tuple(memory.shape)
    arguments = [(actor_class, flags, i, shape, specs) for i in range(flags.num_actors)]
    limit = "actor_timeout", flags.actor_timeout
    players, started = cluster.start_actors(Player, arguments, *limit)
    pipe.send(started)
    Unrolls(players, flags, buffers, memory, steps[0], pipe).run()


class Unrolls:
    """The unrolls in progress.

    Args:
      steps: counts the environment steps.
      pipe: to the learner; see Actors for the messages.
    """

    def __init__(
        self,
        players: list[Any],
        flags: Flags,
        buffers: dict[str, Nested],
        memory: torch.Tensor,
        steps: torch.Tensor,
        pipe: connection.Connection,
    ) -> None:
        self.players, self.flags, self.buffers = players, flags, buffers
        self.memory, self.steps, self.pipe = memory, steps, pipe
        self._watch = children.StepWatch(flags.actor_timeout)  # only for its clock
        # By reference: number, slots, and the clock when the unroll began.
        self._running: dict[Any, tuple[int, list[int], float]] = {}
        self._may_warn = Seldom(flags.actor_timeout)  # of an actor's silence
        self._last_unroll = 0.0  # the clock when one was complete
        self._put: tuple[int, list[Any]] = (-1, [])  # version, [reference]
        self._done = processes.WakePipe()

    def run(self) -> None:
        """Ends by an exception: EOFError if the learner closes the pipe.

        Raises:
          ClusterError: an unroll raised, or there was none for --actor_timeout s.
        """
        while True:
            if not connection.wait([self._done.reader, self.pipe], 1.0):
                ray.put(None)  # Ray ends this process if the raylet has died
            self._watch.check([])
            while self.pipe.poll():
                self._begin(*self.pipe.recv())
            self._done.drain()
            references = list(self._running)
            done, _ = ray.wait(references, num_returns=len(references), timeout=0)
            for reference in done:
                self._finish(reference)
            self._check_silence()

    def _begin(
        self, _: str, index: int, slots: list[int], bank: int, version: int
    ) -> None:
        if version != self._put[0]:
            self._put = version, [ray.put(self.memory[bank].numpy())]
        self.pipe.send(("loaded", bank))
        reference = self.players[index].unroll.remote(self._put[1], version)
        self._running[reference] = index, slots, self._watch.awake
        reference.future().add_done_callback(lambda future: self._done.wake())

    def _finish(self, reference: Any) -> None:
        index, slots, _ = self._running.pop(reference)
        result = cluster.result(reference, f"actor {index}")
        rollouts, timings, is_replacement = result
        if is_replacement:
            self._warn(f"Actor {index} has died. Ray has replaced it.")

        def copy(buffer: torch.Tensor, x: Any) -> None:
            buffer[slots] = torch.from_numpy(x.copy())

        map_nested(copy, self.buffers, rollouts)
        self.steps += self.flags.unroll_length
        self._last_unroll = self._watch.awake
        self.pipe.send(("done", index, slots, timings))

    def _warn(self, message: str) -> None:
        self.pipe.send(("log", logging.WARNING, message))

    def _check_silence(self) -> None:
        """Warns of actors without a complete unroll; raises if all are like that."""
        now, limit = self._watch.awake, self._watch.timeout
        why = "Ray may have no room for it, or its environments are slow"
        silent = [i for i, _, begun in self._running.values() if now - begun > limit]
        if silent and now - self._last_unroll > limit:
            raise cluster.ClusterError(
                f"no actor has completed an unroll for {limit:g} s. {why}. Add "
                "machines, or raise --actor_timeout"
            )
        for index in silent:
            if self._may_warn(str(index)):
                self._warn(f"Actor {index}: no unroll for {limit:g} s. {why}.")
