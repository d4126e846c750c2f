"""MiniGrid's image: each cell has the numbers of an object, a colour and a state.

The image encoders of this package take numbers for brightness. Here each number has an
embedding, as in AMIGo (Campero et al. 2021). The three convolutions are those of RIDE
(Raileanu and Rocktäschel 2020) and NovelD (Zhang et al. 2021). As there, direction and
mission are not used. The two linear layers are smaller: 256 units, not 1024.
"""

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from torchbeast.base.errors import FlagError
from torchbeast.encoders import blocks, initialize, output_size, times


class MiniGrid(nn.Module):
    """
    Args:
      space: an image [H, W, 3], or a Dict with one as "image".
      counts: of objects, colours and states; the agent's states are its 4 directions.
    """

    SIZES = (5, 3, 2)  # of an object's embedding, a colour's and a state's

    def __init__(
        self,
        space: spaces.Space,
        encoder_width: float = 1.0,
        layer_norm: bool = False,
        counts: Sequence[int] = (11, 6, 4),
    ) -> None:
        super().__init__()
        self.is_dict = isinstance(space, spaces.Dict)
        image = space.get("image") if isinstance(space, spaces.Dict) else space
        if len(getattr(image, "shape", None) or ()) != 3 or image.shape[-1] != 3:
            raise FlagError(
                f"--encoder {__name__}:MiniGrid needs an image of shape (H, W, 3), "
                f'alone or as "image" of a Dict; the observation space is {space}'
            )
        self.embeddings = nn.ModuleList(map(nn.Embedding, counts, self.SIZES))
        a, b, c, d, e = times((32, 32, 32, 256, 256), encoder_width)
        pairs = (sum(self.SIZES), a), (a, b), (b, c)
        convolutions = [nn.Conv2d(*pair, 3, stride=2, padding=1) for pair in pairs]
        self.map = nn.Sequential(
            *blocks(convolutions, nn.ELU, layer_norm), nn.Flatten()
        )
        size = output_size(self.map, torch.zeros(1, sum(self.SIZES), *image.shape[:2]))
        self.linear = nn.Sequential(
            *blocks([nn.Linear(size, d), nn.Linear(d, e)], nn.ReLU, layer_norm)
        )
        self.apply(initialize)

    def forward(self, observation: Any) -> torch.Tensor:
        """Images [N, H, W, 3] -> features [N, D] float32."""
        image = observation["image"] if self.is_dict else observation
        numbers = image.long().unbind(-1)
        cells = [f(x) for f, x in zip(self.embeddings, numbers, strict=True)]
        return self.linear(self.map(torch.cat(cells, -1).movedim(-1, 1)))
