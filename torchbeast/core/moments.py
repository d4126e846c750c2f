"""Running moments: the mean and variance of all values so far.

They are buffers of the model. So they are saved with it, and actors get them with the
weights. Only the learner updates them.
"""

import torch
from torch import nn

from torchbeast.base import ranks
from torchbeast.core.finite import TOO_LARGE

CLIP = 10.0  # normalized values, as in PPO's implementations


class RunningMoments(nn.Module):
    """Mean and variance per element of values [N, *shape].

    Args:
      shape: of one value.
    """

    mean: torch.Tensor  # [*shape] float32
    variance: torch.Tensor  # [*shape] float32; 1 before the first update
    count: torch.Tensor  # int64

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @property
    def std(self) -> torch.Tensor:
        return (self.variance + 1e-8).sqrt()

    @torch.no_grad()
    def update(self, values: torch.Tensor) -> None:
        """Adds values [N, *shape] (Chan, Golub and LeVeque 1979, equation 2.1).

        NaN, infinity and numbers above TOO_LARGE would stay in the moments. The current
        mean replaces them.
        """
        values = values.float()
        values = torch.where(values.abs() <= TOO_LARGE, values, self.mean)
        number = len(values) * ranks.size()
        total = self.count + number
        # Shares; MPS lacks float64.
        wide = total.float() if total.device.type == "mps" else total.double()
        new, old = number / wide, self.count / wide
        variance, mean = torch.var_mean(values, dim=0, correction=0)
        if ranks.size() > 1:  # those of the values of all ranks, which have as many
            own = mean
            mean = ranks.total(own) / ranks.size()
            variance = ranks.total(variance + (own - mean).square()) / ranks.size()
        # Both variances, and the squared distance of the means.
        distance = (new * old).float() * (mean - self.mean).square()
        self.mean.lerp_(mean, new.float())
        self.variance.lerp_(variance, new.float()).add_(distance)
        self.count.copy_(total)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Values [..., *shape], normalized and clipped."""
        return ((values - self.mean) / self.std).clamp(-CLIP, CLIP)
