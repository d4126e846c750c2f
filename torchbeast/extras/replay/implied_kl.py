"""How far the policy is from what V-trace evaluates (Schmitt et al. 2019, LASER)."""

import math

import torch
import torch.nn.functional as F

from torchbeast.core.distributions import ActionDistribution, Categorical

NUM_SAMPLES = 64  # for the mean over a policy that has no sum


def implied_kl(
    distribution: ActionDistribution,
    target: torch.Tensor,
    behavior: torch.Tensor,
    clip_rho: float,
) -> torch.Tensor:
    """KL(π ‖ π̃) [...] in nats, where π̃ ∝ min(ρ̄ μ, π) is what V-trace evaluates.

    With X = max(0, log π - log μ - log ρ̄), it is E_π[X] + log E_π[exp(-X)] (section
    4.1). Of a Categorical the means are exact, else they are over samples of π.

    Args:
      target, behavior: logits [..., num_logits] of π and μ.
      clip_rho: ρ̄; inf gives 0.
    """
    if isinstance(distribution, Categorical):
        log_target = F.log_softmax(target, dim=-1)
        log_ratio = log_target - F.log_softmax(behavior, dim=-1)
        policy = log_target.exp()
        # An action that π never takes, maybe because it is masked, adds nothing.
        excess = (log_ratio - math.log(clip_rho)).clamp(min=0)
        excess = excess.masked_fill(policy == 0, 0)
        return (policy * excess).sum(-1) + (policy * excess.neg().exp()).sum(-1).log()
    many = target.expand(NUM_SAMPLES, *target.shape)
    actions = distribution.sample(many)
    log_ratio = distribution.log_prob(many, actions) - distribution.log_prob(
        behavior.expand(many.shape), actions
    )
    excess = (log_ratio - math.log(clip_rho)).clamp(min=0)
    # In the log, because the ratio of two narrow policies leaves float32's range.
    return excess.mean(0) + excess.neg().logsumexp(0) - math.log(len(excess))
