"""Spaces that a policy and its buffers can have, values of them, and action masks.

An action mask is the part "action_mask" of a Dict observation, so every row has one.
model.py gives the actions that it forbids the probability 0. A mask that forbids all,
as some environments give it at the end of an episode, has no effect.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from torchbeast.base.errors import UserError
from torchbeast.base.nested import Nested

# Parts of a Dict observation: which actions are possible now; which agent of a game the
# row is of. The steps of a row whose agent is absent do not count: the part is zero.
MASK, AGENT = "action_mask", "agent_one_hot"
MOST_OPTIONS = 2**18  # each is an input or output of the model


class InvalidEnvironmentError(UserError, ValueError):
    """An environment can't be used; the message says why."""


class FrameStack(spaces.Box):
    """A Box [K, ...] of the last K frames. A replay stores each of them once."""


def as_stack(space: Any) -> FrameStack:
    """The same Box as a FrameStack."""
    return FrameStack(space.low, space.high, space.shape, space.dtype.type)


def parts_of(space: spaces.Space) -> Nested:
    """The leaves of a space, nested as an observation of it."""
    if isinstance(space, spaces.Dict):
        return {key: parts_of(part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(parts_of, space.spaces))
    return space


def agent_is_present(observation: Any) -> Any:
    """Whether rows [...] are of an agent: [...] bool, NumPy or torch; True: all are."""
    if isinstance(observation, dict) and AGENT in observation:
        return (observation[AGENT] != 0).any(-1)
    return True


def num_options(space: spaces.Space) -> list[int]:
    """The number of options of each choice in the space; [] if it has no choices."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ravel().tolist()
    return []


def policy_space(space: spaces.Space) -> spaces.Space:
    """The action space that a policy sees: a MultiBinary is a choice for each bit."""
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiDiscrete([2] * math.prod(space.shape))
    return space


def plain_space(space: Any) -> spaces.Space:
    """Gymnasium's own space for one of a subclass, which may not be picklable."""
    match space:
        case FrameStack():
            return as_stack(space)
        case spaces.Box() if space.dtype.kind in "biuf" and space.dtype.itemsize <= 8:
            return spaces.Box(space.low, space.high, space.shape, space.dtype.type)
        case spaces.Discrete() if space.n <= MOST_OPTIONS:
            return spaces.Discrete(int(space.n), start=int(space.start))
        case spaces.MultiDiscrete() if (
            space.nvec.ndim == 1 and space.nvec.max() <= MOST_OPTIONS
        ):
            return spaces.MultiDiscrete(space.nvec, space.dtype.type, start=space.start)
        case spaces.MultiBinary():
            return spaces.MultiBinary(space.n)
        case spaces.Dict() if {*map(type, space.spaces)} == {str}:
            parts = space.spaces.items()
            return spaces.Dict([(key, plain_space(part)) for key, part in parts])
        case spaces.Tuple():
            return spaces.Tuple([plain_space(part) for part in space.spaces])
    raise InvalidEnvironmentError(
        f"the space {space!r} is not supported. Allowed are Box of numbers of at most "
        "64 bits, Discrete, MultiDiscrete of one dimension, MultiBinary, Tuple, and "
        f"Dict by names; each choice has at most {MOST_OPTIONS} options"
    )


def check_mask(observation_space: spaces.Space, action_space: spaces.Space) -> None:
    """Raises InvalidEnvironmentError if the observation has an unusable mask."""
    space, size = mask_space(observation_space), sum(num_options(action_space))
    if space is not None and math.prod(space.shape or ()) != size:
        raise InvalidEnvironmentError(
            f"the part {MASK} of the observation is {space}; the actions of "
            f"{action_space} need {size} numbers. Only Discrete and MultiDiscrete "
            "actions can be masked"
        )


def fit(value: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray | None:
    """The value as an array of this shape and dtype; None if it has no such value."""
    if hasattr(value, "detach"):  # a tensor, maybe with a gradient
        value = value.detach()
    array = np.asarray(value)
    if array.dtype.hasobject:  # so Gymnasium gives np.bool_
        array = np.asarray(array.tolist())
    if array.shape != shape or array.dtype.kind not in "biuf":
        return None
    with np.errstate(all="ignore"):  # environments may make them errors
        cast = array.astype(dtype, copy=False)
    return cast if cast.dtype.kind == "f" or (cast == array).all() else None


def read(space: spaces.Space, value: Any, leading: tuple[int, ...] = ()) -> Nested:
    """The value as arrays of the space's dtypes, nested as the space.

    `leading` are dimensions in front of the space's. Further keys are left out. Raises
    InvalidEnvironmentError if it is no such value.
    """
    shape = None if space.shape is None else leading + space.shape
    is_array = isinstance(value, np.ndarray) and value.shape == shape
    if is_array and value.dtype == space.dtype:
        return value  # mostly
    if isinstance(space, spaces.Dict) and isinstance(value, Mapping):
        if space.spaces.keys() <= value.keys():
            parts = space.spaces.items()
            return {key: read(part, value[key], leading) for key, part in parts}
    elif isinstance(space, spaces.Tuple) and isinstance(value, tuple | list):
        if len(value) == len(space.spaces):
            pairs = zip(space.spaces, value, strict=True)
            return tuple(read(*pair, leading) for pair in pairs)
    elif shape is not None and (array := fit(value, shape, space.dtype)) is not None:
        return array
    raise InvalidEnvironmentError(
        f"an environment returned {describe(value)} as an observation, but "
        f"{list(leading) or ''}{space} is declared"
    )


def describe(value: Any) -> str:
    """Describes a value in a few words."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return f"{value!r:.99} of type {type(value).__name__}"


# --- Action masks ---------------------------------------------------------------------


def mask_space(observation_space: spaces.Space) -> spaces.Space | None:
    """The space of the mask in observations; None without a mask."""
    if isinstance(observation_space, spaces.Dict):
        return observation_space.spaces.get(MASK)
    return None


def add_part(observation: Any, name: str, part: Any) -> dict[str, Any]:
    """An observation, or its space, as a dict with a further part."""
    is_dict = isinstance(observation, Mapping)
    return {**(observation if is_dict else {"observation": observation}), name: part}
