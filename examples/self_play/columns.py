"""--encoder for Connect Four: it reads the board alone, not the part "opponent"."""

import itertools
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from torchbeast.encoders import initialize, times

HEIGHT, WIDTH = 6, 7
CELLS = HEIGHT * WIDTH  # the number of a cell that is always empty, for padding


def make_lines() -> np.ndarray:
    """The cells of all fours in a row: [69, 4]."""
    found = []
    for row, column in itertools.product(range(HEIGHT), range(WIDTH)):
        for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
            cells = [(row + i * down, column + i * right) for i in range(4)]
            if all(r < HEIGHT and 0 <= c < WIDTH for r, c in cells):
                found.append([r * WIDTH + c for r, c in cells])
    return np.array(found)


def make_others(lines: np.ndarray) -> np.ndarray:
    """The other three cells of each line through a cell: [43, 13, 3], padded."""
    others = np.full((CELLS + 1, 13, 3), CELLS)
    for cell in range(CELLS):
        through = [[x for x in line if x != cell] for line in lines if cell in line]
        others[cell, : len(through)] = through
    return others


LINES = make_lines()
OTHERS = make_others(LINES)


class Columns(nn.Module):
    """Boards [N, 6, 7, 2] of bits -> features [N, D].

    For each column it sees the cell where a piece would land, and the cell above. A
    filter sees the other three cells of a line through a cell. All lines of all columns
    have the same filters, so what they learn in one place they know in all.
    """

    others: torch.Tensor  # see make_others

    def __init__(
        self,
        observation_space: spaces.Dict,
        encoder_width: float = 1.0,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        assert observation_space["observation"].shape == (HEIGHT, WIDTH, 2)
        self.register_buffer("others", torch.from_numpy(OTHERS), persistent=False)
        filters, units, hidden = times((16, 32, 128), encoder_width)
        self.line = nn.Linear(3 * 2, filters)
        self.column = nn.Linear(2 * 2 * filters, units)
        self.board = nn.Linear(WIDTH * units + CELLS * 2, hidden)
        self.apply(initialize)

    def forward(self, observation: dict[str, torch.Tensor]) -> torch.Tensor:
        board = observation["observation"].float().flatten(1, 2)  # [N, 42, 2]
        N = len(board)
        filled = board.sum(2).view(N, HEIGHT, WIDTH).sum(1).long()  # pieces per column
        cells = torch.stack([filled, filled + 1], 2)  # [N, 7, 2], heights
        column = torch.arange(WIDTH, device=board.device)[:, None]
        cells = torch.where(
            cells < HEIGHT, (HEIGHT - 1 - cells) * WIDTH + column, CELLS
        )
        padded = nn.functional.pad(board, (0, 0, 0, 1))  # [N, 43, 2]
        places = self.others[cells].flatten(1)  # [N, 7 * 2 * 13 * 3]
        seen = padded.gather(1, places[..., None].expand(-1, -1, 2))
        x = self.line(seen.view(N, WIDTH, 2, 13, 6)).relu()  # [N, 7, 2, 13, F]
        x = torch.cat([x.amax(3), x.mean(3)], 3).flatten(2)
        x = self.column(x).relu().flatten(1)  # [N, 7 * units]
        y = self.board(torch.cat([x, board.flatten(1)], 1)).relu()
        return torch.cat([x, y], 1)


class NumpyPolicy:
    """The policy of a model with this encoder and without a core, for one board.

    It is several times as fast as PyTorch, whose time is mostly not that of arithmetic.
    """

    def __init__(self, model: Any) -> None:
        encoder: Columns = model.encoder
        layers = encoder.line, encoder.column, encoder.board, model.policy
        self.layers = [
            (x.weight.detach().numpy().T, x.bias.detach().numpy()) for x in layers
        ]
        self.actions = model.distribution.num_logits

    @staticmethod
    def fits(model: Any) -> bool:
        is_plain = model.core is None and model.explorer is None
        return is_plain and isinstance(model.encoder, Columns)

    def __call__(self, board: np.ndarray, last_action: int | None) -> np.ndarray:
        """The logits [7] of a board [6, 7, 2]; the last action is None at first."""
        (line, a), (column, b), (all_of_it, c), (policy, d) = self.layers
        filled = board.sum((0, 2), dtype=np.int64)
        cells = np.stack([filled, filled + 1], 1)  # [7, 2], heights
        columns = np.arange(WIDTH)[:, None]
        cells = np.where(cells < HEIGHT, (HEIGHT - 1 - cells) * WIDTH + columns, CELLS)
        padded = np.zeros((CELLS + 1, 2), np.float32)
        padded[:CELLS] = board.reshape(CELLS, 2)
        seen = padded[OTHERS[cells]].reshape(-1, 6)
        x = np.maximum(seen @ line + a, 0).reshape(WIDTH, 2, 13, -1)
        x = np.concatenate([x.max(2), x.mean(2)], 2).reshape(WIDTH, -1)
        x = np.maximum(x @ column + b, 0).reshape(-1)
        y = np.concatenate([x, padded[:CELLS].reshape(-1)])
        y = np.maximum(y @ all_of_it + c, 0)
        rest = np.zeros(1 + self.actions, np.float32)  # the last reward was 0
        if last_action is not None:
            rest[1 + last_action] = 1
        return np.concatenate([x, y, rest]) @ policy + d
