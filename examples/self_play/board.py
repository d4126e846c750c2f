"""--encoder for boards: it reads the board alone, not the part "opponent"."""

import torch
from gymnasium import spaces
from torch import nn

from torchbeast.encoders import blocks, initialize, times


class Board(nn.Module):
    """Boards [N, H, W, C] of bits -> features [N, D].

    Its filters see 4 x 4 cells, so that one of them can see four in a row. They are a
    convolution; written like this it takes a third of the time for a single board.
    """

    def __init__(
        self,
        observation_space: spaces.Dict,
        encoder_width: float = 1.0,
        layer_norm: bool = False,
        size: int = 4,
    ) -> None:
        super().__init__()
        height, width, planes = observation_space["observation"].shape
        self.window = min(size, height), min(size, width)
        a, b = self.window
        filters, hidden = times((64, 256), encoder_width)
        self.see = nn.Linear(planes * a * b, filters)
        cells = (height - a + 1) * (width - b + 1)
        linear = nn.Linear(cells * filters + height * width * planes, hidden)
        self.join = nn.Sequential(*blocks([linear], layer_norm=layer_norm))
        self.apply(initialize)

    def forward(self, observation: dict[str, torch.Tensor]) -> torch.Tensor:
        board = observation["observation"].float()
        a, b = self.window
        windows = board.unfold(1, a, 1).unfold(2, b, 1).flatten(3)
        seen = self.see(windows).relu().flatten(1)
        return self.join(torch.cat([seen, board.flatten(1)], 1))
