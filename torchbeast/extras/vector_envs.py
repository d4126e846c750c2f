"""Native vector environments: E environments in one object, stepped by one call.

docs/environments.md is the manual.
"""

import argparse
import functools
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from torchbeast.base import named
from torchbeast.base.errors import FlagError, needing
from torchbeast.base.nested import flatten, map_nested
from torchbeast.envs import checks, make_env
from torchbeast.envs.action_masks import check_spaces
from torchbeast.envs.extra_fields import EXTRA_FIELDS, gather, look_at_reset
from torchbeast.extras.old_gym import takes
from torchbeast.extras.several_agents import ParallelGames, makes_parallel

ENVPOOL = "envpool:"

# Called with the environment, a key and a message for each suspect value.
Warn = Callable[[int, str, str], None]


def find_vector_env(
    flags: argparse.Namespace, render_mode: str | None = None
) -> Callable[[int | None, Warn], Any] | None:
    """How to make E environments in one object; None if --env is a single one.

    Without E it makes one, or the agents of one game.

    Raises:
      FlagError: a flag that needs single environments.
      InvalidEnvironmentError: it can't be rendered.
    """
    name = flags.env
    arguments = json.loads(flags.env_kwargs or "{}")
    wraps = flags.wrapper or flags.mask_actions
    make: Callable[[int, int], Any]
    if name.startswith(ENVPOOL):
        make = functools.partial(_envpool, name.removeprefix(ENVPOOL), arguments)
    elif make_env.names_python(name):
        function = named.find_object(f"--env {name}", name)
        if not takes(function, "num_envs"):
            if makes_parallel(name, function):
                return functools.partial(ParallelGames, flags, render_mode)
            return None

        def make(num_envs: int, seed: int) -> Any:
            return named.call_named(
                f"--env {name}", function, **{"num_envs": num_envs, **arguments}
            )
    else:
        return None
    if wraps or render_mode:
        error = FlagError if wraps else checks.InvalidEnvironmentError
        raise error(
            f"--env {name} makes several environments at once, but --wrapper, "
            "--mask_actions, --video and test_render need single ones: leave them out"
        )
    return functools.partial(VectorGames, name, make)


def _envpool(task: str, arguments: dict[str, Any], num_envs: int, seed: int) -> Any:
    with needing(f"--env {ENVPOOL}{task}", "envpool"):
        envpool = importlib.import_module("envpool")
    if task not in envpool.list_all_envs():
        raise FlagError(
            f"--env {ENVPOOL}{task}: EnvPool has no {task}; envpool.list_all_envs() "
            "has the names"
        )
    arguments = {"num_threads": 1, **arguments}
    return envpool.make(
        task, env_type="gymnasium", num_envs=num_envs, seed=seed, **arguments
    )


