"""Masks in observations: which actions are possible now, and which steps count.

An action mask is the part "action_mask" of a Dict observation, so every row has one.
model.py gives the actions that it forbids the probability 0.

The part "agent_one_hot" says which agent of a game the row is of. The steps of a row
whose agent is absent do not count: there the part is zero.
"""

import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from torchbeast.envs import space_checks
from torchbeast.envs.checks import InvalidEnvironmentError, describe
from torchbeast.envs.space_checks import num_options

NAME = "action_mask"
AGENT = "agent_one_hot"


def add_part(observation: Any, name: str, part: Any) -> dict[str, Any]:
    """An observation, or its space, as a dict with a further part."""
    is_dict = isinstance(observation, Mapping)
    return {**(observation if is_dict else {"observation": observation}), name: part}


def agent_is_present(observation: Any) -> Any:
    """Whether rows [...] are of an agent: [...] bool, NumPy or torch; True: all are."""
    if isinstance(observation, dict) and AGENT in observation:
        return (observation[AGENT] != 0).any(-1)
    return True


def mask_space(observation_space: spaces.Space) -> spaces.Space | None:
    """The space of the mask in observations; None without a mask."""
    if isinstance(observation_space, spaces.Dict):
        return observation_space.spaces.get(NAME)
    return None


def check_spaces(observation_space: spaces.Space, action_space: spaces.Space) -> None:
    """Checks that both variants can use the spaces, and the mask, if there is one.

    Raises:
      UnsupportedSpaceError, InvalidEnvironmentError: they can't; the message says why.
    """
    check_mask(observation_space, action_space)
    space_checks.check_observation_space(observation_space)
    space_checks.check_action_space(action_space)


def check_mask(observation_space: spaces.Space, action_space: spaces.Space) -> None:
    """Raises InvalidEnvironmentError if the observation has an unusable mask."""
    space, size = mask_space(observation_space), sum(num_options(action_space))
    if space is None:
        return
    has_numbers = isinstance(space, spaces.Box | spaces.MultiBinary)
    if not (size and has_numbers and math.prod(space.shape or ()) == size):
        needed = "can't be masked; Discrete and MultiDiscrete actions can"
        if size:
            needed = f"need a Box or MultiBinary of {size} numbers"
        raise InvalidEnvironmentError(
            f"the part {NAME} of the observation is {space}, and actions of "
            f"{action_space} {needed}"
        )


def _split(action_space: spaces.Space, masks: np.ndarray) -> list[np.ndarray]:
    """Masks [E, ...] as an array [E, n] for each choice of n options."""
    ends = np.cumsum(num_options(action_space))
    return np.split(masks.reshape(len(masks), -1), ends[:-1], axis=1)


def first_allowed(
    action_space: spaces.Space, observation: dict[str, np.ndarray]
) -> np.ndarray:
    """For each environment the first allowed action, as the policy counts it.

    Args:
      observation: its part "action_mask" is [E, ...].
    """
    parts = _split(action_space, observation[NAME])
    choices = [(part != 0).argmax(1) for part in parts]
    is_one = isinstance(action_space, spaces.Discrete)
    return choices[0] if is_one else np.stack(choices, axis=1)


def check_masks(name: str, action_space: spaces.Space, masks: np.ndarray) -> None:
    """Raises InvalidEnvironmentError unless masks [E, ...] allow an action each.

    Args:
      name: --env, for the message.
    """
    parts = _split(action_space, masks)
    usable = [np.isfinite(x).all(1) & (x != 0).any(1) for x in parts]
    if not np.all(usable):
        worst = masks[np.argmin(np.all(usable, axis=0))].ravel().tolist()
        raise InvalidEnvironmentError(
            f"--env {name}: {NAME} is {worst}; it needs finite numbers, and for "
            f"{action_space} at least one that is not 0 per choice. Only the last "
            "observation of an episode may forbid all"
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
        self.size = sum(num_options(env.action_space))
        if not self.size:
            raise InvalidEnvironmentError(
                "--mask_actions needs Discrete or MultiDiscrete actions, and these "
                f"are {env.action_space}"
            )
        parts = add_part(env.observation_space, NAME, spaces.MultiBinary(self.size))
        self.observation_space = spaces.Dict(parts)

    def add_mask(self, observation: Any, info: dict[str, Any]) -> dict[str, Any]:
        """The observation with the mask."""
        given = info.get(NAME)
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
                f"what is forbidden; the info is {describe(info)}"
            )
        return add_part(observation, NAME, (mask != 0).astype(np.int8))

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**arguments)
        return self.add_mask(observation, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        masked = self.add_mask(observation, info)
        return masked, reward, terminated, truncated, info
