"""The loss that both variants minimise. Edit it here, and only here."""

from collections.abc import Mapping
from typing import Any

import torch

from torchbeast.core import vtrace
from torchbeast.core.distributions import ActionDistribution
from torchbeast.core.file_writer import join_columns


def impala_loss(
    batch: dict[str, Any],
    outputs: dict[str, torch.Tensor],
    distribution: ActionDistribution,
    flags: Any,
    auxiliary_losses: Mapping[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The IMPALA loss, summed over time and batch (Espeholt et al. 2018, section 4.2).

    Args:
      batch: rollouts [T + 1, B, ...], see torchbeast/core/rollout.py.
      outputs: of the learner's model on all T + 1 rows: policy_logits [T + 1, B, P],
        baseline [T + 1, B], float32.
      distribution: what the logits mean.
      flags: reward_clipping, discounting, baseline_cost, entropy_cost.
      auxiliary_losses: of the model's further heads, scalars by name; they are added to
        the loss and logged.

    Returns:
      The loss, a scalar, and scalars for the log by name.
    """
    # Row t holds the action taken on observation t; its reward and what became of the
    # episode stand in row t + 1. The last row only serves as bootstrap.
    actions = batch["action"][:-1]
    behavior_logits = batch["policy_logits"][:-1]
    target_logits = outputs["policy_logits"][:-1]
    values, bootstrap_value = outputs["baseline"][:-1], outputs["baseline"][-1]
    rewards, done = batch["reward"][1:], batch["done"][1:]

    if flags.reward_clipping == "abs_one":
        rewards = rewards.clamp(-1, 1)
    # A truncated episode would have gone on: the value of its real last observation
    # stands for what it would still have earned.
    rewards = rewards + flags.discounting * batch["truncation_value"][1:]
    discounts = flags.discounting * (~done).float()

    log_probs = distribution.log_prob(target_logits, actions)
    log_rhos = (log_probs - distribution.log_prob(behavior_logits, actions)).detach()
    targets = vtrace.from_importance_weights(
        log_rhos, discounts, rewards, values, bootstrap_value
    )
    entropy = distribution.entropy(target_logits)

    # An action that the learner's policy masks has importance weight and advantage 0.
    pg_loss = -(vtrace.finite(log_probs) * targets.pg_advantages).sum()
    baseline_loss = flags.baseline_cost * 0.5 * (targets.vs - values).pow(2).sum()
    entropy_loss = -flags.entropy_cost * entropy.sum()
    auxiliary_losses = auxiliary_losses or {}
    total_loss = sum(
        auxiliary_losses.values(), start=pg_loss + baseline_loss + entropy_loss
    )
    stats = {
        "total_loss": total_loss.detach(),
        "pg_loss": pg_loss.detach(),
        "baseline_loss": baseline_loss.detach(),
        "entropy_loss": entropy_loss.detach(),
        "entropy": entropy.detach().mean(),  # nats a step
        "mean_value": values.detach().mean(),
        "clipped_rho_share": (log_rhos > 0).float().mean(),
    }
    auxiliary_stats = {name: loss.detach() for name, loss in auxiliary_losses.items()}
    return total_loss, join_columns(stats, auxiliary_stats)
