"""V-trace: off-policy corrected value targets and policy-gradient advantages.

And the losses of the policy and the values that learn from them.

Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted
Actor-Learner Architectures", 2018, section 4.1. https://arxiv.org/abs/1802.01561

T is the unroll length, B the batch size, A the number of actions. C... are extra
trailing dimensions, for example one for several value heads. The values have all of
them. In the other arguments each may be 1 and is broadcast, so that all value heads can
share rewards [T, B, 1].
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F


class VTraceReturns(NamedTuple):
    vs: torch.Tensor  # [T, B, C...] float: regression targets of the values
    pg_advantages: torch.Tensor  # [T, B, C...] float: weights of the log-probabilities


class VTraceFromLogitsReturns(NamedTuple):
    vs: torch.Tensor  # [T, B, C...]
    pg_advantages: torch.Tensor  # [T, B, C...]
    log_rhos: torch.Tensor  # [T, B]: log π(a|x) - log μ(a|x)
    behavior_action_log_probs: torch.Tensor  # [T, B]: log μ(a|x)
    target_action_log_probs: torch.Tensor  # [T, B]: log π(a|x)


def action_log_probs(
    policy_logits: torch.Tensor, actions: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities of the actions under softmax(policy_logits).

    Args:
      policy_logits: [..., A] float, unnormalised log-probabilities. -inf masks an
        action; its log-probability is -inf.
      actions: [...] integer in [0, A).

    Returns:
      [...] float. Differentiable in policy_logits.

    Raises:
      ValueError: the shapes don't match.
    """
    if policy_logits.shape[:-1] != actions.shape:
        raise ValueError(
            f"actions {list(actions.shape)} don't fit policy_logits [..., A] "
            f"{list(policy_logits.shape)}"
        )
    log_policy = F.log_softmax(policy_logits, dim=-1)
    return log_policy.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)


def finite(log_probs: torch.Tensor) -> torch.Tensor:
    """Replaces -inf by the lowest finite number, so that 0 * x is 0 and not NaN.

    The gradient is 0 there.
    """
    return log_probs.clamp(min=torch.finfo(log_probs.dtype).min)


def from_logits(
    behavior_policy_logits: torch.Tensor,
    target_policy_logits: torch.Tensor,
    actions: torch.Tensor,
    discounts: torch.Tensor,
    rewards: torch.Tensor,
    values: torch.Tensor,
    bootstrap_value: torch.Tensor,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
    clip_c_threshold: float | None = 1.0,
    trace_decay: float = 1.0,
) -> VTraceFromLogitsReturns:
    """V-trace for a categorical policy.

    Args:
      behavior_policy_logits: [T, B, A] float, of the policy μ that acted.
      target_policy_logits: [T, B, A] float, of the policy π that learns.
      actions: [T, B] integer, sampled from μ.
      The others: see from_importance_weights.

    Returns:
      VTraceFromLogitsReturns. vs and pg_advantages have no gradient.

    Raises:
      ValueError: the shapes don't fit.
    """
    shapes = behavior_policy_logits.shape, target_policy_logits.shape
    if shapes[0] != shapes[1]:
        raise ValueError(f"the logits of both policies need the same shape: {shapes}")
    behavior_log_probs = action_log_probs(behavior_policy_logits, actions)
    target_log_probs = action_log_probs(target_policy_logits, actions)
    log_rhos = target_log_probs - behavior_log_probs
    steps = discounts, rewards, values, bootstrap_value
    clips = clip_rho_threshold, clip_pg_rho_threshold, clip_c_threshold
    returns = from_importance_weights(log_rhos, *steps, *clips, trace_decay)
    return VTraceFromLogitsReturns(
        *returns, log_rhos, behavior_log_probs, target_log_probs
    )


