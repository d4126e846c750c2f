"""Random network distillation (Burda et al. 2018).

The reward is the error of a network that predicts the output of a random one. It has a
value head of its own, which does not end with episodes (section 2.3).

Differences: rewards are divided by the standard deviation of the errors, not of their
discounted returns; observations are neither normalized nor clipped, beyond what the
encoder does; the predictor learns from each batch once, with all of its steps.
"""

from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from examples.exploration.common import Deviation, Encoder, ends
from torchbeast.core.rollout import not_replayed
from torchbeast.envs.values import agent_is_present
from torchbeast.extras.explorer.method import Explored, Method


class RND(Method):
    """
    Args:
      scale: of the reward.
      discounting: of its value.
      size: of the networks' outputs.
      learning_rate: of the predictor.
      encoder: see common.Encoder.
    """

    value_head = True

    def __init__(
        self,
        observation_space: spaces.Space,
        distribution: Any,
        scale: float = 0.1,
        discounting: float = 0.99,
        size: int = 128,
        learning_rate: float = 1e-4,
        encoder: str = "",
    ) -> None:
        super().__init__()
        self.scale, self.discounting = scale, discounting
        self.learning_rate = learning_rate
        about = observation_space, size, encoder
        self.target = Encoder(*about).requires_grad_(False)
        layers = nn.ReLU(), nn.Linear(size, size)
        self.predictor = nn.Sequential(Encoder(*about), *layers)
        self.deviation = Deviation()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.predictor.parameters(), self.learning_rate)

    def explore(self, rows: dict[str, Any], valid: torch.Tensor) -> Explored:
        with torch.no_grad():
            target = self.target(rows["observation"])
        error = (self.predictor(rows["observation"]) - target).square().mean(-1)[1:]
        counted = valid & ~ends(rows)
        new = not_replayed(rows, counted)
        deviation = self.deviation.update(error.detach(), new)
        reward = self.scale * counted * error.detach() / deviation
        # Nobody learns the values of rows of an agent that is absent.
        present = torch.ones_like(rows["done"]) & agent_is_present(rows["observation"])
        discount = self.discounting * present[1:]
        return Explored(reward, discount, (error * valid).sum(), {})
