"""Infinity and NaN: finds their cause in a batch."""

import math
from typing import Any

import torch

from torchbeast.base.nested import with_places
from torchbeast.envs.extra_fields import EXTRA_FIELDS

TOO_LARGE = 1e15  # its square nearly overflows float32
ENVIRONMENT_IS_THE_CAUSE = "The cause is the environment"


def find_cause(batch: dict[str, Any]) -> str:
    """Describes what in a batch [T + 1, B, ...] made the loss not finite."""
    for field in ("reward", "observation", *(EXTRA_FIELDS.keys() & batch.keys())):
        for place, x in with_places(batch[field], field):
            if x.is_floating_point() and (bad := ~(x.abs() <= TOO_LARGE)).any():
                return f"{ENVIRONMENT_IS_THE_CAUSE}: the {place} is {x[bad][0]:.3g}"
    if not batch.get("truncation_value", torch.zeros(())).isfinite().all():
        return f"{ENVIRONMENT_IS_THE_CAUSE}: an episode's last observation is NaN or ∞"
    return "The cause is the update: lower --learning_rate, or check the loss"


def check_finite(
    columns: dict[str, Any], batch: dict[str, Any], flags: Any, step: int
) -> None:
    """Raises FloatingPointError if the loss, gradient or weights are not finite.

    columns: total_loss, grad_norm and, after the update, sum_of_weights.
    """
    if not math.isfinite(columns["total_loss"] + columns["grad_norm"]):
        cause = find_cause(batch)
        raise FloatingPointError(
            f"loss or gradient are not finite at step {step}: {columns}. {cause}"
        )
    if not math.isfinite(columns.get("sum_of_weights", 0)):
        raise FloatingPointError(
            f"the update at step {step} made weights that are not finite: lower "
            f"--learning_rate (now {flags.learning_rate:g}), or raise --epsilon (now "
            f"{flags.epsilon:g})"
        )
