"""Native vector environments: E environments in one object, stepped by one call.

docs/environments.md is the manual.
"""

import argparse
import contextvars
import functools
import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from torchbeast.base.errors import FlagError
from torchbeast.base.nested import flatten, map_nested
from torchbeast.envs import atari
from torchbeast.envs.action_masks import check_mask
from torchbeast.envs.checks import Checker, InvalidEnvironmentError, describe
from torchbeast.envs.extra_fields import EXTRA_FIELDS
from torchbeast.envs.make_env import (
    MissingPackageError,
    UnknownEnvironmentError,
    call_signature_error,
    find_object,
    names_python,
    takes,
)
from torchbeast.envs.space_checks import check_action_space, check_observation_space

ENVPOOL = "envpool:"
# Truncated episodes that are more than chance, if observations are floats; and else.
MANY_FLOAT_SUSPECTS, MANY_SUSPECTS = 2, 8


# Called with the environment, a key and a message for each suspect value.
Warn = Callable[[int, str, str], None]


def find_vector_env(
    flags: argparse.Namespace,
) -> Callable[[int, Warn], Any] | None:
    """How to make E environments in one object; None if --env is a single one.

    These are:

        "PongNoFrameskip-v4"      with --atari_backend native
        "envpool:Id"              a task of EnvPool
        "package.module:name"     a function with a parameter num_envs

    Raises:
      FlagError: --wrapper or --mask_actions, which need single environments.
    """
    name, advice = flags.env, "leave them out"
    make: Callable[[int, Warn], Any]
    if atari.atari_game(name):
        if flags.atari_backend != "native":
            return None
        make, advice = functools.partial(_atari, flags), "add --atari_backend python"
    elif name.startswith(ENVPOOL):
        make = functools.partial(VectorGames, name, functools.partial(_envpool, flags))
    elif names_python(name):
        function = find_object(f"--env {name}", name)
        if not takes(function, "num_envs"):
            return None
        make = functools.partial(
            VectorGames, name, functools.partial(_from_function, flags, function)
        )
    else:
        return None
    if flags.wrapper or flags.mask_actions:
        raise FlagError(
            f"--wrapper and --mask_actions wrap single environments, and --env {name} "
            f"makes several at once: {advice}"
        )
    return make


def _atari(flags: argparse.Namespace, num_envs: int, warn: Warn) -> Any:
    if flags.env_kwargs:
        raise FlagError(f"for {flags.env}, --env_kwargs needs --atari_backend python")
    return atari.make_atari_vec(flags, num_envs)


def _envpool(flags: argparse.Namespace, num_envs: int, seed: int) -> Any:
    try:
        envpool = importlib.import_module("envpool")
    except ImportError as error:
        raise MissingPackageError(
            f"--env {flags.env} needs EnvPool ({error}): pip install envpool"
        ) from error
    task = flags.env.removeprefix(ENVPOOL)
    if task not in envpool.list_all_envs():
        raise UnknownEnvironmentError(
            f"--env {flags.env}: EnvPool has no {task}; envpool.list_all_envs() has "
            "the names"
        )
    arguments = {"num_threads": 1, **json.loads(flags.env_kwargs or "{}")}
    return envpool.make(
        task, env_type="gymnasium", num_envs=num_envs, seed=seed, **arguments
    )


def _from_function(
    flags: argparse.Namespace, function: Callable, num_envs: int, seed: int
) -> Any:
    arguments = {"num_envs": num_envs, **json.loads(flags.env_kwargs or "{}")}
    if error := call_signature_error(flags.env, function, arguments):
        raise error
    return function(**arguments)


