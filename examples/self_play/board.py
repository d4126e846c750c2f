"""--encoder for boards: it reads the board alone, not the part "opponent"."""

import itertools
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from torchbeast.encoders import blocks, initialize, times


def lines(height: int, width: int, length: int) -> np.ndarray:
    """The cells of all lines of a board, in each direction: [lines, length]."""
    found = []
    for row, column in itertools.product(range(height), range(width)):
        for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
            cells = [(row + i * down, column + i * right) for i in range(length)]
            if all(r < height and 0 <= c < width for r, c in cells):
                found.append([r * width + c for r, c in cells])
    return np.array(found)


class Board(nn.Module):
    """Boards [N, H, W, C] of bits -> features [N, D].

    Its filters see the cells of one line, and each filter sees all lines: a convolution
    in four directions.

    Args:
      length: of a line, 4 in Connect Four.
    """

    cells: torch.Tensor  # [lines, length * C], of the flattened board

    def __init__(
        self,
        observation_space: spaces.Dict,
        encoder_width: float = 1.0,
        layer_norm: bool = False,
        length: int = 4,
    ) -> None:
        super().__init__()
        height, width, planes = observation_space["observation"].shape
        cells = lines(height, width, length)[..., None] * planes + np.arange(planes)
        cells = torch.from_numpy(cells).flatten(1)
        self.register_buffer("cells", cells, persistent=False)
        filters, hidden = times((16, 256), encoder_width)
        self.see = nn.Linear(length * planes, filters)
        size = len(cells) * filters + height * width * planes
        linear = nn.Linear(size, hidden)
        self.join = nn.Sequential(*blocks([linear], layer_norm=layer_norm))
        self.apply(initialize)

    def forward(self, observation: dict[str, torch.Tensor]) -> torch.Tensor:
        board = observation["observation"].float().flatten(1)
        seen = self.see(board[:, self.cells]).relu().flatten(1)
        return self.join(torch.cat([seen, board], 1))


class NumpyPolicy:
    """The policy of a model with this encoder and without a core, for one board.

    It takes a tenth of PyTorch's time, most of which is not spent on arithmetic.
    """

    def __init__(self, model: Any) -> None:
        board: Board = model.encoder
        layers = (board.see, board.join[0], model.policy)
        self.layers = [
            (x.weight.detach().numpy(), x.bias.detach().numpy()) for x in layers
        ]
        self.cells = board.cells.numpy()
        self.actions = model.distribution.num_logits

    @staticmethod
    def fits(model: Any) -> bool:
        is_plain = isinstance(model.encoder, Board) and len(model.encoder.join) == 2
        return is_plain and model.core is None and model.explorer is None

    def __call__(self, board: np.ndarray, last_action: int | None) -> np.ndarray:
        """The logits [A] of a board [H, W, C]; the last action is None at first."""
        see, join, policy = self.layers
        board = board.reshape(-1).astype(np.float32)
        seen = np.maximum(board[self.cells] @ see[0].T + see[1], 0)
        x = np.concatenate([seen.reshape(-1), board])
        x = np.maximum(join[0] @ x + join[1], 0)
        rest = np.zeros(1 + self.actions, np.float32)  # the last reward was 0
        if last_action is not None:
            rest[1 + last_action] = 1
        return policy[0] @ np.concatenate([x, rest]) + policy[1]
