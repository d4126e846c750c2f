"""Policies over action spaces: the meaning of the policy head's logits.

An action distribution has no parameters. It turns the flat logits [..., num_logits] of
the model into actions, log-probabilities and entropies. So model, loss and actors work
with any action space.

Actions whose logits are -inf, see `mask`, are never sampled and add nothing to the
entropy.
"""

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces

from torchbeast.base import devices
from torchbeast.core import vtrace

NUM_SAMPLES = 64  # for the mean over a policy that has no sum


class ActionDistribution(ABC):
    """The interface of all distributions.

    Attributes:
      num_logits: size of the policy head.
      num_features: size of `features`.
      action_shape, action_dtype: of one action.
    """

    num_logits: int
    num_features: int
    action_shape: tuple[int, ...]
    action_dtype: torch.dtype

    @abstractmethod
    def sample(
        self, logits: torch.Tensor, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Samples actions [..., *action_shape] from logits [..., num_logits]."""

    @abstractmethod
    def mode(self, logits: torch.Tensor) -> torch.Tensor:
        """The most likely actions [..., *action_shape]."""

    @abstractmethod
    def log_prob(self, logits: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Log-probability [...] of actions [..., *action_shape], in nats."""

    @abstractmethod
    def entropy(self, logits: torch.Tensor) -> torch.Tensor:
        """Entropy [...] in nats."""

    @abstractmethod
    def features(self, action: torch.Tensor) -> torch.Tensor:
        """Encodes actions [..., *action_shape] for a network: [..., num_features]."""

    def mask(self, logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """Sets the logits of forbidden choices to -inf.

        Args:
          logits, allowed: [..., num_logits]; allowed is bool. Where it forbids all
            choices, all count as allowed: after the end of an episode there are none.
        """
        raise ValueError(f"the actions of a {type(self).__name__} can't be masked")

    def implied_kl(
        self, target: torch.Tensor, behavior: torch.Tensor, clip_rho: float
    ) -> torch.Tensor:
        """KL(π ‖ π̃) [...] in nats, where π̃ ∝ min(ρ̄ μ, π) is what V-trace evaluates.

        Schmitt et al. 2019, section 4.1. With X = max(0, log π - log μ - log ρ̄), it is
        E_π[X] + log E_π[exp(-X)]. Here both means are over samples of π.

        Args:
          target, behavior: logits [..., num_logits] of π and μ.
          clip_rho: ρ̄; inf gives 0.
        """
        many = target.expand(NUM_SAMPLES, *target.shape)
        actions = self.sample(many)
        log_ratio = self.log_prob(many, actions) - self.log_prob(
            behavior.expand(many.shape), actions
        )
        excess = (log_ratio - math.log(clip_rho)).clamp(min=0)
        # In the log, because the ratio of two narrow policies leaves float32's range.
        return excess.mean(0) + excess.neg().logsumexp(0) - math.log(len(excess))


class Categorical(ActionDistribution):
    """Discrete(n): softmax over n logits."""

    action_shape = ()
    action_dtype = torch.int64

    def __init__(self, num_actions: int) -> None:
        self.num_logits = self.num_features = num_actions

    def sample(
        self, logits: torch.Tensor, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        # Gumbel-max trick: argmax(logits + Gumbel noise) has the law softmax(logits).
        noise = torch.empty_like(logits).exponential_(generator=generator)
        return (logits - noise.log_()).argmax(-1)

    def mode(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)

    def log_prob(self, logits: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return vtrace.action_log_probs(logits, action)

    def entropy(self, logits: torch.Tensor) -> torch.Tensor:
        log_policy = F.log_softmax(logits, dim=-1)
        # p log p -> 0 for p -> 0, but 0 * -inf would be NaN, also in the gradient.
        return -(log_policy.exp() * vtrace.finite(log_policy)).sum(-1)

    def features(self, action: torch.Tensor) -> torch.Tensor:
        return F.one_hot(action.long(), self.num_logits).float()

    def mask(self, logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        allowed = allowed | ~allowed.any(-1, keepdim=True)
        return logits.masked_fill(~allowed, -math.inf)

    def implied_kl(
        self, target: torch.Tensor, behavior: torch.Tensor, clip_rho: float
    ) -> torch.Tensor:
        """As the base class, but exact: the means are over all actions."""
        log_target = F.log_softmax(target, dim=-1)
        log_ratio = log_target - F.log_softmax(behavior, dim=-1)
        policy = log_target.exp()
        # An action that π never takes, maybe because it is masked, adds nothing.
        excess = (log_ratio - math.log(clip_rho)).clamp(min=0)
        excess = excess.masked_fill(policy == 0, 0)
        return (policy * excess).sum(-1) + (policy * excess.neg().exp()).sum(-1).log()


class MultiCategorical(ActionDistribution):
    """MultiDiscrete([n1, n2, ...]): independent choices with concatenated logits."""

    action_dtype = torch.int64

    def __init__(self, num_actions: tuple[int, ...]) -> None:
        self.num_actions = num_actions
        self.action_shape = (len(num_actions),)
        self.num_logits = self.num_features = sum(num_actions)
        self._parts = [Categorical(n) for n in num_actions]

    def _split(self, logits: torch.Tensor) -> list[tuple[Categorical, torch.Tensor]]:
        """Each choice with its logits."""
        parts = logits.split(self.num_actions, dim=-1)
        return list(zip(self._parts, parts, strict=True))

    def sample(
        self, logits: torch.Tensor, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        draws = [d.sample(x, generator) for d, x in self._split(logits)]
        return torch.stack(draws, dim=-1)

    def mode(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.stack([d.mode(x) for d, x in self._split(logits)], dim=-1)

    def log_prob(self, logits: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        parts = zip(self._split(logits), action.unbind(dim=-1), strict=True)
        return torch.stack([d.log_prob(x, a) for (d, x), a in parts]).sum(0)

    def entropy(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.stack([d.entropy(x) for d, x in self._split(logits)]).sum(0)

    def features(self, action: torch.Tensor) -> torch.Tensor:
        parts = zip(self._parts, action.unbind(dim=-1), strict=True)
        return torch.cat([d.features(a) for d, a in parts], dim=-1)

    def mask(self, logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        parts = zip(self._split(logits), self._split(allowed), strict=True)
        return torch.cat([d.mask(x, a) for (d, x), (_, a) in parts], dim=-1)


class DiagonalGaussian(ActionDistribution):
    """Box: independent normal distributions. The logits are means, then deviations.

    Bounded dimensions are scaled to [-1, 1]. Their standard deviation is the sigmoid of
    the logit: at first 0.5, so that an untrained policy covers the range, and never
    above 1. A larger one mostly gives one bound or the other, by chance. Other
    dimensions have exp(logit), up to exp(2). None is below exp(-5). Log-probability and
    entropy are those of the scaled action. They differ from the unscaled ones by a
    constant, which cancels in ratios and gradients.

    Actions are not clipped here. The environment clips them, but the log-probability
    is that of the sampled action.
    """

    action_dtype = torch.float32
    min_log_std, max_log_std = -5.0, 2.0

    def __init__(self, low: np.ndarray, high: np.ndarray) -> None:
        self.action_shape = low.shape
        self.num_features = int(np.prod(low.shape))
        self.num_logits = 2 * self.num_features
        low, high = low.astype(np.float64), high.astype(np.float64)
        # Very wide bounds, and bounds that leave one value, are not used as scale.
        bounded = (high - low > 0) & (high - low < 1e10)
        low, high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
        self._bounded = torch.tensor(bounded).flatten()
        self._center = torch.tensor((high + low) / 2, dtype=torch.float32)
        self._scale = torch.tensor((high - low) / 2, dtype=torch.float32)

    def _normal(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, x = logits.chunk(2, dim=-1)
        log_std = torch.where(devices.send(self._bounded, x.device), F.logsigmoid(x), x)
        return mean, log_std.clamp(self.min_log_std, self.max_log_std)

    def _to_action(self, z: torch.Tensor) -> torch.Tensor:
        z = z.reshape(z.shape[:-1] + self.action_shape)
        center, scale = (devices.send(x, z.device) for x in (self._center, self._scale))
        return center + scale * z

    def _from_action(self, action: torch.Tensor) -> torch.Tensor:
        device = action.device
        center, scale = (devices.send(x, device) for x in (self._center, self._scale))
        leading = action.shape[: action.dim() - len(self.action_shape)]
        return ((action - center) / scale).reshape(*leading, self.num_features)

    def sample(
        self, logits: torch.Tensor, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        mean, log_std = self._normal(logits)
        noise = torch.empty_like(mean).normal_(generator=generator)
        return self._to_action(mean + log_std.exp() * noise)

    def mode(self, logits: torch.Tensor) -> torch.Tensor:
        return self._to_action(self._normal(logits)[0])

    def log_prob(self, logits: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        mean, log_std = self._normal(logits)
        z = (self._from_action(action) - mean) * torch.exp(-log_std)
        return (-0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, logits: torch.Tensor) -> torch.Tensor:
        _, log_std = self._normal(logits)
        return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def features(self, action: torch.Tensor) -> torch.Tensor:
        # Clipped, because the model gets its last action as input: a growing mean
        # would make itself grow further.
        return self._from_action(action).clamp(-1, 1)


def make_distribution(action_space: spaces.Space) -> ActionDistribution:
    """The distribution for an action space of Gymnasium.

    Raises ValueError if it is no Discrete, MultiDiscrete [n] or Box of floats.
    """
    if isinstance(action_space, spaces.Discrete):
        return Categorical(int(action_space.n))
    if isinstance(action_space, spaces.MultiDiscrete) and action_space.nvec.ndim == 1:
        return MultiCategorical(tuple(int(n) for n in action_space.nvec))
    if isinstance(action_space, spaces.Box) and np.issubdtype(
        action_space.dtype, np.floating
    ):
        return DiagonalGaussian(action_space.low, action_space.high)
    raise ValueError(
        f"no policy for the action space {action_space}; supported are Discrete, "
        "one-dimensional MultiDiscrete and Box of floats. For another, add a class to "
        "torchbeast/core/distributions.py"
    )
