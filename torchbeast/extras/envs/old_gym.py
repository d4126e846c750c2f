"""Environments of the old Gym API, adapted to Gymnasium: --env package.module:Class."""

import inspect
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from torchbeast.envs.make_env import takes


def adapt(env: Any, render_mode: str | None) -> Any:
    """The environment, in an adapter if it has the old Gym API."""
    both = [getattr(env, x, None) for x in ("observation_space", "action_space")]
    is_gymnasium = isinstance(env, gymnasium.Env)
    is_gymnasium &= all(isinstance(x, spaces.Space) for x in both)
    # reset(return_info) is of gym 0.22 to 0.25.
    if is_gymnasium and _takes_seed(env.reset) and not takes(env.reset, "return_info"):
        return env
    if None in map(_kind, both) or hasattr(env, "num_envs"):
        return env  # something else
    return OldGymAdapter(env, render_mode)


def _takes_seed(reset: Any) -> bool:
    found = inspect.signature(reset).parameters
    return "seed" in found or any(x.kind is x.VAR_KEYWORD for x in found.values())


def _kind(space: Any) -> str | None:
    """The kind of a space, by the names of its classes: gym is not imported here."""
    kinds = {kind.__name__.removesuffix("Space") for kind in type(space).__mro__}
    known = "Box", "Discrete", "MultiDiscrete", "MultiBinary", "Dict", "Tuple"
    return next((kind for kind in known if kind in kinds), None)


def to_gymnasium(space: Any) -> Any:
    """Gymnasium's space for one of the gym package, or like it."""
    kind = _kind(space)
    if kind == "Box":
        dtype: Any = np.dtype(space.dtype).type
        return spaces.Box(space.low, space.high, space.shape, dtype)
    if kind == "Discrete":
        return spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    if kind == "Dict":
        return spaces.Dict([(k, to_gymnasium(x)) for k, x in space.spaces.items()])
    if kind == "Tuple":
        return spaces.Tuple([to_gymnasium(x) for x in space.spaces])
    is_bits = kind == "MultiBinary"
    return spaces.MultiBinary(space.n) if is_bits else spaces.MultiDiscrete(space.nvec)


class OldGymAdapter(gymnasium.Env):
    """Gymnasium's API for reset() with or without seed and info, and 4 or 5 values."""

    def __init__(self, env: Any, render_mode: str | None) -> None:
        self.env, self.render_mode = env, render_mode
        self.metadata = {"render_modes": [render_mode] if render_mode else []}
        self.observation_space = to_gymnasium(env.observation_space)
        self.action_space = to_gymnasium(env.action_space)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        arguments = {"seed": seed} if _takes_seed(self.env.reset) else {}
        if seed is not None and callable(getattr(self.env, "seed", None)):
            self.env.seed(seed)
            arguments = {}
        result, space = self.env.reset(**arguments), self.observation_space
        self._show()
        is_pair = isinstance(result, tuple) and len(result) == 2
        is_pair = is_pair and isinstance(result[1], dict) and not space.contains(result)
        return result if is_pair else (result, {})

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if isinstance(self.action_space, spaces.Discrete):
            action = int(action)  # some environments check the type
        result = tuple(self.env.step(action))
        self._show()
        if len(result) == 5:
            return result
        observation, reward, done, info = result
        truncated = bool(info.get("TimeLimit.truncated", False))
        return observation, reward, bool(done) and not truncated, truncated, info

    def _show(self) -> None:
        draws_itself = getattr(self.env, "render_mode", None) == "human"
        if self.render_mode == "human" and not draws_itself:
            self.render()

    def render(self) -> Any:
        mode = {"mode": self.render_mode} if takes(self.env.render, "mode") else {}
        return self.env.render(**mode)

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()
