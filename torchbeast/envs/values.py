"""Spaces that a policy and its buffers can have, and values of them as arrays."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from torchbeast.base.errors import UserError
from torchbeast.base.nested import Nested, with_places

# Parts of a Dict observation: which actions are possible now; which agent of a game the
# row is of. The steps of a row whose agent is absent do not count: the part is zero.
MASK, AGENT = "action_mask", "agent_one_hot"
MOST_CHOICES = 2**18  # of a space: they become one-hot vectors, or logits


class InvalidEnvironmentError(UserError, ValueError):
    """An environment can't be used; the message says why."""


class FrameStack(spaces.Box):
    """A Box [K, ...] whose observations are the last K frames, the oldest first.

    A replay stores each frame once. An observation that does not continue the one
    before it is right, but takes more room.
    """


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


def leaves_of(space: spaces.Space) -> list[tuple[str, spaces.Space]]:
    """The leaves of a nested space, each with its place."""
    return list(with_places(parts_of(space), "observation"))


def agent_is_present(observation: Any) -> Any:
    """Whether rows [...] are of an agent: [...] bool, NumPy or torch; True: all are."""
    if isinstance(observation, dict) and AGENT in observation:
        return (observation[AGENT] != 0).any(-1)
    return True


def mask_space(observation_space: spaces.Space) -> spaces.Space | None:
    """The space of the mask in observations; None without a mask."""
    if isinstance(observation_space, spaces.Dict):
        return observation_space.spaces.get(MASK)
    return None


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
    """Gymnasium's own space for one of a subclass, which may not be picklable.

    Raises:
      InvalidEnvironmentError: buffers and messages can't hold it.
    """
    match space:
        case FrameStack():
            return as_stack(space)
        case spaces.Box() if _has_usable_dtype(space):
            return spaces.Box(space.low, space.high, space.shape, space.dtype.type)
        case spaces.Discrete():
            return spaces.Discrete(int(space.n), start=int(space.start))
        case spaces.MultiDiscrete() if space.nvec.ndim == 1:
            return spaces.MultiDiscrete(space.nvec, space.dtype.type, start=space.start)
        case spaces.MultiBinary():
            return spaces.MultiBinary(space.n)
        case spaces.Dict() if all(isinstance(key, str) for key in space.spaces):
            parts = space.spaces.items()
            return spaces.Dict([(key, plain_space(part)) for key, part in parts])
        case spaces.Tuple():
            return spaces.Tuple([plain_space(part) for part in space.spaces])
    raise InvalidEnvironmentError(
        f"the space {space!r} is not supported. Allowed are Box of bool, integers and "
        "floats of at most 64 bits, Discrete, MultiDiscrete of one dimension, "
        "MultiBinary, and Tuple and Dict of these, with keys that are str: wrap the "
        "environment (docs/environments.md shows how)"
    )


def _has_usable_dtype(box: spaces.Box) -> bool:
    dtype = box.dtype
    return dtype.kind in "biuf" and dtype.itemsize <= 8 and dtype.isnative


def check_spaces(observation_space: spaces.Space, action_space: spaces.Space) -> None:
    """Raises InvalidEnvironmentError unless a policy can have these spaces."""
    leaves = [leaf for _, leaf in leaves_of(plain_space(observation_space))]
    if not sum(math.prod(leaf.shape or ()) for leaf in leaves):
        raise InvalidEnvironmentError(f"{observation_space} has no element")
    is_box = isinstance(action_space, spaces.Box) and action_space.dtype.kind == "f"
    has_policy = is_box or num_options(policy_space(action_space))
    if not has_policy or 0 in (plain_space(action_space).shape or ()):
        raise InvalidEnvironmentError(
            f"no policy for the action space {action_space}: allowed are Discrete, "
            "MultiDiscrete of one dimension, MultiBinary and Box of floats, none of "
            "them empty: wrap the environment in a gymnasium.ActionWrapper"
        )
    for parts in leaves, [action_space]:
        if (count := sum(sum(num_options(x)) for x in parts)) > MOST_CHOICES:
            raise InvalidEnvironmentError(
                f"Discrete and MultiDiscrete have {count:,} choices in "
                f"{observation_space if parts is leaves else action_space}; at most "
                f"{MOST_CHOICES:,} are allowed"
            )


def read(
    space: spaces.Space,
    value: Any,
    leading: tuple[int, ...] = (),
    place: str = "observation",
) -> Nested:
    """The value as arrays of the space's dtypes, nested as the space.

    Keys that the space lacks are left out. A MultiBinary may come in any dtype.

    Args:
      leading: dimensions of each array in front of its space's.

    Raises:
      InvalidEnvironmentError: it has another structure or shape, its dtype can't be
        cast, or an integer does not fit.
    """
    shape, why = space.shape, ""
    if (
        isinstance(value, np.ndarray)
        and shape is not None
        and value.dtype == space.dtype
        and value.shape == leading + shape
    ):
        return value  # mostly
    if isinstance(space, spaces.Dict):
        if isinstance(value, Mapping) and space.spaces.keys() <= value.keys():
            return {
                key: read(part, value[key], leading, f"{place}[{key!r}]")
                for key, part in space.spaces.items()
            }
    elif isinstance(space, spaces.Tuple):
        if isinstance(value, tuple | list) and len(value) == len(space.spaces):
            pairs = enumerate(zip(space.spaces, value, strict=True))
            return tuple(read(*x, leading, f"{place}[{i}]") for i, x in pairs)
    else:
        try:
            array = np.asarray(value)
        except Exception as error:  # rows of unequal length, a tensor with gradient
            array, why = np.empty(0, object), f" ({error})"
        if array.shape == leading + (shape or ()):
            is_bits = isinstance(space, spaces.MultiBinary)
            if is_bits or np.can_cast(array.dtype, space.dtype or object, "same_kind"):
                with np.errstate(all="ignore"):  # environments may make them errors
                    cast = array.astype(space.dtype, copy=False)
                if cast.dtype.kind == "f" or (cast == array).all():
                    return cast
                why = f" ({array[cast != array][0]} does not fit)"
    raise InvalidEnvironmentError(
        f"the environment returned {describe(value)} as {place}, but {space} is "
        f"declared{f', for each of {leading[0]} environments' if leading else ''}{why}"
    )


def describe(value: Any) -> str:
    """Describes a value in a few words: dtype and shape, keys, or the value."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict of {sorted(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} values"
    return f"{value!r:.99} of type {type(value).__name__}"
