"""--serial: MonoBeast acts and learns in one process and thread, for debuggers."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torchbeast.base.errors import FlagError
from torchbeast.base.flag import START, Group, flag


class Flags(Group):
    serial: bool = flag(False, "MonoBeast in one thread, for debuggers", START)


def resolve(flags: Any) -> None:
    if flags.serial and not hasattr(flags, "num_buffers"):
        raise FlagError("--serial is for MonoBeast")
    if flags.serial:
        flags.num_actors = 1


def actors_class(flags: Any) -> Any:
    return SerialActors if flags.serial else None


class SerialActors:
    """One actor, with the methods and attributes of Actors. `finished` lets it act."""

    num_learner_threads = 0

    @staticmethod
    def find_env_spec(flags: Any) -> Any:
        from torchbeast.envs.environment import example_environment
        from torchbeast.local.actors import TorchSettings
        from torchbeast.local.env_spec import spec_of

        with TorchSettings(), contextlib.closing(example_environment(flags)) as env:
            return spec_of(env)

    def __init__(
        self,
        actor_class: Callable[..., Any],
        flags: Any,
        env_spec: Any,
        buffers: dict[str, Any],
        weights: Any,
        saved: Any,
    ) -> None:
        import torch

        from torchbeast.envs.seeded_games import check_same_spaces
        from torchbeast.local.actors import make_envs

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
