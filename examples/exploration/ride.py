"""RIDE, rewarding impact-driven exploration (Raileanu and Rocktäschel 2020).

The reward of a step is its impact on an embedding φ, ‖φ(s') - φ(s)‖₂ / √N(s'), where N
counts how often s' was seen in this episode. φ learns from two tasks: to predict the
action from φ(s) and φ(s'), and φ(s') from φ(s) and the action.

Differences: impact is divided by its mean in the batch, because φ shrinks while it
learns; N counts a hash of the observation, so that two can share a count; the networks
have an optimizer of their own, Adam; the last step of an episode has no reward, because
its s' is in no rollout.
"""

from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from examples.exploration.common import Encoder, EpisodicCounts, InverseDynamics, ends
from torchbeast.base import ranks
from torchbeast.core.distributions import ActionDistribution
from torchbeast.extras.explorer.method import Explored, Method


class RIDE(Method):
    """
    Args:
      scale: of the reward.
      size: of the embedding.
      forward_cost, inverse_cost: weights of the two losses.
      encoder: see common.Encoder.
      part: what is counted, see common.Hash.
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        distribution: ActionDistribution,
        scale: float = 0.003,
        size: int = 128,
        forward_cost: float = 10.0,
        inverse_cost: float = 0.1,
        encoder: str = "",
        part: str = "",
    ) -> None:
        super().__init__()
        self.scale, self.distribution = scale, distribution
        self.forward_cost, self.inverse_cost = forward_cost, inverse_cost
        self.actor = EpisodicCounts(observation_space, part)
        self.embed = Encoder(observation_space, size, encoder)
        self.inverse = InverseDynamics(size, distribution)
        inputs = size + distribution.num_features
        self.predict = nn.Sequential(
            nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, size)
        )

    def explore(self, rows: dict[str, Any], valid: torch.Tensor) -> Explored:
        counted = valid & ~ends(rows)
        embedded = self.embed(rows["observation"])  # [T + 1, B, size]
        now, after = embedded[:-1], embedded[1:]
        action = rows["action"][:-1]
        features = self.distribution.features(action.flatten(0, 1))
        features = features.unflatten(0, action.shape[:2])
        predicted = self.predict(torch.cat([now, features], -1))
        forward = 0.5 * (predicted - after).square().sum(-1) * counted
        inverse = self.inverse(embedded, action) * counted
        impact = (after - now).detach().norm(dim=-1)
        number = ranks.total(counted.sum()).clamp(min=1)
        mean = ranks.total((impact * counted).sum()) / number
        impact = impact / mean.clamp(min=1e-8)
        # A row that is padding has a count of 0.
        counts = rows["episodic_count"][1:].clamp(min=1)
        reward = self.scale * impact / counts.sqrt()
        loss = self.forward_cost * forward.sum() + self.inverse_cost * inverse.sum()
        return Explored(reward * counted, None, loss, {})
