"""V-trace: off-policy corrected targets and advantages; losses that learn from them.

Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted
Actor-Learner Architectures", 2018, section 4.1. https://arxiv.org/abs/1802.01561

T is the unroll length, B the batch size, A the number of actions. The values may have
trailing dimensions C..., for example one for several heads. In the other arguments each
may be 1: then all heads share it.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class VTraceReturns(NamedTuple):
    vs: Tensor  # [T, B, C...] float: regression targets of the values
    pg_advantages: Tensor  # [T, B, C...] float: weights of the log-probabilities


class VTraceFromLogitsReturns(NamedTuple):
    vs: Tensor  # [T, B, C...]
    pg_advantages: Tensor  # [T, B, C...]
    log_rhos: Tensor  # [T, B]: log π(a|x) - log μ(a|x)
    behavior_action_log_probs: Tensor  # [T, B]: log μ(a|x)
    target_action_log_probs: Tensor  # [T, B]: log π(a|x)


def action_log_probs(policy_logits: Tensor, actions: Tensor) -> Tensor:
    """Log-probabilities [...] of actions [...] under softmax(policy_logits [..., A]).

    That of a logit -inf is -inf. Raises ValueError if the shapes don't match.
    """
    if policy_logits.shape[:-1] != actions.shape:
        a, p = list(actions.shape), list(policy_logits.shape)
        raise ValueError(f"actions {a} don't fit policy_logits [..., A] {p}")
    log_policy = F.log_softmax(policy_logits, dim=-1)
    return log_policy.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)


def finite(log_probs: Tensor) -> Tensor:
    """Replaces -inf by the lowest finite number: 0 * x is 0, and so is its gradient."""
    return log_probs.clamp(min=torch.finfo(log_probs.dtype).min)


def from_logits(
    behavior_policy_logits: Tensor,
    target_policy_logits: Tensor,
    actions: Tensor,
    *steps: Any,
    **thresholds: Any,
) -> VTraceFromLogitsReturns:
    """V-trace for a categorical policy.

    Logits [T, B, A] float of μ and π; actions [T, B] integer, sampled from μ. The
    others, and the errors: those of from_importance_weights after log_rhos.
    """
    behavior = action_log_probs(behavior_policy_logits, actions)
    target = action_log_probs(target_policy_logits, actions)
    log_rhos = target - behavior
    returns = from_importance_weights(log_rhos, *steps, **thresholds)
    return VTraceFromLogitsReturns(*returns, log_rhos, behavior, target)


@torch.no_grad()
def from_importance_weights(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
    clip_c_threshold: float | None = 1.0,
    trace_decay: float = 1.0,
    valid: Tensor | None = None,
) -> VTraceReturns:
    """V-trace from log importance weights (equation 1 and remark 2 of the paper).

    Args:
      log_rhos: [T, B] or [T, B, C... or 1...] float, log π(a|x) - log μ(a|x).
      discounts: [T, B, C... or 1...] float, γ, or 0 if the step ended the episode.
      rewards: [T, B, C... or 1...] float, the reward of the step's action.
      values: [T, B, C...] float, V(x_t) of the learner.
      bootstrap_value: [B, C...] float, V(x_T).
      clip_rho_threshold: ρ̄, clips the weights of the temporal differences.
      clip_pg_rho_threshold: clips the weights of the policy gradient.
      clip_c_threshold: c̄, clips the weights of the trace. None: no clipping.
      trace_decay: λ in [0, 1]; 1 is the paper's V-trace.
      valid: [T, B] bool, the steps that count; None: all. At the others the trace is
        cut (Schmitt et al. 2019, section 4.2): the target is the value itself, and the
        advantage is 0.

    No gradient flows out. Raises ValueError if the shapes don't fit.
    """
    heads = [1] * (values.dim() - 2)
    if log_rhos.dim() == 2:
        log_rhos = log_rhos.reshape(*log_rhos.shape, *heads)
    steps = log_rhos, discounts, rewards
    wanted = values.dim(), values.shape[:2]
    fit = all((x.dim(), x.shape[:2]) == wanted for x in steps)
    if not fit or bootstrap_value.shape != values.shape[1:]:
        shapes = [list(x.shape) for x in (*steps, values, bootstrap_value)]
        names = "log_rhos, discounts, rewards, values, bootstrap_value"
        raise ValueError(f"the shapes of {names} don't fit: {shapes}")
    rhos = log_rhos.exp()  # [T, B, C... or 1...]
    cs = trace_decay * _clip(rhos, clip_c_threshold)
    next_values = torch.cat([values[1:], bootstrap_value.unsqueeze(0)])
    errors = rewards + discounts * next_values - values
    deltas = _clip(rhos, clip_rho_threshold) * errors
    if valid is not None:
        skipped = ~valid.reshape(*valid.shape, *heads)
        deltas, cs = deltas.masked_fill(skipped, 0), cs.masked_fill(skipped, 0)
    # Backwards in time: vs_t - V(x_t) = δ_t + γ_t c_t (vs_{t+1} - V(x_{t+1})).
    accumulate(deltas, discounts * cs, -1)
    vs = values + deltas

    next_vs = torch.cat([vs[1:], bootstrap_value.unsqueeze(0)])
    pg_rhos = _clip(rhos, clip_pg_rho_threshold)
    pg_advantages = pg_rhos * (rewards + discounts * next_vs - values)
    if valid is not None:
        pg_advantages = pg_advantages.masked_fill(skipped, 0)
    return VTraceReturns(vs=vs, pg_advantages=pg_advantages)


def accumulate(x: Any, decays: Any, step: int) -> None:
    """x[t] += decays[t] * x[t - step] in place; step 1: forwards in time, or -1."""
    on_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_cpu and x.dtype != torch.bfloat16:  # NumPy lacks it
        x, decays = x.numpy(), decays.numpy()  # the same memory; its calls are faster
    for t in range(len(x))[::step][1:]:
        x[t] += decays[t] * x[t - step]


def policy_loss(
    log_probs: Tensor, rhos: Tensor, advantages: Tensor, clip_ratio: float
) -> tuple[Tensor, Tensor]:
    """The loss whose gradient is the policy gradient, with PPO's clipping.

    Args:
      log_probs, rhos: [T, B] of the actions, by the policy that learns; and their
        ratios to the probabilities by the policy that acted.
      advantages: [T, B]; 0 at steps that don't count.
      clip_ratio: PPO's epsilon; inf: no clipping.

    Returns the sum, a scalar, and which steps are clipped, [T, B] bool.
    """
    # Schulman et al. 2017, equation 7: no gradient where rho has left the interval
    # around 1 in the direction of the advantage.
    low, high = 1 - clip_ratio, 1 + clip_ratio
    clipped = torch.where(advantages > 0, rhos > high, rhos < low)
    advantages = advantages.masked_fill(clipped, 0)
    # A masked action has advantage 0 and log-probability -inf: finite() prevents a NaN.
    return -(finite(log_probs) * advantages).sum(), clipped


def value_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Half the sum of the squared errors of values [T, B, ...], a scalar."""
    return 0.5 * (targets - values).pow(2).sum()


def _clip(rhos: Tensor, threshold: float | None) -> Tensor:
    return rhos if threshold is None else rhos.clamp(max=threshold)
