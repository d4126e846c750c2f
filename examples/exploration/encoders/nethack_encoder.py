"""NetHack's observation by the names of its parts (Küttler et al. 2020, section 4.1).

For NLE and MiniHack. It uses `glyphs`, the map of symbols; `blstats`, the hero's place,
hit points, gold and so on; and `message`, a text as bytes. Leave out all others with
observation_keys. The MLP of this package would take glyph 2,000 for twice glyph 1,000.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

from torchbeast.base.errors import FlagError
from torchbeast.encoders import ShallowTorso, blocks, initialize, output_size, times

# What each part of the encoder reads.
READS = {
    "map": {"glyphs"},
    "crop": {"glyphs", "blstats"},
    "numbers": {"blstats"},
    "words": {"message"},
}


class NetHack(nn.Module):
    """The whole map, what is around the hero, the hero's numbers and the message.

    Args:
      parts: of these four. "crop" and "numbers" alone take a tenth of the time.
    """

    CROP = 9  # rows and columns around the hero; odd
    X, Y = 0, 1  # places in blstats

    def __init__(
        self,
        space: spaces.Space,
        encoder_width: float = 1.0,
        layer_norm: bool = False,
        parts: Sequence[str] = tuple(READS),
    ) -> None:
        super().__init__()
        if not parts or not set(parts) <= READS.keys():
            raise FlagError(
                f"--encoder {__name__}:NetHack has the parts {', '.join(READS)}, "
                f"got {parts}"
            )
        needed = set().union(*(READS[part] for part in parts))
        reads = [name for name in ("glyphs", "blstats", "message") if name in needed]
        if not isinstance(space, spaces.Dict) or not set(reads) <= set(space):
            raise FlagError(
                f"--encoder {__name__}:NetHack needs a Dict with {', '.join(reads)}; "
                f"the observation space is {space}. In the --env_kwargs of NLE and "
                f'MiniHack: "observation_keys": {json.dumps(reads)}'
            )
        self.parts = parts
        channels, a, b, c, d, words = times((16, 32, 32, 128, 128, 64), encoder_width)
        if {"map", "crop"} & set(parts):
            glyphs: Any = space["glyphs"]
            self.outside = int(glyphs.high.max()) + 1  # the glyph beyond the edges
            self.glyph = nn.Embedding(self.outside + 1, channels)
        if "map" in parts:
            pairs = (channels, a), (a, b)
            strides = [nn.Conv2d(*pair, 3, stride=2, padding=1) for pair in pairs]
            self.map = nn.Sequential(
                *blocks(strides, layer_norm=layer_norm), nn.Flatten()
            )
            size = output_size(self.map, torch.zeros(1, channels, *glyphs.shape))
            self.map.extend(blocks([nn.Linear(size, c)], layer_norm=layer_norm))
        if "crop" in parts:
            crop = channels, self.CROP, self.CROP
            self.crop = ShallowTorso(*crop, encoder_width, layer_norm)
        if "numbers" in parts:
            layers = [nn.Linear(spaces.flatdim(space["blstats"]), d), nn.Linear(d, d)]
            self.numbers = nn.Sequential(*blocks(layers, layer_norm=layer_norm))
        if "words" in parts:
            self.character = nn.Embedding(256, channels)
            self.words = nn.Sequential(nn.Conv1d(channels, words, 5), nn.ReLU())
        self.apply(initialize)

    def forward(self, observation: dict[str, torch.Tensor]) -> torch.Tensor:
        """glyphs [N, H, W], blstats [N, 27], message [N, 256] -> features [N, D]."""
        features = []
        if "map" in self.parts:
            x = self.glyph(observation["glyphs"].long())
            features.append(self.map(x.movedim(-1, 1)))
        if "crop" in self.parts:
            glyphs, blstats = observation["glyphs"].long(), observation["blstats"]
            crop = self.around(glyphs, blstats[:, self.X], blstats[:, self.Y])
            features.append(self.crop(self.glyph(crop).movedim(-1, 1)))
        if "numbers" in self.parts:
            # From 1 hit point to a million pieces of gold.
            x = observation["blstats"]
            features.append(self.numbers(x.sign() * x.abs().float().log1p()))
        if "words" in self.parts:
            x = self.character(observation["message"].long()).mT  # [N, C, 256]
            features.append(self.words(x).amax(-1))  # over the text
        return torch.cat(features, dim=-1)

    def around(
        self, glyphs: torch.Tensor, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """Glyphs [N, H, W] -> those around columns x, rows y [N]: [N, CROP, CROP]."""
        padded = F.pad(glyphs, [self.CROP // 2] * 4, value=self.outside)
        n = torch.arange(len(glyphs), device=glyphs.device).view(-1, 1, 1)
        offsets = torch.arange(self.CROP, device=glyphs.device)
        rows = y.view(-1, 1, 1) + offsets.view(-1, 1)
        columns = x.view(-1, 1, 1) + offsets
        return padded[n, rows, columns]
