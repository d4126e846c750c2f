"""Masks in observations: which actions are possible now, and which steps count.

An action mask is the part "action_mask" of a Dict observation, so every row has one.
model.py gives the actions that it forbids the probability 0. A mask that forbids all,
as some environments give it at the end of an episode, has no effect.
"""

import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from torchbeast.envs.values import (
    MASK,
    InvalidEnvironmentError,
    describe,
    mask_space,
    num_options,
)


def add_part(observation: Any, name: str, part: Any) -> dict[str, Any]:
    """An observation, or its space, as a dict with a further part."""
    is_dict = isinstance(observation, Mapping)
    return {**(observation if is_dict else {"observation": observation}), name: part}


def check_mask(observation_space: spaces.Space, action_space: spaces.Space) -> None:
    """Raises InvalidEnvironmentError if the observation has an unusable mask."""
    space, size = mask_space(observation_space), sum(num_options(action_space))
    has_numbers = isinstance(space, spaces.Box | spaces.MultiBinary)
    if space is None or (has_numbers and math.prod(space.shape or ()) == size > 0):
        return
    raise InvalidEnvironmentError(
        f"the part {MASK} of the observation is {space}; the actions of "
        f"{action_space} need a Box or MultiBinary of {size} numbers. Only Discrete "
        "and MultiDiscrete actions can be masked"
    )


class MaskFromInfo(gymnasium.Wrapper):
    """Adds info["action_mask"] to the observation.

    A Dict observation gets a further part. Any other becomes the part "observation". A
    mask of MultiDiscrete actions may be a tuple with an array for each choice.

    Raises:
      InvalidEnvironmentError: the actions can't be masked; later, an info has no mask,
        or one of another size.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.size = sum(num_options(env.action_space))
        mask = spaces.MultiBinary(max(1, self.size))
        parts = add_part(env.observation_space, MASK, mask)
        self.observation_space = spaces.Dict(parts)
        check_mask(self.observation_space, env.action_space)

    def add_mask(self, observation: Any, info: dict[str, Any]) -> dict[str, Any]:
        """The observation with the mask."""
        given = info.get(MASK)
        several = given if isinstance(given, tuple | list) else [given]
        mask = np.concatenate([np.asarray(x).reshape(-1) for x in several or [()]])
        if len(mask) != self.size or mask.dtype.kind not in "biuf":
            raise InvalidEnvironmentError(
                f"--mask_actions: the info has {describe(given)} as {MASK}, and "
                f"{self.env.action_space} needs {self.size} numbers, 0 for what is "
                f"forbidden; the info is {describe(info)}"
            )
        return add_part(observation, MASK, (mask != 0).astype(np.int8))

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**arguments)
        return self.add_mask(observation, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        masked = self.add_mask(observation, info)
        return masked, reward, terminated, truncated, info
