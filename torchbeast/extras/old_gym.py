"""Environments of the old Gym API, adapted to Gymnasium."""

import inspect
import json
import shlex
import sys
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium import spaces

from torchbeast.envs.checks import raised_by_call
from torchbeast.envs.space_checks import plain_space


def takes(function: Callable, parameter: str) -> bool:
    """Whether `function` has a parameter of this name."""
    try:
        return parameter in inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C, has no signature
        return False


def advice(name: str) -> str:
    """How to name an id that its package registers with the old gym; else ""."""
    try:
        spec: Any = sys.modules["gym"].spec(name.rpartition(":")[2])
        arguments = getattr(spec, "kwargs", None) or getattr(spec, "_kwargs", {})
        words = ["--env", spec.entry_point, "--env_kwargs", json.dumps(arguments)]
        command = shlex.join(words)
    except Exception:  # no gym, no such id, or no MODULE:CLASS
        return ""
    return f"the old gym has this id; give {command}. In Gymnasium "


def adapt(env: Any, render_mode: str | None = None) -> gymnasium.Env:
    """The environment, in an adapter if it has the old Gym API. Calls its reset()."""
    for first in (True, False):
        try:
            result = env.reset(seed=0)
            break
        except Exception as error:  # twice: else the next reset() raises it again
            takes_no_seed = isinstance(error, TypeError) and raised_by_call(error)
            if takes_no_seed or not first:
                return OldGymAdapter(env, render_mode, takes_seed=False)
    is_pair = _is_observation_and_info(result, env.observation_space)
    both = env.observation_space, env.action_space  # they may be of the gym package
    has_spaces = all(isinstance(x, spaces.Space) for x in both)
    if is_pair and has_spaces and isinstance(env, gymnasium.Env):
        return env
    return OldGymAdapter(env, render_mode, takes_seed=True)


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

    def __init__(self, env: Any, render_mode: str | None, takes_seed: bool):
        self.env = env
        self.takes_seed = takes_seed
        self.render_mode = render_mode
        self.metadata = {"render_modes": [render_mode] if render_mode else []}
        self.observation_space = plain_space(env.observation_space)
        self.action_space = plain_space(env.action_space)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None and callable(getattr(self.env, "seed", None)):
            self.env.seed(seed)
        is_seeded = seed is not None and self.takes_seed
        result = self.env.reset(seed=seed) if is_seeded else self.env.reset()
        self._show()
        if _is_observation_and_info(result, self.observation_space):
            return result
        return result, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if isinstance(self.action_space, spaces.Discrete):
            action = int(action)  # some environments check the type
        result = tuple(self.env.step(action))
        self._show()
        if len(result) != 4 or not isinstance(result[3], dict):
            return result  # a new one, or one that the checks refuse
        observation, reward, done, info = result
        truncated = bool(info.get("TimeLimit.truncated", False))
        return observation, reward, bool(done) and not truncated, truncated, info

    def _show(self) -> None:
        # As Gymnasium's environments do, and those of the newest gym by themselves.
        draws_itself = getattr(self.env, "render_mode", None) == "human"
        if self.render_mode == "human" and not draws_itself:
            self.render()

    def render(self) -> Any:
        if takes(self.env.render, "mode"):
            return self.env.render(mode=self.render_mode)
        return self.env.render()

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()
