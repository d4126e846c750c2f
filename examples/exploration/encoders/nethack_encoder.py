"""NetHack's observation by the names of its parts (Küttler et al. 2020, section 4.1).

For NLE and MiniHack. It uses `glyphs`, the map of symbols; `blstats`, the hero's place,
hit points, gold and so on; and `message`, a text as bytes. Leave out all others with
observation_keys. The MLP of this package would take glyph 2,000 for twice glyph 1,000.
"""

import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

from torchbeast.base.errors import FlagError
from torchbeast.encoders import ShallowTorso, blocks, initialize, output_size, times

PARTS = ("glyphs", "blstats", "message")


class NetHack(nn.Module):
    """The whole map, what is around the hero, the hero's numbers and the message."""

    CROP = 9  # rows and columns around the hero; odd
    X, Y = 0, 1  # places in blstats

    def __init__(
        self,
        space: spaces.Space,
        encoder_width: float = 1.0,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(space, spaces.Dict) or not set(PARTS) <= set(space):
            raise FlagError(
                f"--encoder {__name__}:NetHack needs a Dict with {', '.join(PARTS)}; "
                f"the observation space is {space}. In the --env_kwargs of NLE and "
                'MiniHack: "observation_keys": ["glyphs", "blstats", "message"]'
            )
        glyphs, blstats = space["glyphs"], space["blstats"]
        channels, a, b, c, d, words = times((16, 32, 32, 128, 128, 64), encoder_width)
        self.outside = int(glyphs.high.max()) + 1  # the glyph beyond the map's edges
        self.glyph = nn.Embedding(self.outside + 1, channels)
        strides = [
            nn.Conv2d(*x, 3, stride=2, padding=1) for x in ((channels, a), (a, b))
        ]
        self.map = nn.Sequential(*blocks(strides, layer_norm=layer_norm), nn.Flatten())
        size = output_size(self.map, torch.zeros(1, channels, *glyphs.shape))
        self.map.extend(blocks([nn.Linear(size, c)], layer_norm=layer_norm))
        crop = channels, self.CROP, self.CROP
        self.crop = ShallowTorso(*crop, encoder_width, layer_norm)
        layers = [nn.Linear(spaces.flatdim(blstats), d), nn.Linear(d, d)]
        self.numbers = nn.Sequential(*blocks(layers, layer_norm=layer_norm))
        self.character = nn.Embedding(256, channels)
        self.words = nn.Sequential(nn.Conv1d(channels, words, 5), nn.ReLU())
        self.apply(initialize)

    def forward(self, observation: dict[str, torch.Tensor]) -> torch.Tensor:
        """glyphs [N, H, W], blstats [N, 27], message [N, 256] -> features [N, D]."""
        glyphs, blstats = observation["glyphs"].long(), observation["blstats"]
        crop = self.around(glyphs, blstats[:, self.X], blstats[:, self.Y])
        # From 1 hit point to a million pieces of gold.
        numbers = blstats.sign() * blstats.abs().float().log1p()
        characters = self.character(observation["message"].long()).mT  # [N, C, 256]
        features = [
            self.map(self.glyph(glyphs).movedim(-1, 1)),
            self.crop(self.glyph(crop).movedim(-1, 1)),
            self.numbers(numbers),
            self.words(characters).amax(-1),  # over the text
        ]
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
