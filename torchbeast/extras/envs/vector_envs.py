"""Native vector environments: E environments in one object, stepped by one call.

--env envpool:TASK, or a function with a parameter num_envs: docs/environments.md.
"""

import argparse
import functools
import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from torchbeast.base.errors import FlagError, needing
from torchbeast.base.named import find_object
from torchbeast.base.nested import Nested, flatten, map_nested
from torchbeast.envs.extra_fields import EXTRA_FIELDS, gather
from torchbeast.envs.make_env import call, names_python, takes
from torchbeast.envs.values import InvalidEnvironmentError, check_mask, describe, read

ENVPOOL = "envpool:"


def vector_maker(
    flags: argparse.Namespace, render_mode: str | None, index: int
) -> Callable[[int | None], Any] | None:
    """How to make E environments in one object; None if --env is a single one."""
    flag, name = f"--env {flags.env}", flags.env
    arguments = json.loads(flags.env_kwargs or "{}")
    make: Callable[[int, int], Any]
    if name.startswith(ENVPOOL):
        make = functools.partial(_envpool, name.removeprefix(ENVPOOL), arguments)
    elif names_python(name) and takes(function := find_object(flag, name), "num_envs"):

        def make(num_envs: int, seed: int) -> Any:
            return call(flag, function, arguments, num_envs=num_envs, env_index=index)
    else:
        return None
    if flags.wrapper or flags.mask_actions or render_mode:
        raise FlagError(
            f"{flag} makes several environments at once; --wrapper, --mask_actions, "
            "--video and test_render need single ones: leave them out"
        )
    return lambda num_envs: VectorGames(name, make, num_envs or 1)


def _envpool(task: str, arguments: dict[str, Any], num_envs: int, seed: int) -> Any:
    with needing(f"--env {ENVPOOL}{task}", "envpool"):
        envpool = importlib.import_module("envpool")
    arguments = {"num_threads": 1, **arguments}
    return envpool.make(
        task, env_type="gymnasium", num_envs=num_envs, seed=seed, **arguments
    )


