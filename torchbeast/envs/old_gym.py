"""Environments of the old Gym API, adapted to Gymnasium."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from torchbeast.envs.checks import (
    InvalidEnvironmentError,
    UnsupportedSpaceError,
    describe,
)

log = logging.getLogger(__name__)


def takes(function: Callable, parameter: str, keywords: bool = False) -> bool:
    """Whether `function` has a parameter of this name, or **keywords if they count."""
    try:
        parameters = inspect.signature(function).parameters
        kinds = {x.kind for x in parameters.values()} if keywords else set()
        return parameter in parameters or inspect.Parameter.VAR_KEYWORD in kinds
    except (TypeError, ValueError):  # written in C, has no signature
        return False


def has_old_api(env: Any) -> bool:
    """Whether `env` follows the old Gym API. May call reset() to find out."""
    if not isinstance(env, gymnasium.Env):
        return True
    inner = env.unwrapped.reset
    if not takes(inner, "seed", keywords=True) or takes(env.reset, "return_info"):
        return True
    if not takes(inner, "seed"):  # **kwargs: it may pass them on to an old one
        try:
            env.reset(seed=0)
        except TypeError:
            return True
        except Exception as error:
            log.warning(
                "%s: reset(seed=0) raised %s: %s. It is treated as one of the old Gym "
                "API, which is seeded only if it has a method seed().",
                *(type(env.unwrapped).__name__, type(error).__name__, error),
            )
            return True
    return not _is_observation_and_info(env.reset(), env.observation_space)


def _is_observation_and_info(result: Any, space: spaces.Space) -> bool:
    """Whether reset() returned (observation, info), and not only an observation."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    return (
        is_pair
        and isinstance(result[1], dict)
        and not (isinstance(space, spaces.Tuple) and space.contains(result))
    )


class OldGymAdapter(gymnasium.Env):
    """Adapts an environment of the old Gym API to Gymnasium's.

    Accepts reset() with or without seed and info, seed(), step() with four or five
    values, info["TimeLimit.truncated"], render(mode), and spaces of the gym package,
    which is not imported here.
    """

    def __init__(self, env: Any, render_mode: str | None = None, name: str = ""):
        self.env = env
        self.name = name
        self.render_mode = render_mode
        self.metadata = {"render_modes": [render_mode] if render_mode else []}
        self.observation_space = convert_space(env.observation_space)
        self.action_space = convert_space(env.action_space)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        arguments = {}
        if seed is not None and self._reset_takes_seed():
            arguments["seed"] = seed
        elif seed is not None and hasattr(self.env, "seed"):
            self.env.seed(seed)
        result = self.env.reset(**arguments)
        self._show()
        if _is_observation_and_info(result, self.observation_space):
            return result
        return result, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if isinstance(self.action_space, spaces.Discrete):
            action = int(action)  # some environments check the type
        result = self.env.step(action)
        self._show()
        count = len(result) if isinstance(result, tuple | list) else 0
        if count == 5:
            return tuple(result)
        if count != 4:
            raise InvalidEnvironmentError(
                f"--env {self.name}: step() returned {describe(result)}. step(action) "
                "must return observation, reward, terminated, truncated, info, or, in "
                "the old Gym API, observation, reward, done, info"
            )
        observation, reward, done, info = result
        if not isinstance(info, dict):
            raise InvalidEnvironmentError(
                f"--env {self.name}: step() returned {describe(info)} as info; it must "
                "be a dict"
            )
        truncated = bool(info.get("TimeLimit.truncated", False))
        return observation, reward, bool(done) and not truncated, truncated, info

    def _reset_takes_seed(self) -> bool:
        if takes(self.env.reset, "seed"):
            return True
        # A wrapper's reset(**kwargs) passes on what it gets.
        inner = getattr(self.env, "unwrapped", self.env)
        return takes(self.env.reset, "seed", keywords=True) and takes(
            inner.reset, "seed"
        )

    def _show(self) -> None:
        # As Gymnasium's environments do, and those of the newest gym by themselves.
        draws_itself = getattr(self.env, "render_mode", None) == "human"
        if self.render_mode == "human" and not draws_itself:
            self.render()

    def render(self) -> Any:
        if self.render_mode is not None and takes(self.env.render, "mode"):
            return self.env.render(mode=self.render_mode)
        return self.env.render()

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()


def convert_space(space: Any) -> spaces.Space:
    """Converts a space of the gym package, or one named like it, to Gymnasium.

    Raises:
      UnsupportedSpaceError: Gymnasium has no such space.
    """
    if isinstance(space, spaces.Space):
        return space
    kind = type(space).__name__.removesuffix("Space")  # Crafter: BoxSpace
    if kind == "Box":
        dtype = np.dtype(space.dtype).type
        return spaces.Box(space.low, space.high, space.shape, dtype)
    if kind == "Discrete":
        return spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(space.nvec)
    if kind == "MultiBinary":
        return spaces.MultiBinary(space.n)
    if kind == "Dict":
        return spaces.Dict({k: convert_space(s) for k, s in space.spaces.items()})
    if kind == "Tuple":
        return spaces.Tuple([convert_space(s) for s in space.spaces])
    raise UnsupportedSpaceError(
        f"{space!r} has the type {type(space)}; allowed are Box, Discrete, "
        "MultiDiscrete, MultiBinary, Dict, Tuple"
    )
