"""Encoders: from observations to features. Torsos for images, an MLP for all else.

To try another torso, write it beside ShallowTorso and add its name to TORSOS.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

from torchbeast.core.moments import RunningMoments
from torchbeast.core.observations import (
    FlattenCells,
    flatten_leaf,
    has_channels_last,
    has_numbers,
    image_size,
    logarithm,
    upper_bound,
)


def blocks(
    layers: Sequence[nn.Conv2d | nn.Linear],
    activation: type[nn.Module] = nn.ReLU,
    layer_norm: bool = False,
) -> list[nn.Module]:
    """Each layer with its activation, and before it LayerNorm (Ba et al. 2016)."""
    made: list[nn.Module] = []
    for layer in layers:
        made.append(layer)
        if layer_norm:  # over all channels and pixels of an image, or all units
            made.append(nn.GroupNorm(1, len(layer.weight)))
        made.append(activation())
    return made


class ShallowTorso(nn.Sequential):
    """Three convolutions (Mnih et al. 2015), or two for images below 36 pixels.

    Args:
      encoder_width: times as many channels and units.
      layer_norm: normalize each layer.
    """

    def __init__(
        self,
        channels: int,
        height: int,
        width: int,
        encoder_width: float = 1.0,
        layer_norm: bool = False,
    ) -> None:
        if min(height, width) < 36:
            (a, b), hidden = times((16, 32), encoder_width), 256
            layers = [nn.Conv2d(channels, a, 3), nn.Conv2d(a, b, 3)]
        else:
            (a, b, c), hidden = times((32, 64, 64), encoder_width), 512
            layers = [
                nn.Conv2d(channels, a, 8, stride=4),
                nn.Conv2d(a, b, 4, stride=2),
                nn.Conv2d(b, c, 3, stride=1),
            ]
        conv = nn.Sequential(*blocks(layers, layer_norm=layer_norm), FlattenCells())
        size = output_size(conv, torch.zeros(1, channels, height, width))
        linear = nn.Linear(size, times((hidden,), encoder_width)[0])
        super().__init__(*conv, *blocks([linear], layer_norm=layer_norm))


class ResidualUnit(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class DeepTorso(nn.Sequential):
    """The residual network of IMPALA (Espeholt et al. 2018, figure 3 right).

    Args:
      encoder_width: times as many channels and units.
      layer_norm: normalize the output of each section and of the last layer.
    """

    def __init__(
        self,
        channels: int,
        height: int,
        width: int,
        encoder_width: float = 1.0,
        layer_norm: bool = False,
    ) -> None:
        layers: list[nn.Module] = []
        in_channels = channels
        for out_channels in times((16, 32, 32), encoder_width):
            layers += [
                nn.Conv2d(in_channels, out_channels, 3, padding=1),
                nn.MaxPool2d(3, stride=2, padding=1),
                ResidualUnit(out_channels),
                ResidualUnit(out_channels),
            ]
            if layer_norm:
                layers.append(nn.GroupNorm(1, out_channels))
            in_channels = out_channels
        conv = nn.Sequential(*layers, nn.ReLU(), FlattenCells())
        size = output_size(conv, torch.zeros(1, channels, height, width))
        linear = nn.Linear(size, times((256,), encoder_width)[0])
        super().__init__(*conv, *blocks([linear], layer_norm=layer_norm))


def times(sizes: Iterable[int], encoder_width: float) -> list[int]:
    return [max(1, round(size * encoder_width)) for size in sizes]


TORSOS = {"shallow": ShallowTorso, "deep": DeepTorso}
MLP_SIZES = {"shallow": (128, 128), "deep": (256, 256, 256)}


class ImageEncoder(nn.Module):
    """Images [N, *shape], see image_fault -> features [N, size]."""

    def __init__(
        self,
        space: spaces.Box,
        torso: str,
        encoder_width: float = 1.0,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.channels_last = has_channels_last(space)
        height, width, channels = image_size(space)
        self.image = (channels, height, width)
        self.scale = 1.0 / upper_bound(space)
        self.torso = TORSOS[torso](channels, height, width, encoder_width, layer_norm)
        # The fastest layout on CPUs. torch's type stubs lack it here.
        self.torso.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.channels_last:
            x = x.movedim(-1, -3)
        x = x.reshape(len(x), *self.image)
        dtype = next(self.torso.parameters()).dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        # Reorder the bytes first, and scale in place, to save a copy.
        x = x.contiguous(memory_format=torch.channels_last)
        if not self.scale:
            return self.torso(logarithm(x.float()).to(dtype))
        x = x.to(dtype, copy=True).mul_(self.scale)
        return self.torso(x)


class VectorEncoder(nn.Module):
    """All observations that are not images, as one vector [N, D] -> features.

    Args:
      parts: the spaces of the observations.
      torso: a name in MLP_SIZES.
      normalize: normalize numbers, see has_numbers, by their running moments.
      encoder_width: times as many units.
      layer_norm: normalize each layer.

    With `normalize` the activation function is tanh; else it is ReLU. For continuous
    control tanh is better, and so is an MLP for the values alone (Andrychowicz et al.
    2021, "What Matters for On-Policy Deep Actor-Critic Methods?").
    """

    is_number: torch.Tensor  # [D] bool

    def __init__(
        self,
        parts: list[spaces.Space],
        torso: str,
        normalize: bool = False,
        encoder_width: float = 1.0,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.parts = parts
        sizes = [spaces.flatdim(part) for part in parts]
        size = sum(sizes)
        self.moments = RunningMoments((size,)) if normalize else None
        is_number = np.repeat([has_numbers(part) for part in parts], sizes)
        self.register_buffer("is_number", torch.tensor(is_number), persistent=False)
        activation = nn.Tanh if normalize else nn.ReLU
        sizes = [size, *times(MLP_SIZES[torso], encoder_width)]
        layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
        self.layers = nn.Sequential(*blocks(layers, activation, layer_norm))

    def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
        vector = self.join(xs)
        if self.moments is not None:
            vector = torch.where(self.is_number, self.moments(vector), vector)
        return self.layers(vector)

    def join(self, xs: list[torch.Tensor]) -> torch.Tensor:
        """Observations [N, ...] -> one vector [N, D] float32."""
        vectors = [
            flatten_leaf(part, x) for part, x in zip(self.parts, xs, strict=True)
        ]
        return torch.cat(vectors, dim=-1)


def initialize(module: nn.Module) -> None:
    """Initializes weights so that each layer keeps the scale of the signal.

    With PyTorch's default, the shallow torso shrinks the difference between two frames
    to a fiftieth. Residual units start as the identity.
    """
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")  # He et al. 2015
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, ResidualUnit):  # comes after its convolutions
        nn.init.zeros_(module.conv2.weight)


@torch.no_grad()
def output_size(encode: Callable[[Any], torch.Tensor], example: Any) -> int:
    """Number of features that a module or function makes of an input."""
    return encode(example).shape[-1]