class VectorGames:
    """Adapts a vector environment (EnvPool, Gymnasium) to SAME_STEP autoreset.

    Their own mode may be SAME_STEP or DISABLED; also NEXT_STEP if some environments can
    be reset alone, which drops the extra step: EnvPool, SyncVectorEnv, and
    AsyncVectorEnv with shared memory.

    Args:
      name: --env, for messages.
      make: makes them, given their number and a seed. EnvPool needs the seed then.
      warn: called for each suspect value.

    Raises:
      InvalidEnvironmentError: they can't be used; the message says why.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[int, int], Any],
        num_envs: int | None,
        warn: Warn,
    ) -> None:
        self.num_envs = num_envs = num_envs or 1
        self._run = checks.own_context()
        self._make = functools.partial(self._run, make, num_envs)
        self.env = self._make(0)
        if not isinstance(self.env, gymnasium.vector.VectorEnv):
            raise checks.InvalidEnvironmentError(
                f"--env {name} was called with num_envs and returned "
                f"{checks.describe(self.env)}, not a gymnasium.vector.VectorEnv"
            )
        if self.env.num_envs != num_envs:
            raise checks.InvalidEnvironmentError(
                f"--env {name} was asked for {num_envs} environments (num_envs) and "
                f"made {self.env.num_envs}"
            )
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
            raise checks.InvalidEnvironmentError(
                f"--env {name} has the autoreset mode {getattr(mode, 'value', mode)}: "
                "make it with autoreset_mode=AutoresetMode.DISABLED (an AsyncVectorEnv "
                "with shared memory may keep NEXT_STEP) "
                "(gymnasium.make_vec: in vector_kwargs). Your own class may have "
                "SAME_STEP or DISABLED"
            )
        space, actions = self.env.single_observation_space, self.env.single_action_space
        check_spaces(space, actions)
        self.single_observation_space, self.single_action_space = space, actions
        self._checker = checks.Checker(
            name,
            space,
            lambda key, message: warn(max(0, self._checker.number), key, message),
            num_envs,
        )

    def reset(self, seed: Sequence[int]) -> tuple[Any, dict[str, Any]]:
        """Starts new games; one seed per environment.

        Raises:
          InvalidEnvironmentError: it returns a value that can't be stored.
        """
        arguments: dict[str, Any] = {}
        if self.is_envpool:
            self._run(self.env.close)
            self.env = self._make(seed[0])
        else:
            arguments["seed"] = list(seed) if self.is_gymnasium else int(seed[0])
        result = self._checker.call("reset", self._run, self.env.reset, **arguments)
        look_at_reset(result[1], self._checker.warn)
        return result

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        """As Gymnasium's SAME_STEP mode, with final_info["game_over"].

        Raises:
          InvalidEnvironmentError: it returns a value that can't be stored.
        """
        observation, reward, *ends, info = self._checker.call(
            "step", self._run, self.env.step, actions
        )
        # Some return integers, and ~ of an integer is no negation.
        terminated, truncated = (np.asarray(x) != 0 for x in ends)
        reward = np.array(reward)  # a reset may change the environments' own array
        done = terminated | truncated
        if done.any():
            final_obs, ended = info.get("final_obs"), info.get("final_info", {})
            if self.resets_itself and not isinstance(ended, Mapping):
                got = f"returned {checks.describe(ended)} as info['final_info']"
                self._checker.fail("step", f"{got}; it must be a dict of arrays")
            if not self.resets_itself:
                final_obs = map_nested(np.copy, observation)
                names = {key for x in EXTRA_FIELDS for key in (x, f"_{x}")}
                ended = {x: np.copy(info[x]) for x in names & info.keys()}
                observation, info = self._restart(observation, info, done)
            elif (cut := truncated & ~terminated).any():
                # The learner bootstraps from the values of these.
                final_obs = self._checker.read_last(final_obs, cut, observation)
            final = {"final_obs": final_obs, "final_info": {**ended, "game_over": done}}
            info = {**info, **final}
        return observation, reward, terminated, truncated, info

    def _restart(
        self, observation: Any, info: dict[str, Any], done: np.ndarray
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the environments where done; returns what all observe."""
        if self.is_envpool:  # returns these only
            new, new_info = self._run(self.env.reset, np.flatnonzero(done))
            place = np.cumsum(done) - 1
            new = map_nested(lambda x: x[place], new)
            names = EXTRA_FIELDS.keys() & new_info.keys()
            new_info = {name: new_info[name][place] for name in names}
        else:
            options, call = {"reset_mask": done}, self._checker.call
            new, new_info = call("reset", self._run, self.env.reset, options=options)
            pairs = zip(flatten(observation), flatten(new), strict=True)
            # NaN is not equal to itself.
            differ = (((a != b) & ((a == a) | (b == b)))[~done].any() for a, b in pairs)
            if any(differ):
                self._checker.warn(
                    "reset_mask",
                    f"reset(options={options}) also changes what environments observe "
                    "that are not in the mask. They must go on: one that it starts "
                    "anew has wrong episodes",
                )

        def join(old: np.ndarray, new: np.ndarray) -> np.ndarray:
            where = done.reshape(-1, *[1] * (old.ndim - 1))
            return np.where(where, new, old).astype(old.dtype, copy=False)

        sources = (info, ~done), (new_info, done)
        fields = {name: gather(name, *sources) for name in EXTRA_FIELDS}
        return map_nested(join, observation, new), fields

    def close(self) -> None:
        self._checker.close(self._run, self.env.close)