class VectorGames:
    """Adapts a vector environment (EnvPool, Gymnasium) to SAME_STEP autoreset.

    Of each checked call, see env_checks.py, the values of one environment are checked.

    Their own mode may be SAME_STEP or DISABLED; also NEXT_STEP if some environments can
    be reset alone, which drops the extra step: EnvPool, SyncVectorEnv, AsyncVectorEnv.

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
        num_envs: int,
        warn: Warn,
    ) -> None:
        self.name, self.num_envs = name, num_envs
        # np.seterr() and the like have no effect outside of the context.
        self._run = contextvars.copy_context().run
        self._make = lambda seed: self._run(make, num_envs, seed)
        self.env = self._make(0)
        if not isinstance(self.env, gymnasium.vector.VectorEnv):
            raise InvalidEnvironmentError(
                f"--env {name} was called with num_envs and returned "
                f"{describe(self.env)}, not a gymnasium.vector.VectorEnv"
            )
        self.is_envpool = hasattr(self.env, "async_reset")
        mode = self.env.metadata.get("autoreset_mode")
        self.resets_itself = mode is AutoresetMode.SAME_STEP
        takes_mask = isinstance(self.env.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        usable = self.resets_itself or self.is_envpool or takes_mask
        if not usable and mode is not AutoresetMode.DISABLED:
            raise InvalidEnvironmentError(
                f"--env {name} has the autoreset mode {getattr(mode, 'value', mode)}, "
                "whose extra step is not one of a game. Make it with "
                "autoreset_mode=AutoresetMode.SAME_STEP or DISABLED "
                "(gymnasium.make_vec: in vector_kwargs)"
            )
        if self.env.num_envs != num_envs:
            raise InvalidEnvironmentError(
                f"--env {name} was asked for {num_envs} environments (num_envs) and "
                f"made {self.env.num_envs}"
            )
        self.single_observation_space = self.env.single_observation_space
        self.single_action_space = self.env.single_action_space
        check_observation_space(self.single_observation_space)
        check_action_space(self.single_action_space)
        check_mask(self.single_observation_space, self.single_action_space)
        self._checker = Checker(
            name,
            self.single_observation_space,
            lambda key, message: warn(self._checked, key, message),
        )
        self._checked = num_envs - 1  # the environment that was checked last
        self._until_check = 0
        # In SAME_STEP mode, to find last observations that are the next episode's.
        self._before: Any = None  # observation of the step before
        self._suspect_finals = 0
        self._doubts_finals = self.resets_itself and takes_mask

    def reset(self, seed: Sequence[int]) -> tuple[Any, dict[str, Any]]:
        """Starts new games; one seed per environment.

        Raises:
          InvalidEnvironmentError: it returns a value that can't be stored.
        """
        result = self._reset(seed)
        if self._check_is_due():
            self._checker.check("reset", result, self.num_envs, self._checked)
        result = self._checker.admit("reset", result, self.num_envs)
        self._before = map_nested(np.copy, result[0])
        return result

    def _reset(self, seed: Sequence[int]) -> tuple[Any, dict[str, Any]]:
        if self.is_envpool:
            self._run(self.env.close)
            self.env = self._make(seed[0])
            return self._run(self.env.reset)
        takes_list = isinstance(self.env.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        seeds = list(seed) if takes_list else int(seed[0])
        return self._run(self.env.reset, seed=seeds)

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        """As Gymnasium's SAME_STEP mode, with final_info["game_over"].

        Raises:
          InvalidEnvironmentError: it returns a value that can't be stored.
        """
        result = self._run(self.env.step, actions)
        if self._check_is_due():
            self._checker.check("step", result, self.num_envs, self._checked)
        result = self._checker.admit("step", result, self.num_envs)
        observation, reward, *ends, info = result
        # Some return integers, and ~ of an integer is no negation.
        terminated, truncated = (np.asarray(x) != 0 for x in ends)
        done = terminated | truncated
        if done.any():
            if self.resets_itself:
                final_obs, ended = info.get("final_obs"), info.get("final_info", {})
                if final_obs is None and (truncated & ~terminated).any():
                    raise InvalidEnvironmentError(
                        f"--env {self.name}: step() truncated an episode, but its info "
                        "lacks final_obs, the last observations. The learner needs "
                        "their values to bootstrap from"
                    )
                if self._doubts_finals:
                    self._check_finals(final_obs, observation, truncated)
            else:
                final_obs, ended = map_nested(np.copy, observation), info
                observation, info = self._restart(observation, info, done)
            final = {"final_obs": final_obs, "final_info": {**ended, "game_over": done}}
            info = {**info, **final}
        if self._doubts_finals:
            self._before = map_nested(np.copy, observation)
        return observation, reward, terminated, truncated, info

    def _check_finals(
        self, final: Any, observation: Any, truncated: np.ndarray
    ) -> None:
        """Raises if truncated episodes end with the first observations of the next.

        AsyncVectorEnv gives such ones if an environment reuses its array. The check
        ends with the first difference.
        """
        for e in np.flatnonzero(truncated):
            new, before = (
                map_nested(lambda x, e=e: x[e], x) for x in (observation, self._before)
            )
            is_list = isinstance(final, np.ndarray) and final.dtype == object
            last = final[e] if is_list else map_nested(lambda x, e=e: x[e], final)
            if not all(flatten(map_nested(np.array_equal, new, last))):
                self._doubts_finals = False
                return
            # An environment that always looks the same is right.
            if not all(flatten(map_nested(np.array_equal, new, before))):
                self._suspect_finals += 1
        is_float = any(x.dtype.kind == "f" for x in flatten(observation))
        many = MANY_FLOAT_SUSPECTS if is_float else MANY_SUSPECTS
        if self._suspect_finals >= many:
            raise InvalidEnvironmentError(
                f"--env {self.name}: the last observations of the first "
                f"{self._suspect_finals} truncated episodes are the first ones of the "
                "next episodes. The environment probably returns the same array each "
                "time (an alias), and AsyncVectorEnv in SAME_STEP mode does not copy "
                "it. Make it with autoreset_mode=AutoresetMode.DISABLED: then it is "
                "reset here. Or return copies"
            )

    def _restart(
        self, observation: Any, info: dict[str, Any], done: np.ndarray
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the environments where done; returns observations and infos of all."""

        def put(whole: np.ndarray, started: np.ndarray) -> np.ndarray:
            whole = whole.copy()
            whole[done] = started if self.is_envpool else started[done]
            return whole

        if self.is_envpool:
            new, new_info = self._run(self.env.reset, np.flatnonzero(done))
            observation = map_nested(put, observation, new)
        else:
            options = {"reset_mask": done}
            observation, new_info = self._run(self.env.reset, options=options)
        merged = dict(info)  # new_info has nothing about the other environments
        for name in EXTRA_FIELDS.keys() & new_info.keys():
            field = EXTRA_FIELDS[name]
            none = np.zeros((self.num_envs, *field.shape), field.dtype)
            merged[name] = put(info.get(name, none), new_info[name])
            had = info.get(f"_{name}", np.full(self.num_envs, name in info))
            merged[f"_{name}"] = had | done  # Gymnasium's mask of valid values
        return observation, merged

    def _check_is_due(self) -> bool:
        """Counts a call. If it is one to check, it is the next environment's turn."""
        self._until_check -= 1
        if self._until_check >= 0:
            return False
        self._until_check = self._checker.until_next()
        self._checked = (self._checked + 1) % self.num_envs
        return True

    def close(self) -> None:
        self._run(self.env.close)