@torch.no_grad()
def from_importance_weights(
    log_rhos: torch.Tensor,
    discounts: torch.Tensor,
    rewards: torch.Tensor,
    values: torch.Tensor,
    bootstrap_value: torch.Tensor,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
    clip_c_threshold: float | None = 1.0,
    trace_decay: float = 1.0,
    valid: torch.Tensor | None = None,
) -> VTraceReturns:
    """V-trace from log importance weights (equation 1 and remark 2 of the paper).

    Args:
      log_rhos: [T, B] or [T, B, C... or 1...] float, log π(a|x) - log μ(a|x).
      discounts: [T, B, C... or 1...] float, γ, or 0 if the step ended the episode.
      rewards: [T, B, C... or 1...] float, the reward of the step's action.
      values: [T, B, C...] float, V(x_t) of the learner.
      bootstrap_value: [B, C...] float, V(x_T).
      clip_rho_threshold: ρ̄, clips the weights of the temporal differences; None: no
        clipping.
      clip_pg_rho_threshold: clips the weights of the policy gradient; None: no
        clipping.
      clip_c_threshold: c̄, clips the weights of the trace; None: no clipping.
      trace_decay: λ in [0, 1]; 1 is the paper's V-trace.
      valid: [T, B] bool, the steps that count; None: all. At the others the trace is
        cut (Schmitt et al. 2019, section 4.2): the target is the value itself, and the
        advantage is 0.

    Returns:
      VTraceReturns, without gradients.

    Raises:
      ValueError: the shapes don't fit.
    """
    if log_rhos.dim() == 2 < values.dim():
        log_rhos = log_rhos.reshape(*log_rhos.shape, *[1] * (values.dim() - 2))
    given = {"log_rhos": log_rhos, "discounts": discounts, "rewards": rewards}
    fit = all(_broadcasts(x, values) for x in given.values())
    if not fit or values.dim() < 2 or bootstrap_value.shape != values.shape[1:]:
        given |= {"values": values, "bootstrap_value": bootstrap_value}
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in given.items())
        raise ValueError(
            "the shapes don't fit values [T, B, C...], bootstrap_value [B, C...] and "
            f"others [T, B, C... or 1...]: {shapes}"
        )
    rhos = log_rhos.exp()  # [T, B, C... or 1...]
    clipped_rhos = _clip(rhos, clip_rho_threshold)
    cs = trace_decay * _clip(rhos, clip_c_threshold)
    next_values = torch.cat([values[1:], bootstrap_value.unsqueeze(0)])
    deltas = clipped_rhos * (rewards + discounts * next_values - values)
    if valid is not None:
        valid = valid.reshape(*valid.shape, *[1] * (values.dim() - 2))
        deltas, cs = deltas.masked_fill(~valid, 0), cs.masked_fill(~valid, 0)
    # Backwards in time: vs_t - V(x_t) = δ_t + γ_t c_t (vs_{t+1} - V(x_{t+1})).
    decays = discounts * cs
    acc = torch.zeros_like(bootstrap_value)
    corrections = torch.empty_like(values)
    for t in reversed(range(values.shape[0])):
        acc = deltas[t] + decays[t] * acc
        corrections[t] = acc
    vs = values + corrections

    next_vs = torch.cat([vs[1:], bootstrap_value.unsqueeze(0)])
    pg_rhos = _clip(rhos, clip_pg_rho_threshold)
    pg_advantages = pg_rhos * (rewards + discounts * next_vs - values)
    if valid is not None:
        pg_advantages = pg_advantages.masked_fill(~valid, 0)
    return VTraceReturns(vs=vs, pg_advantages=pg_advantages)


def _broadcasts(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the tensor broadcasts to the values, with equal T and B."""
    return (
        tensor.dim() == values.dim()
        and tensor.shape[:2] == values.shape[:2]
        and all(n in (1, m) for n, m in zip(tensor.shape, values.shape, strict=True))
    )


def normalize(
    advantages: torch.Tensor,
    weights: torch.Tensor,
    valid: torch.Tensor,
    total: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
) -> torch.Tensor:
    """Centres and scales advantages (Schulman et al. 2017, in PPO's implementations).

    They contain the weights min(rho, clip_pg_rho), so the mean gets these, too. Without
    them, advantages that are all equal would change the policy.

    Args:
      advantages, weights: [T, B] float, 0 at steps that don't count.
      valid: [T, B] bool, the steps that count.
      total: adds up a scalar over the parts of a batch, if this is one of several.
    """
    sums = total(advantages.sum()), total(weights.sum())
    centred = advantages - weights * sums[0] / (sums[1] + 1e-8)
    number = total(valid.sum()).clamp(min=1)
    deviation = (total(centred.pow(2).sum()) / number).sqrt()
    return centred / (deviation + 1e-8)


def policy_loss(
    log_probs: torch.Tensor,
    rhos: torch.Tensor,
    advantages: torch.Tensor,
    clip_ratio: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss whose gradient is the policy gradient, with PPO's clipping.

    Args:
      log_probs: [T, B] of the actions, by the policy that learns.
      rhos: [T, B], their ratios to the probabilities by the policy that acted.
      advantages: [T, B]; 0 at steps that don't count.
      clip_ratio: PPO's epsilon; inf: no clipping.

    Returns:
      The sum, a scalar; and which steps are clipped, [T, B] bool.
    """
    # Schulman et al. 2017, equation 7: no gradient where rho has left the interval
    # around 1 in the direction of the advantage.
    low, high = 1 - clip_ratio, 1 + clip_ratio
    clipped = torch.where(advantages > 0, rhos > high, rhos < low)
    advantages = advantages.masked_fill(clipped, 0)
    # A masked action has advantage 0 and log-probability -inf: finite() prevents a NaN.
    return -(finite(log_probs) * advantages).sum(), clipped


def value_loss(values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Half the sum of the squared errors of values [T, B, ...], a scalar."""
    return 0.5 * (targets - values).pow(2).sum()


def _clip(rhos: torch.Tensor, threshold: float | None) -> torch.Tensor:
    return rhos if threshold is None else rhos.clamp(max=threshold)
