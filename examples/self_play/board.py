"""--encoder for boards: it reads the board alone, not the part "opponent"."""

from typing import Any

import numpy as np
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
        self.window = board.window
        self.actions = model.distribution.num_logits

    @staticmethod
    def fits(model: Any) -> bool:
        is_plain = isinstance(model.encoder, Board) and len(model.encoder.join) == 2
        return is_plain and model.core is None and model.explorer is None

    def __call__(self, board: np.ndarray, last_action: int | None) -> np.ndarray:
        """The logits [A] of a board [H, W, C]; the last action is None at first."""
        see, join, policy = self.layers
        board = board.astype(np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(board, self.window, (0, 1))
        cells = windows.shape[0] * windows.shape[1]
        x = np.maximum(windows.reshape(cells, -1) @ see[0].T + see[1], 0)
        x = np.concatenate([x.reshape(-1), board.reshape(-1)])
        x = np.maximum(join[0] @ x + join[1], 0)
        rest = np.zeros(1 + self.actions, np.float32)  # the last reward was 0
        if last_action is not None:
            rest[1 + last_action] = 1
        return policy[0] @ np.concatenate([x, rest]) + policy[1]
