"""MonoBeast's actors as Ray actors, on one machine or a cluster.

Ray places the actors, moves their rollouts through its object store and replaces dead
ones. Each Ray actor has an Actor of monobeast.py, with slots in its own process.
"""

import functools
import logging
import os
import sys
import time
from multiprocessing import connection
from typing import Any

import ray
import torch

from torchbeast.base.errors import text_of
from torchbeast.base.nested import map_nested
from torchbeast.base.seeds import derive_seed
from torchbeast.core import rollout
from torchbeast.extras.ray import cluster
from torchbeast.flags import Flags
from torchbeast.local.actors import Actors, make_envs
from torchbeast.procs import processes

log = logging.getLogger(__name__)


class Player:
    """One Ray actor: E environments and an Actor, which fills E slots.

    `shape` is that of the weights' memory, `specs` those of a slot's buffers.
    """

    def __init__(
        self, actor_class: Any, flags: Flags, index: int, shape: Any, specs: Any
    ) -> None:
        torch.set_num_threads(1)
        os.nice(5)  # the learner has priority
        cluster.limit_steps(flags.actor_timeout)
        context = ray.get_runtime_context()
        self.replaces_a_dead_one = context.was_current_actor_reconstructed
        if self.replaces_a_dead_one:
            # Don't repeat the games of the one that died.
            flags = flags.replace(seed=derive_seed(flags.seed, time.time_ns()))
        self.slots = list(range(flags.envs_per_actor))
        self.memory = torch.zeros(shape, dtype=torch.uint8)
        self.buffers = map_nested(
            lambda s: torch.zeros(len(self.slots), *s.shape, dtype=s.dtype), specs
        )
        self.arguments = actor_class, flags, index
        self.actor: Any = None

    def unroll(self, weights: list[ray.ObjectRef], policy_version: int) -> tuple:
        """Returns the slots [E, ...] as NumPy, timings, whether it replaces another.

        `weights` is one reference to a bank; it is fetched if it is new.
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

    def start(
        self, actor_class: Any, env_spec: Any, buffers: Any, saved: Any
    ) -> list[Any]:
        child, started = cluster.start_caller(
            *(self.group, call_ray, self.flags, actor_class),
            *(buffers, self.weights.memory, self.steps),
        )
        child.steps = self.steps[0]
        log.info("%s", started)
        return [child] * self.flags.num_actors


def call_ray(
    flags: Flags, actor_class: Any, buffers: Any, memory: Any, steps: Any, pipe: Any
) -> None:
    """The main function of the child, until the learner closes the pipe.

    All steps are counted in steps[0]. Raises ClusterError if an unroll raised.
    """
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
    running: dict[Any, tuple[int, list[int]]] = {}  # number and slots, by reference
    put_version, weights = -1, []
    done = processes.WakePipe()
    while True:
        if not connection.wait([done.reader, pipe], 1.0):
            ray.put(None)  # Ray ends this process if the raylet has died
        while pipe.poll():
            _, index, slots, bank, version = pipe.recv()
            if version != put_version:
                put_version, weights = version, [ray.put(memory[bank].numpy())]
            pipe.send(("loaded", bank))
            reference = players[index].unroll.remote(weights, version)
            running[reference] = index, slots
            reference.future().add_done_callback(lambda future: done.wake())
        done.drain()
        all_running = list(running)
        for reference in ray.wait(all_running, num_returns=len(running), timeout=0)[0]:
            index, slots = running.pop(reference)
            result = cluster.result(reference, f"actor {index}")
            rollouts, timings, is_replacement = result
            if is_replacement:
                words = f"Actor {index} has died. Ray has replaced it."
                pipe.send(("log", logging.WARNING, words))
            map_nested(functools.partial(copy, slots), buffers, rollouts)
            steps[0] += flags.unroll_length
            pipe.send(("done", index, slots, timings))


def copy(slots: list[int], buffer: torch.Tensor, x: Any) -> None:
    buffer[slots] = torch.from_numpy(x.copy())
