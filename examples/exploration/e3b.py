"""E3B, exploration by elliptical episodic bonuses (Henaff et al. 2022).

The reward of a step to s' is φ(s')ᵀ C⁻¹ φ(s'), where C = λI + Σ φ φᵀ over the
observations of this episode so far: how far φ(s') lies outside of those. φ learns to
predict the action from φ(s) and φ(s').

The actor has φ and keeps C⁻¹ as its state. So the bonus is that of the φ that acted.

Differences: φ has 32 numbers instead of 256 or more, because each rollout carries a
matrix of their square, and is shortened if it is very long; the sum of the bonus and
the environment's reward is not clipped to [-1, 1]; the last step of an episode has no
reward, because its s' is in no rollout. As in the authors' code, the bonus is divided
by its standard deviation.
"""

from typing import Any

import torch
from gymnasium import spaces

from examples.exploration.common import Deviation, Encoder, InverseDynamics, ends
from torchbeast.core.distributions import ActionDistribution
from torchbeast.core.rollout import not_replayed
from torchbeast.extras.explorer.method import Explored, ExplorerActor, Method


class EllipticalBonus(ExplorerActor):
    """The field `elliptical_bonus` [T, B] float32; the state is C⁻¹."""

    def __init__(
        self, space: spaces.Space, size: int, ridge: float, encoder: str
    ) -> None:
        super().__init__()
        self.ridge = ridge
        # With longer φ, C has eigenvalues too far apart for float32, and C⁻¹ is lost.
        self.longest = 300 * ridge**0.5
        self.embed = Encoder(space, size, encoder)

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        weight = self.embed.last.weight
        one = torch.eye(len(weight), device=weight.device) / self.ridge
        return (one.repeat(1, batch_size, 1, 1),)  # [1, B, size, size]

    def act(
        self, rows: dict[str, Any], state: tuple[torch.Tensor, ...]
    ) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        with torch.no_grad():
            x = self.embed(rows["observation"]).unsqueeze(-1)  # [1, B, size, 1]
            x = x * (self.longest / x.norm(dim=-2, keepdim=True)).clamp(max=1)
            begin = self.initial_state(1)[0]
            inverse = torch.where(rows["done"][..., None, None], begin, state[0])
            y = inverse @ x
            bonus = (x * y).sum((-2, -1))  # [1, B]
            # Sherman and Morrison 1950: the inverse of C + x xᵀ.
            inverse = inverse - y @ y.mT / (1 + bonus[..., None, None])
        return {"elliptical_bonus": bonus}, (inverse,)


class E3B(Method):
    """
    Args:
      scale: of the reward.
      size: of φ.
      ridge: λ.
      encoder: see common.Encoder.
    """

    actor: EllipticalBonus

    def __init__(
        self,
        observation_space: spaces.Space,
        distribution: ActionDistribution,
        scale: float = 0.01,
        size: int = 32,
        ridge: float = 0.1,
        encoder: str = "",
    ) -> None:
        super().__init__()
        self.scale = scale
        self.actor = EllipticalBonus(observation_space, size, ridge, encoder)
        self.inverse = InverseDynamics(size, distribution)
        self.deviation = Deviation()

    def explore(self, rows: dict[str, Any], valid: torch.Tensor) -> Explored:
        counted = valid & ~ends(rows)
        bonus = rows["elliptical_bonus"][1:]
        deviation = self.deviation.update(bonus, not_replayed(rows, counted))
        reward = self.scale * bonus / deviation
        embedded = self.actor.embed(rows["observation"])
        loss = self.inverse(embedded, rows["action"][:-1]) * counted
        return Explored(reward * counted, None, loss.sum(), {})
