"""Infinity and NaN: finds them in weights, and finds their cause in a batch."""

import math
from typing import Any

import torch

from torchbeast.base.nested import with_places
from torchbeast.envs.extra_fields import EXTRA_FIELDS

TOO_LARGE = 1e15  # its square nearly overflows float32
ENVIRONMENT_IS_THE_CAUSE = "The cause is the environment"


def find_not_finite(nested: Any, name: str) -> str | None:
    """The first place in a nested state of a tensor that is not finite, or of a NaN."""
    for place, x in with_places(nested, name):
        if isinstance(x, torch.Tensor):
            if x.is_floating_point() and not x.isfinite().all():
                return place
        elif isinstance(x, float) and math.isnan(x):
            return place
    return None


def bounds_rewards(flags: Any) -> bool:
    """Whether the loss gets bounded rewards, whatever the environment gives."""
    is_normalized = getattr(flags, "normalize_rewards", False)
    return flags.reward_clipping == "abs_one" or is_normalized


def find_cause(batch: dict[str, Any], reward_is_clipped: bool) -> str:
    """Describes what in a batch [T + 1, B, ...] made the loss not finite."""
    for field in ("reward", "observation", *(EXTRA_FIELDS.keys() & batch.keys())):
        limit = math.inf if field == "reward" and reward_is_clipped else TOO_LARGE
        for place, x in with_places(batch[field], field):
            if x.is_floating_point() and (bad := ~(x.abs() <= limit)).any():
                return f"{ENVIRONMENT_IS_THE_CAUSE}: the {place} is {x[bad][0]:.3g}"
    return "The cause is the update: lower --learning_rate, or check the loss"


def check_finite(
    columns: dict[str, Any], batch: dict[str, Any], flags: Any, step: int
) -> None:
    """Raises FloatingPointError if the loss, gradient or weights are not finite.

    columns: total_loss, grad_norm and, after the update, sum_of_weights.
    """
    if not math.isfinite(columns["total_loss"] + columns["grad_norm"]):
        cause = find_cause(batch, bounds_rewards(flags))
        raise FloatingPointError(
            f"loss or gradient are not finite at step {step}: {columns}. {cause}"
        )
    if not math.isfinite(columns.get("sum_of_weights", 0)):
        raise FloatingPointError(
            f"the update at step {step} made weights that are not finite: lower "
            f"--learning_rate (now {flags.learning_rate:g}), or raise --epsilon (now "
            f"{flags.epsilon:g})"
        )
