"""--serial: environments and actor in the learner's thread, for debuggers."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torchbeast.base.nested import Nested
from torchbeast.core.weights import SharedWeights
from torchbeast.envs.environment import example_environment
from torchbeast.envs.seeded_games import check_same_spaces
from torchbeast.flags import Flags
from torchbeast.local.actors import TorchSettings, make_envs
from torchbeast.local.env_spec import EnvSpec, spec_of


class SerialActors:
    """One actor, with the methods and attributes of Actors. `finished` lets it act."""

    @staticmethod
    def find_env_spec(flags: Flags) -> EnvSpec:
        with TorchSettings(), contextlib.closing(example_environment(flags)) as env:
            return spec_of(env)

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
        self.idle, self._slots = [0], list[int]()
        with torch.random.fork_rng(devices=[]):  # as if it had a process of its own
            env = make_envs(flags, 0)
            check_same_spaces(flags.env, env_spec, env)
            self.actor = actor_class(flags, env, buffers, weights.memory)
            if saved:
                self.actor.load_state_dict(saved[0])

    def start_unroll(self, index: int, slots: list[int]) -> int:
        """Loads the newest weights. Returns their number of updates."""
        self.idle, self._slots = [], slots
        bank, policy_version = self.weights.acquire()
        self.actor.timings.reset()
        self.actor.load_weights(bank, policy_version)
        self.weights.release(bank)
        return policy_version

    def finished(self, timeout: float, wake_up: int) -> Iterator[tuple[int, list[int]]]:
        """Fills the slots of the unroll that was started, if there is one."""
        if not self.idle:
            self.actor.unroll(self._slots)
            self.idle.append(0)
            yield 0, self._slots

    def save(self) -> list[dict[str, Any]]:
        return [self.actor.state_dict()]

    def num_steps(self) -> int:
        return int(self.actor.num_steps) * self.flags.envs_per_actor

    def timing_shares(self) -> dict[str, float]:
        return self.actor.timings.shares()

    def close(self) -> None:
        self.actor.env.close()
