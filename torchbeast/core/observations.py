"""The leaves of observation spaces: their order, images, and vectors."""

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces

from torchbeast.core.nested import Nested, flatten

NO_BOUND = 1e6  # from here on a bound is the dtype's and says nothing about values


def map_space(f: Callable[[spaces.Space], Any], space: spaces.Space) -> Nested:
    """Applies f to the leaves of a space; nested as an observation of it."""
    if isinstance(space, spaces.Dict):
        return {name: map_space(f, part) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map_space(f, part) for part in space.spaces)
    return f(space)


def iterate_space(space: spaces.Space) -> Iterator[spaces.Space]:
    """The leaves of a nested space, in a fixed order."""
    yield from flatten(map_space(lambda leaf: leaf, space))


def iterate_observation(space: spaces.Space, observation: Any) -> Iterator[Any]:
    """The leaves of a nested observation, in the order of iterate_space(space)."""
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            yield from iterate_observation(part, observation[name])
    elif isinstance(space, spaces.Tuple):
        for part, x in zip(space.spaces, observation, strict=True):
            yield from iterate_observation(part, x)
    else:
        yield observation


def is_image(space: spaces.Space) -> TypeGuard[spaces.Box]:
    """Whether the space is a 3-dimensional Box, at least 7 pixels high and wide."""
    if not isinstance(space, spaces.Box) or len(space.shape) != 3:
        return False
    height, width, _ = image_size(space)
    return min(height, width) >= 7


def has_channels_last(image: spaces.Box) -> bool:
    """Whether the axes are [H, W, C] and not [C, H, W].

    If two neighbours are equal, they are H and W. Otherwise C is the smaller of the
    first and the last.
    """
    first, middle, last = image.shape
    if (first == middle) != (middle == last):
        return first == middle
    return last <= first


def image_size(image: spaces.Box) -> tuple[int, int, int]:
    """Height, width and channels."""
    if has_channels_last(image):
        height, width, channels = image.shape
    else:
        channels, height, width = image.shape
    return height, width, channels


def upper_bound(box: spaces.Box) -> float:
    """What values are divided by: the largest upper bound; 1 without a usable one."""
    high = float(np.max(box.high, initial=0))
    return high if 0 < high < NO_BOUND else 1.0


def flatten_leaf(space: spaces.Space, x: torch.Tensor) -> torch.Tensor:
    """[N, *shape] of an elementary space -> [N, flatdim(space)] float32."""
    if isinstance(space, spaces.Discrete):
        return F.one_hot(x.long() - int(space.start), int(space.n)).float()
    if isinstance(space, spaces.MultiDiscrete):
        start = torch.as_tensor(np.asarray(space.start, np.int64), device=x.device)
        digits = (x.long() - start).flatten(1)
        sizes = space.nvec.flatten().tolist()
        parts = [F.one_hot(d, n) for d, n in zip(digits.unbind(1), sizes, strict=True)]
        return torch.cat(parts, dim=-1).float()
    x = x.float().reshape(len(x), math.prod(space.shape or ()))
    if isinstance(space, spaces.Box) and space.dtype == np.uint8:
        return x / upper_bound(space)  # as images
    return x


def has_integers_above(limit: float, leaf: spaces.Space) -> bool:
    """Whether integers of a Box may be larger than `limit`, or smaller than -limit."""
    if not isinstance(leaf, spaces.Box) or np.issubdtype(leaf.dtype, np.floating):
        return False
    bounds = np.abs([leaf.low.astype(np.float64), leaf.high.astype(np.float64)])
    return bool(bounds.max(initial=0) > limit)
