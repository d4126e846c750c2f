"""--explorer that rewards nothing, and logs the score against each opponent."""

from typing import Any

import torch
import torch.nn.functional as F
from gymnasium import spaces

from torchbeast.base import ranks
from torchbeast.core.rollout import not_replayed
from torchbeast.extras.explorer.method import Explored, Method


class Scores(Method):
    """Columns of logs.csv, one number per opponent k, see SelfPlay.

    opponent_games_k   games against it that ended in the batch
    opponent_score_k   mean reward of the games against it; old games count less. Empty
                       before the first.

    Args:
      decay: the weight of a game after another one against the same opponent.
    """

    games: torch.Tensor  # [K], the sum of their weights
    rewards: torch.Tensor  # [K], the sum with these weights

    def __init__(
        self, observation_space: spaces.Dict, distribution: Any, decay: float = 0.99
    ) -> None:
        super().__init__()
        self.decay, self.number = decay, int(observation_space["opponent"].n)
        for name in ("games", "rewards"):
            self.register_buffer(name, torch.zeros(self.number))

    @torch.no_grad()
    def explore(self, rows: dict[str, Any], valid: torch.Tensor) -> Explored:
        # A row with done has the reward of a game, and the opponent of the next one.
        opponent, reward = rows["observation"]["opponent"][:-1], rows["reward"][1:]
        over = not_replayed(rows, rows["done"][1:] & valid)
        each = F.one_hot(opponent[over].long(), self.number).float()  # [games, K]
        new = ranks.total(each.sum(0))
        fades = self.decay**new
        self.games.mul_(fades).add_(new)
        self.rewards.mul_(fades).add_(ranks.total(each.T @ reward[over]))
        columns = {
            "opponent_games": new.long(),
            "opponent_score": self.rewards / self.games,  # NaN: an empty cell
        }
        return Explored(torch.zeros_like(reward), None, None, columns)