class VectorGames:
    """Adapts a vector environment (EnvPool, Gymnasium) to SAME_STEP autoreset.

    Their own mode may be SAME_STEP or DISABLED; also NEXT_STEP if some environments can
    be reset alone, which drops the extra step: EnvPool, SyncVectorEnv, and
    AsyncVectorEnv with shared memory.

    `make` makes them, given their number and a seed, which EnvPool needs then.
    """

    def __init__(
        self, name: str, make: Callable[[int, int], Any], num_envs: int
    ) -> None:
        self.name, self.num_envs = name, num_envs
        self._make = functools.partial(make, num_envs)
        self.env = self._make(0)
        is_vector = isinstance(self.env, gymnasium.vector.VectorEnv)
        if not is_vector or self.env.num_envs != num_envs:
            self._fail(f"num_envs={num_envs} gave {self.env!r:.200}")
        self.is_envpool = hasattr(self.env, "async_reset")
        inner = self.env.unwrapped
        is_async = isinstance(inner, AsyncVectorEnv)
        self.is_gymnasium = is_async or isinstance(inner, SyncVectorEnv)
        mode = self.env.metadata.get("autoreset_mode")
        if isinstance(inner, SyncVectorEnv):
            # Its own resets may overwrite the last observations.
            inner.autoreset_mode = mode = AutoresetMode.DISABLED
        self.resets_itself = mode is AutoresetMode.SAME_STEP
        allowed = {AutoresetMode.DISABLED}
        if not is_async:  # in this mode its last observations may be overwritten, too
            allowed.add(AutoresetMode.SAME_STEP)
        elif getattr(inner, "shared_memory", None):  # else resets leave the extra step
            allowed.add(AutoresetMode.NEXT_STEP)
        if not self.is_envpool and mode not in allowed:
            self._fail(
                f"the autoreset mode is {getattr(mode, 'value', mode)}. Make it with "
                "autoreset_mode=AutoresetMode.DISABLED (your class: or SAME_STEP)"
            )
        self.single_observation_space = self.env.single_observation_space
        self.single_action_space = self.env.single_action_space
        check_mask(self.single_observation_space, self.single_action_space)

    def _fail(self, what: str) -> NoReturn:
        raise InvalidEnvironmentError(f"--env {self.name}: {what}")

    def _read(self, observation: Any) -> Nested:
        arrays = read(self.single_observation_space, observation, (self.num_envs,))
        # A view that is flipped, for example, can't become a tensor.
        return map_nested(np.ascontiguousarray, arrays)

    def reset(self, seed: Sequence[int]) -> tuple[Any, dict[str, Any]]:
        """Starts new games; one seed per environment."""
        if self.is_envpool:
            self.env.close()
            self.env = self._make(seed[0])
            observation, info = self.env.reset()
        else:
            seeds = list(seed) if self.is_gymnasium else int(seed[0])
            observation, info = self.env.reset(seed=seeds)
        return self._read(observation), info

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        """As Gymnasium's SAME_STEP mode, with final_info["game_over"]."""
        observation, *numbers, info = self.env.step(actions)
        observation = self._read(observation)
        # A reset may change the environments' own arrays.
        reward, terminated, truncated = map(np.array, numbers)
        if {x.shape for x in (reward, terminated, truncated)} != {(self.num_envs,)}:
            found = ", ".join(map(describe, (reward, terminated, truncated)))
            self._fail(
                f"step() returned {found} as reward, terminated and truncated, not one "
                f"value for each of {self.num_envs} environments"
            )
        # Some return integers, and ~ of an integer is no negation.
        terminated, truncated = terminated != 0, truncated != 0
        done = terminated | truncated
        if done.any():
            final_obs, ended = info.get("final_obs"), info.get("final_info", {})
            if not self.resets_itself:
                final_obs = map_nested(np.copy, observation)
                names = {key for x in EXTRA_FIELDS for key in (x, f"_{x}")}
                ended = {x: np.copy(info[x]) for x in names & info.keys()}
                observation, info = self._restart(observation, info, done)
            elif (cut := truncated & ~terminated).any():
                if final_obs is None:
                    self._fail("it truncated without the last info['final_obs']")
                # The learner bootstraps from the values of these.
                final_obs = self._read_last(final_obs, cut, observation)
            final = {"final_obs": final_obs, "final_info": {**ended, "game_over": done}}
            info = {**info, **final}
        return observation, reward, terminated, truncated, info

    def _read_last(self, last: Any, cut: np.ndarray, observation: Nested) -> Nested:
        """The last observations where cut [E]; the others are of `observation`."""
        arrays = map_nested(np.copy, observation)
        is_each = isinstance(last, np.ndarray) and last.dtype.hasobject
        for e in np.flatnonzero(cut):
            one = last[e] if is_each else map_nested(lambda x, e=e: x[e], last)
            one = read(self.single_observation_space, one)
            for to, value in zip(flatten(arrays), flatten(one), strict=True):
                to[e] = value
        return arrays

    def _restart(
        self, observation: Any, info: dict[str, Any], done: np.ndarray
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the environments where done; returns what all observe."""
        if self.is_envpool:  # returns these only
            new, new_info = self.env.reset(np.flatnonzero(done))
            names = EXTRA_FIELDS.keys() & new_info.keys()
            place, new_info = np.cumsum(done) - 1, {x: new_info[x] for x in names}
            new, new_info = map_nested(lambda x: x[place], (new, new_info))
        else:
            new, new_info = self.env.reset(options={"reset_mask": done})
            new = self._read(new)

        def join(old: np.ndarray, new: np.ndarray) -> np.ndarray:
            where = done.reshape(-1, *[1] * (old.ndim - 1))
            return np.where(where, new, old).astype(old.dtype, copy=False)

        sources = (info, ~done), (new_info, done)
        fields = {name: gather(name, *sources) for name in EXTRA_FIELDS}
        return map_nested(join, observation, new), fields

    def close(self) -> None:
        self.env.close()
