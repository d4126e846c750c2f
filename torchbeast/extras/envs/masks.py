"""--mask_actions: the environment's info says which actions are possible."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from torchbeast.envs.values import MASK, InvalidEnvironmentError, add_part, num_options


class MaskFromInfo(gymnasium.Wrapper):
    """Adds info["action_mask"] to the observation; one array, or one per choice."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        mask = spaces.MultiBinary(sum(num_options(env.action_space)) or 1)
        parts = add_part(env.observation_space, MASK, mask)
        self.observation_space = spaces.Dict(parts)

    def add_mask(self, observation: Any, info: dict[str, Any]) -> dict[str, Any]:
        if MASK not in info:
            raise InvalidEnvironmentError(f"--mask_actions: no {MASK} in {info!r:.200}")
        given = info[MASK] if isinstance(info[MASK], tuple | list) else [info[MASK]]
        mask = np.concatenate([np.asarray(part).reshape(-1) for part in given])
        return add_part(observation, MASK, (mask != 0).astype(np.int8))

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**arguments)
        return self.add_mask(observation, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        masked = self.add_mask(observation, info)
        return masked, reward, terminated, truncated, info
