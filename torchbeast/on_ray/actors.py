"""MonoBeast's actors as Ray actors, on one machine or a cluster.

Ray places the actors, moves their rollouts through its object store and replaces dead
ones. Each Ray actor has an Actor of monobeast.py, with slots in its own process.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any

import ray
import torch

from torchbeast.base.errors import text_of
from torchbeast.base.nested import Nested, map_nested
from torchbeast.base.seeds import derive_seed
from torchbeast.base.seldom import Seldom
from torchbeast.core import rollout
from torchbeast.core.acting import SharedWeights
from torchbeast.local.actors import ActorGroup, make_envs
from torchbeast.on_ray.cluster import Cluster, ClusterError
from torchbeast.procs import processes
from torchbeast.runs.flagset import Flags

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
        self.warnings: list[tuple[str, str]] = []

    def node(self) -> str:
        """The address of the machine it runs on."""
        return ray.util.get_node_ip_address()

    def unroll(self, weights: list[ray.ObjectRef], policy_version: int) -> tuple:
        """One unroll.

        Args:
          weights: one reference to a bank of weights; it is fetched if it is new.

        Returns:
          The slots [E, ...] as NumPy, warnings, timings, and whether it is the first
          unroll of an actor that replaces a dead one.

        Raises:
          RuntimeError: the environments can't be made, or an exception in the unroll.
        """
        try:
            if self.actor is None:
                actor_class, flags, index = self.arguments
                env = make_envs(flags, index)
                env.on_warning = lambda *warning: self.warnings.append(warning)
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
        warnings, self.warnings = self.warnings, []
        is_replacement, self.replaces_a_dead_one = self.replaces_a_dead_one, False
        return rollouts, warnings, self.actor.timings.shares(), is_replacement


class RayActors(ActorGroup):
    """The actors, seen from the learner: as local/actors.py's Actors.

    Args:
      saved: None, because --sync is refused.

    Raises:
      UserError: no cluster is at flags.ray_address, or it has no room for the actors.
    """

    def __init__(
        self,
        actor_class: Callable[..., Any],
        flags: Flags,
        buffers: dict[str, Nested],
        weights: SharedWeights,
        saved: None,
    ) -> None:
        super().__init__(flags)
        self.buffers, self.weights = buffers, weights
        self._num_unrolls = 0
        # By reference: number, slots, and the time at which the unroll began.
        self._running: dict[Any, tuple[int, list[int], float]] = {}
        self._may_warn = Seldom(flags.actor_timeout)  # of an actor's silence
        self._last_unroll = 0.0  # the time at which one was complete
        self._put: tuple[int, list[Any]] = (-1, [])  # version, [reference]
        self._done = processes.WakePipe()
        specs = map_nested(lambda x: rollout.Spec(tuple(x.shape[1:]), x.dtype), buffers)
        shape = tuple(weights.memory.shape)
        self._cluster = Cluster(flags)
        self._cluster.start(
            Player,
            [(actor_class, flags, index, shape, specs) for index in self.idle],
            "actor_timeout",
        )

    def start_unroll(self, index: int, slots: list[int]) -> None:
        """Makes an idle actor fill the slots with the newest weights."""
        self._cluster.check()
        self.idle.remove(index)
        bank, version = self.weights.acquire()
        if version != self._put[0]:
            self._put = version, [ray.put(self.weights.memory[bank].numpy())]
        self.weights.release(bank)
        reference = self._cluster.actors[index].unroll.remote(self._put[1], version)
        self._running[reference] = index, slots, time.monotonic()
        reference.future().add_done_callback(lambda future: self._done.wake())

    def finished(self, timeout: float, wake_up: int) -> Iterator[tuple[int, list[int]]]:
        """Waits for actors and yields (index, slots) of each complete unroll.

        Raises:
          ClusterError: an unroll raised, there was none for --actor_timeout s, or one
            of Ray's processes has died.
        """
        waking: list[Any] = [self._done.reader, wake_up, *self._cluster.links]
        connection.wait(waking, timeout)
        self._cluster.check()
        self._done.drain()
        references = list(self._running)
        done, _ = ray.wait(references, num_returns=len(references), timeout=0)
        for reference in done:
            index, slots, _ = self._running.pop(reference)
            result = self._cluster.get(reference, f"actor {index}")
            rollouts, warnings, self.timings[index], is_replacement = result
            if is_replacement:
                log.warning("Actor %d has died. Ray has replaced it.", index)
            for warning in warnings:
                self.warn_once(*warning)

            def copy(buffer: torch.Tensor, x: Any, slots: list[int] = slots) -> None:
                buffer[slots] = torch.from_numpy(x.copy())

            map_nested(copy, self.buffers, rollouts)
            self._num_unrolls += 1
            self._last_unroll = time.monotonic()
            self.idle.append(index)
            yield index, slots
        self._check_silence()

    def _check_silence(self) -> None:
        """Warns of actors without a complete unroll; raises if all are like that."""
        now, limit = time.monotonic(), self.flags.actor_timeout
        why = "Ray may have no room for it, or its environments are slow"
        silent = [i for i, _, begun in self._running.values() if now - begun > limit]
        if silent and now - self._last_unroll > limit:
            raise ClusterError(
                f"no actor has completed an unroll for {limit:g} s. {why}. Add "
                "machines, or raise --actor_timeout"
            )
        for index in silent:
            if self._may_warn(str(index)):
                log.warning("Actor %d: no unroll for %g s. %s.", index, limit, why)

    def num_steps(self) -> int:
        """Environment steps taken since the start."""
        steps = self.flags.unroll_length * self.flags.envs_per_actor
        return self._num_unrolls * steps

    def close(self) -> None:
        self._cluster.close()
