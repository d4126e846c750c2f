"""Action masks: which actions are possible now.

A mask is the part "action_mask" of a Dict observation, so every row has one. model.py
gives the actions that it forbids the probability 0.
"""

import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from torchbeast.envs.checks import InvalidEnvironmentError, describe

NAME = "action_mask"


def mask_space(observation_space: spaces.Space) -> spaces.Space | None:
    """The space of the mask in observations; None without a mask."""
    if isinstance(observation_space, spaces.Dict):
        return observation_space.spaces.get(NAME)
    return None


def mask_size(action_space: spaces.Space) -> int | None:
    """The number of choices in the space; None if it can't be masked."""
    if isinstance(action_space, spaces.Discrete):
        return int(action_space.n)
    if isinstance(action_space, spaces.MultiDiscrete):
        return int(action_space.nvec.sum())
    return None


def check_mask(observation_space: spaces.Space, action_space: spaces.Space) -> None:
    """Raises InvalidEnvironmentError if the observation has an unusable mask."""
    space, size = mask_space(observation_space), mask_size(action_space)
    if space is None:
        return
    if size is None:
        raise InvalidEnvironmentError(
            f"the observation has the part {NAME}, and actions of {action_space} can't "
            "be masked; Discrete and MultiDiscrete actions can"
        )
    has_numbers = isinstance(space, spaces.Box | spaces.MultiBinary)
    if not has_numbers or math.prod(space.shape or ()) != size:
        raise InvalidEnvironmentError(
            f"the part {NAME} of the observation is {space}. For actions of "
            f"{action_space}, it needs a Box or MultiBinary of {size} numbers"
        )


def first_allowed(
    action_space: spaces.Space, observation: dict[str, np.ndarray]
) -> np.ndarray:
    """For each environment the first allowed action, as the policy counts it.

    Args:
      observation: its part "action_mask" is [E, ...].
    """
    mask = observation[NAME].reshape(len(observation[NAME]), -1) != 0
    if isinstance(action_space, spaces.MultiDiscrete):
        parts = np.split(mask, np.cumsum(action_space.nvec)[:-1], axis=1)
        return np.stack([part.argmax(1) for part in parts], axis=1)
    return mask.argmax(1)


def check_masks(name: str, action_space: spaces.Space, masks: np.ndarray) -> None:
    """Raises InvalidEnvironmentError unless masks [E, ...] allow an action each.

    Args:
      name: --env, for the message.
    """
    masks = masks.reshape(len(masks), -1)
    sizes = [int(mask_size(action_space) or 0)]
    if isinstance(action_space, spaces.MultiDiscrete):
        sizes = action_space.nvec.ravel().tolist()
    allowed = np.isfinite(masks) & (masks != 0)
    parts = np.split(allowed, np.cumsum(sizes)[:-1], axis=1)
    usable = np.isfinite(masks).all(1) & np.all([p.any(1) for p in parts], axis=0)
    if not usable.all():
        raise InvalidEnvironmentError(
            f"--env {name}: {NAME} is {masks[np.argmin(usable)].tolist()}; it needs "
            f"finite numbers, and for actions of {action_space} at least one that is "
            "not 0 per choice. Only the last observation of an episode may forbid all"
        )


class MaskFromInfo(gymnasium.Wrapper):
    """Adds info["action_mask"] to the observation.

    A Dict observation gets a further part. Any other becomes the part "observation". A
    mask of MultiDiscrete actions may be a tuple with an array for each choice.

    Raises:
      InvalidEnvironmentError: the actions can't be masked; later, an info has no mask,
        or one of another size, or of other values than finite numbers.
    """

    def __init__(self, env: gymnasium.Env, name: str = "") -> None:
        super().__init__(env)
        self.name = name or type(env.unwrapped).__name__
        size = mask_size(env.action_space)
        if size is None:
            raise InvalidEnvironmentError(
                "--mask_actions needs Discrete or MultiDiscrete actions, and these "
                f"are {env.action_space}"
            )
        self.size = size
        self.is_dict = isinstance(env.observation_space, spaces.Dict)
        parts = {"observation": env.observation_space}
        if isinstance(env.observation_space, spaces.Dict):
            parts = env.observation_space.spaces
        self.observation_space = spaces.Dict({**parts, NAME: spaces.MultiBinary(size)})

    def _add_mask(self, observation: Any, info: dict[str, Any]) -> dict[str, Any]:
        if NAME not in info:
            raise InvalidEnvironmentError(
                f"--env {self.name} with --mask_actions: the info has no {NAME}, only "
                f"{sorted(map(str, info))}"
            )
        given = info[NAME]
        several = given if isinstance(given, tuple | list) else [given]
        try:
            mask = np.concatenate([np.asarray(part).reshape(-1) for part in several])
        except ValueError:  # rows of unequal length, or no part at all
            mask = np.empty(0, object)
        is_mask = mask.dtype.kind in "biuf" and np.isfinite(mask).all()
        if not is_mask or len(mask) != self.size:
            values = mask.tolist() if len(mask) == self.size else describe(given)
            raise InvalidEnvironmentError(
                f"--env {self.name} with --mask_actions: the info has {values} as "
                f"{NAME}, and {self.env.action_space} needs {self.size} numbers, 0 for "
                "what is forbidden"
            )
        parts = observation if self.is_dict else {"observation": observation}
        return {**parts, NAME: (mask != 0).astype(np.int8)}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._add_mask(observation, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        masked = self._add_mask(observation, info)
        return masked, reward, terminated, truncated, info
