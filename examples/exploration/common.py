"""What the methods share: encoders, hashes and counts of observations, dynamics."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from torchbeast.base import ranks
from torchbeast.base.errors import FlagError
from torchbeast.base.named import make_named
from torchbeast.base.nested import map_nested
from torchbeast.core.distributions import ActionDistribution, make_distribution
from torchbeast.core.observations import (
    is_image,
    iterate_observation,
    iterate_space,
)
from torchbeast.core.rollout import example_rows
from torchbeast.encoders import ImageEncoder, VectorEncoder, initialize
from torchbeast.extras.explorer.method import ExplorerActor


class Layers(nn.Module):
    """Observations [N, *shape] -> features [N, D], by the layers of the policy."""

    def __init__(self, space: spaces.Space) -> None:
        super().__init__()
        self.space = space
        leaves = iterate_space(space)
        self.is_image = [is_image(leaf) for leaf in leaves]
        images = [x for x in leaves if is_image(x)]
        self.images = nn.ModuleList(ImageEncoder(x, "shallow") for x in images)
        others = [x for x in leaves if not is_image(x)]
        self.vector = VectorEncoder(others, "shallow") if others else None
        self.apply(initialize)

    def forward(self, observation: Any) -> torch.Tensor:
        leaves = iterate_observation(self.space, observation)
        images = [x for x, image in zip(leaves, self.is_image, strict=True) if image]
        others = [
            x for x, image in zip(leaves, self.is_image, strict=True) if not image
        ]
        features = [f(x) for f, x in zip(self.images, images, strict=True)]
        if self.vector is not None:
            features.append(self.vector(others))
        return torch.cat(features, -1)


class Encoder(nn.Module):
    """Observations [..., *shape] -> features [..., size] float32.

    Args:
      encoder: MODULE:CLASS[JSON], as in --encoder; by default the policy's layers.

    It has one more layer that makes the size.
    """

    def __init__(self, space: spaces.Space, size: int, encoder: str = "") -> None:
        super().__init__()
        self.space = space
        named = make_named("--explorer, encoder", encoder, space)
        self.encoder = named or Layers(space)
        self.last = nn.LazyLinear(size)
        example = example_rows(space, make_distribution(spaces.Discrete(1)))
        self(example["observation"])  # finds the size of the last layer's input

    def forward(self, observation: Any) -> torch.Tensor:
        lead = leading(self.space, iterate_observation(self.space, observation))
        flat = map_nested(lambda x: x.flatten(0, len(lead) - 1), observation)
        return self.last(self.encoder(flat)).unflatten(0, lead)


def leading(space: spaces.Space, leaves: list[torch.Tensor]) -> torch.Size:
    """The sizes [...] before the shape of an observation."""
    own = len(iterate_space(space)[0].shape or ())
    return leaves[0].shape[: leaves[0].dim() - own]


class Hash(nn.Module):
    """Observations [..., *shape] -> numbers of buckets [...], in [0, buckets).

    Args:
      part: of a Dict, the key of what is told apart. A part that counts steps, such as
        NetHack's blstats, would make all observations differ.

    Equal observations have the same number. Others can have it, too: with n different
    ones, about n² / (2 buckets) pairs.
    """

    factors: torch.Tensor  # [D] int64

    def __init__(self, space: spaces.Space, buckets: int, part: str = "") -> None:
        super().__init__()
        self.part = part
        if part:
            keys = list(space) if isinstance(space, spaces.Dict) else []
            if part not in keys:
                raise FlagError(f"--explorer: part {part!r} is none of {keys}")
            space = space[part]
        self.space, self.buckets = space, buckets
        size = sum(int(np.prod(x.shape or ())) for x in iterate_space(space))
        # The same in all processes and at a resume.
        factors = np.random.default_rng(0).integers(1, 2**62, size) | 1
        self.register_buffer("factors", torch.from_numpy(factors), persistent=False)

    def forward(self, observation: Any) -> torch.Tensor:
        if self.part:
            observation = observation[self.part]
        leaves = iterate_observation(self.space, observation)
        parts = []
        for leaf, x in zip(iterate_space(self.space), leaves, strict=True):
            if x.is_floating_point():
                x = (x.float() + 0.0).view(torch.int32)  # its bits; -0.0 is 0.0
            parts.append(x.reshape(*leading(leaf, [x]), -1).long())
        x = (torch.cat(parts, -1) * self.factors).sum(-1)  # wraps around
        return ((x ^ (x >> 29)) * -7046029254386353131 >> 20) % self.buckets


class EpisodicCounts(ExplorerActor):
    """Counts how often the observation was seen in this episode.

    The field `episodic_count` [T, B] float32 is at least 1. The state is a table of
    counts by hash. So after n different observations of an episode, a new one counts as
    seen with a probability of about n / buckets.
    """

    def __init__(self, space: spaces.Space, part: str = "", buckets: int = 4096):
        super().__init__()
        self.hash = Hash(space, buckets, part)

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        device = self.hash.factors.device
        return (torch.zeros(1, batch_size, self.hash.buckets, device=device),)

    def act(
        self, rows: dict[str, Any], state: tuple[torch.Tensor, ...]
    ) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        counts = state[0] * ~rows["done"].unsqueeze(-1)  # a new tensor
        bucket = self.hash(rows["observation"]).unsqueeze(-1)  # [1, B, 1]
        counts.scatter_add_(-1, bucket, torch.ones_like(bucket, dtype=counts.dtype))
        return {"episodic_count": counts.gather(-1, bucket).squeeze(-1)}, (counts,)


def ends(rows: dict[str, Any]) -> torch.Tensor:
    """[T, B] bool: row t + 1 has the first observation of another episode.

    The last observation of an episode is in no row, so that nothing can be said about
    the step to it.
    """
    return rows["done"][1:]


class InverseDynamics(nn.Module):
    """Predicts the action between two observations from their embeddings.

    So the embeddings learn what the agent can change.
    """

    def __init__(self, size: int, distribution: ActionDistribution) -> None:
        super().__init__()
        self.distribution = distribution
        layers = nn.Linear(2 * size, 256), nn.ReLU()
        self.layers = nn.Sequential(*layers, nn.Linear(256, distribution.num_logits))

    def forward(self, embedded: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Losses [T, B], in nats, of embeddings [T + 1, B, D] and actions [T, B, ...].

        A step across an episode's end has a number that says nothing.
        """
        logits = self.layers(torch.cat([embedded[:-1], embedded[1:]], -1))
        return -self.distribution.log_prob(logits, action)


class Deviation(nn.Module):
    """The standard deviation of all values so far, of those that count.

    It is a hundredth of their mean at least: the first values can be nearly equal, and
    rewards divided by less would be too large for the learner.
    """

    mean: torch.Tensor  # float32
    square: torch.Tensor  # float32, the mean of the squares
    count: torch.Tensor  # int64

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("square", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def update(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Adds values [T, B], of those that counts [T, B]; returns the deviation.

        Values that are not finite end the run; a checkpoint must not have them.
        """
        counts = counts & x.isfinite()
        number = ranks.total(counts.sum())
        self.count += number
        x, share = x.where(counts, 0.0), 1 / self.count.clamp(min=1)
        self.mean += share * (ranks.total(x.sum()) - number * self.mean)
        self.square += share * (ranks.total(x.square().sum()) - number * self.square)
        deviation = (self.square - self.mean.square()).clamp(min=1e-8).sqrt()
        return torch.maximum(deviation, 0.01 * self.mean.abs())
