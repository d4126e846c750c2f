"""Counts of observations (Bellemare et al. 2016, Tang et al. 2017).

The reward of a step to s' is scale / √N(s').

Differences: observations are told apart by a hash of all their numbers, not by a
density model or a learned code. So it fits small worlds, such as MiniGrid's.
"""

from typing import Any

import torch
from gymnasium import spaces

from examples.exploration.common import Hash, ends
from torchbeast.base import ranks
from torchbeast.core.rollout import not_replayed
from torchbeast.extras.explorer.method import Explored, Method


class Counts(Method):
    """
    Args:
      scale: of the reward.
      buckets: size of the table of counts.
      part: what is counted, see common.Hash.
    """

    counts: torch.Tensor  # [buckets] float32

    def __init__(
        self,
        observation_space: spaces.Space,
        distribution: Any,
        scale: float = 0.01,
        buckets: int = 2**20,
        part: str = "",
    ) -> None:
        super().__init__()
        self.scale, self.hash = scale, Hash(observation_space, buckets, part)
        self.register_buffer("counts", torch.zeros(buckets))

    @torch.no_grad()
    def explore(self, rows: dict[str, Any], valid: torch.Tensor) -> Explored:
        bucket = self.hash(rows["observation"])[1:]  # [T, B]
        new = bucket[not_replayed(rows, valid)]
        new = torch.bincount(new, minlength=len(self.counts))
        self.counts += ranks.total(new)
        reward = self.scale / self.counts[bucket].clamp(min=1).sqrt()
        return Explored(reward * valid * ~ends(rows), None, None, {})
