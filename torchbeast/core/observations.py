"""The leaves of observation spaces: their order, images, and vectors."""

import logging
import math
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

from torchbeast.base import devices
from torchbeast.base.nested import flatten, map_nested
from torchbeast.envs.checks import leaves_of, parts_of

log = logging.getLogger(__name__)

# From here on a bound is the dtype's and says nothing about values.
NO_BOUND = 1e6
NO_INTEGER_BOUND = 2**31 - 1


def iterate_space(space: spaces.Space) -> list[spaces.Space]:
    """The leaves of a nested space, in a fixed order."""
    return flatten(parts_of(space))


def iterate_observation(space: spaces.Space, observation: Any) -> list:
    """The leaves of a nested observation, in the order of iterate_space(space)."""
    return flatten(map_nested(lambda _, x: x, parts_of(space), observation))


def image_fault(space: spaces.Space) -> str | None:
    """Why a space is no image, "" if nobody expects one; None if it is an image.

    Images are Boxes [H, W, C] or [C, H, W]. If they hold bytes, also [H, W], and stacks
    of images, [K, H, W, C] or [K, C, H, W].
    """
    if not isinstance(space, spaces.Box) or len(space.shape) not in (2, 3, 4):
        return ""
    if len(space.shape) != 3 and space.dtype != np.uint8:
        return "images without channels, and stacks of images, need bytes"
    height, width, channels = image_size(space)
    # Smaller matrices are often tables, or maps of categories.
    least = 36 if len(space.shape) == 2 else 7
    if min(height, width) < least or channels == 0:
        return f"images need {least} pixels"
    return None


def is_image(space: spaces.Space) -> TypeGuard[spaces.Box]:
    """Whether the space is an image, see image_fault."""
    return image_fault(space) is None


def has_channels_last(image: spaces.Box) -> bool:
    """Whether the last axes are [H, W, C] and not [C, H, W].

    If two neighbours are equal, they are H and W. Otherwise C is the smaller of the
    first and the last.
    """
    if len(image.shape) == 2:
        return False
    first, middle, last = image.shape[-3:]
    if (first == middle) != (middle == last):
        return first == middle
    return last <= first


def image_size(image: spaces.Box) -> tuple[int, int, int]:
    """Height, width and channels; each image of a stack adds its channels."""
    *stack, height, width = image.shape
    if has_channels_last(image):
        *stack, height, width, channels = image.shape
        stack.append(channels)
    return height, width, math.prod(stack)


def upper_bound(box: spaces.Box) -> float:
    """What values are divided by: the largest upper bound; 1 without a usable one.

    Of integers it is the largest absolute bound; without one, infinity: their logarithm
    is taken.
    """
    high = float(np.max(box.high, initial=0))
    if box.dtype.kind not in "iu":
        return high if 0 < high < NO_BOUND else 1.0
    high = max(1.0, high, -float(np.min(box.low, initial=0)))
    return high if high < NO_INTEGER_BOUND else math.inf


def flatten_leaf(space: spaces.Space, x: torch.Tensor) -> torch.Tensor:
    """[N, *shape] of an elementary space -> [N, flatdim(space)] float32."""
    if isinstance(space, spaces.Discrete):
        return F.one_hot(x.long() - int(space.start), int(space.n)).float()
    if isinstance(space, spaces.MultiDiscrete):
        start = devices.send(np.asarray(space.start, np.int64), x.device)
        digits = (x.long() - start).flatten(1)
        sizes = space.nvec.flatten().tolist()
        parts = [F.one_hot(d, n) for d, n in zip(digits.unbind(1), sizes, strict=True)]
        return torch.cat(parts, dim=-1).float()
    x = x.float().reshape(len(x), math.prod(space.shape or ()))
    if isinstance(space, spaces.Box) and space.dtype.kind in "iu":
        return _scale_integers(space, x)
    return x


def _scale_integers(box: spaces.Box, x: torch.Tensor) -> torch.Tensor:
    """Divides x [N, D] by its largest absolute bound; without one, takes the logarithm.

    Bounds of floats are not used: many environments declare far wider ones than their
    values are.
    """
    ends = np.abs([box.low.astype(np.float64), box.high.astype(np.float64)])
    bound = ends.max(0).reshape(-1)
    scaled = x / devices.send(np.maximum(bound, 1).astype(np.float32), x.device)
    usable = devices.send(bound < NO_INTEGER_BOUND, x.device)
    return torch.where(usable, scaled, logarithm(x))


def logarithm(x: torch.Tensor) -> torch.Tensor:
    return x.sign() * x.abs().log1p()


def has_numbers(leaf: spaces.Space) -> bool:
    """Whether the leaf holds numbers, and not categories or bits."""
    if not isinstance(leaf, spaces.Box) or leaf.dtype == np.bool_:
        return False
    is_integer = leaf.dtype.kind in "iu"
    return not (is_integer and (leaf.low >= 0).all() and (leaf.high <= 1).all())


class FlattenCells(nn.Flatten):
    """Features of images [N, C, H, W] -> [N, D]; pools H and W to at most 32 each.

    Without the limit a small torso has 100M weights for 16 x 1,024 pixels.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernel = [-(-n // 32) for n in x.shape[2:]]
        return super().forward(F.max_pool2d(x, kernel) if max(kernel) > 1 else x)


def log_encoders(model: Any, torso: str) -> None:
    """Logs which encoder each observation gets, and the number of weights.

    Args:
      model: a torchbeast.model.Net. Of another model, only the weights are logged.
    """
    parts = []
    is_image = getattr(model, "is_image", [])
    leaves = leaves_of(model.observation_space)
    for (place, leaf), image in zip(leaves, is_image, strict=False):
        what = "×".join(map(str, leaf.shape or ())) or "1"
        if not isinstance(leaf, spaces.Box):
            what = str(leaf)
        why = f", {fault}" if (fault := image_fault(leaf)) else ""
        encoder = f"image {what} → {torso}" if image else f"{what} → MLP{why}"
        parts.append(f"{place}: {encoder}")
    count = sum(x.numel() for x in model.parameters())
    log.info("The model: %s.", "; ".join([*parts, f"{count:,} weights"]))
