"""NovelD, the difference of novelties (Zhang et al. 2021).

The reward of a step is max(novelty(s') - α novelty(s), 0) if s' is seen for the first
time in this episode; else it is 0. So the agent is rewarded where it leaves what is
known. Novelty is the distance of a predictor from a random network, as in RND.

Differences: novelty is divided by its standard deviation so far, so that `scale` does
not depend on the networks; first times are told by a hash of the observation; the last
step of an episode has no reward, because its s' is in no rollout.
"""

from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from examples.exploration.common import Deviation, Encoder, EpisodicCounts, ends
from torchbeast.core.rollout import not_replayed
from torchbeast.extras.explorer.method import Explored, Method


class NovelD(Method):
    """
    Args:
      scale: of the reward.
      alpha: the weight of the novelty of s.
      size: of the networks' outputs.
      encoder: see common.Encoder.
      part: what is counted, see common.Hash.
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        distribution: Any,
        scale: float = 0.005,
        alpha: float = 0.5,
        size: int = 128,
        encoder: str = "",
        part: str = "",
    ) -> None:
        super().__init__()
        self.scale, self.alpha = scale, alpha
        self.actor = EpisodicCounts(observation_space, part)
        about = observation_space, size, encoder
        self.target = Encoder(*about).requires_grad_(False)
        layers = nn.ReLU(), nn.Linear(size, size)
        self.predictor = nn.Sequential(Encoder(*about), *layers)
        self.deviation = Deviation()

    def explore(self, rows: dict[str, Any], valid: torch.Tensor) -> Explored:
        x = rows["observation"]
        error = self.predictor(x) - self.target(x)  # [T + 1, B, size]
        counted = valid & ~ends(rows)
        novelty = error.detach().norm(dim=-1)
        new = not_replayed(rows, counted)
        novelty = novelty / self.deviation.update(novelty[1:], new)
        reward = (novelty[1:] - self.alpha * novelty[:-1]).clamp(min=0)
        first = rows["episodic_count"][1:] == 1
        reward = self.scale * reward * (first & counted)
        loss = (error.square().mean(-1)[1:] * valid).sum()
        return Explored(reward, None, loss, {})
