"""Infinity and NaN: finds them in weights, and finds their cause in a batch."""

import math
from typing import Any

import torch

from torchbeast.base.nested import with_places
from torchbeast.envs.extra_fields import EXTRA_FIELDS

TOO_LARGE = 1e15  # its square nearly overflows float32
ENVIRONMENT_IS_THE_CAUSE = "The cause is the environment"


def sum_of_weights(model: torch.nn.Module) -> torch.Tensor:
    """A scalar that is finite if all weights are. Takes far less than an update."""
    weights = model.state_dict().values()
    sums = [x.sum() for x in weights if x.is_floating_point()]
    return torch.stack(sums).sum()


def find_not_finite(nested: Any, name: str) -> str | None:
    """The place of a tensor that is not finite, or of a NaN, in the state of an object.

    Numbers may be infinite, such as the best loss so far of a schedule.

    Args:
      nested: dicts, lists and tuples of tensors and plain values.

    Returns:
      Such as `name['state'][0]['square_avg']`; None if there is none.
    """

    def is_bad(x: Any) -> bool:
        if isinstance(x, torch.Tensor):
            return x.is_floating_point() and not bool(x.isfinite().all())
        return isinstance(x, float) and math.isnan(x)

    return next((place for place, x in with_places(nested, name) if is_bad(x)), None)


def bounds_rewards(flags: Any) -> bool:
    """Whether the loss gets bounded rewards, whatever the environment gives."""
    return flags.reward_clipping == "abs_one" or flags.normalize_rewards


def find_cause(batch: dict[str, Any], reward_is_clipped: bool) -> str:
    """Describes what made the loss not finite: rewards, observations or the update.

    Args:
      batch: rollouts [T + 1, B, ...], see torchbeast/core/rollout.py.
    """
    for field in ("reward", "observation", *(EXTRA_FIELDS.keys() & batch.keys())):
        limit = math.inf if field == "reward" and reward_is_clipped else TOO_LARGE
        for place, x in with_places(batch[field], field):
            bad = ~(x.abs() <= limit) if x.is_floating_point() else x.new_zeros(0) > 0
            if bad.any():
                return (
                    f"{ENVIRONMENT_IS_THE_CAUSE}: the {place} is {x[bad][0]:.3g}. "
                    "Check what its reset() and step() return"
                )
    return (
        "The cause is the update: rewards and observations are finite. Lower "
        "--learning_rate, or check the loss"
    )


def check_finite(
    columns: dict[str, Any], batch: dict[str, Any], flags: Any, step: int
) -> None:
    """Raises FloatingPointError if the loss, gradient or weights are not finite.

    Args:
      columns: total_loss, grad_norm and, after the update, sum_of_weights.
    """
    if all(math.isfinite(columns[name]) for name in ("total_loss", "grad_norm")):
        if math.isfinite(columns.get("sum_of_weights", 0)):
            return
        raise FloatingPointError(
            f"the update at step {step} made weights that are not finite, from a "
            "finite loss and gradient. They are neither saved nor used: the same "
            "command resumes from the last checkpoint, if there is one. Lower "
            f"--learning_rate (now {flags.learning_rate:g}), or raise --epsilon (now "
            f"{flags.epsilon:g})"
        )
    raise FloatingPointError(
        f"loss or gradient are not finite at step {step}: {columns}. "
        f"{find_cause(batch, bounds_rewards(flags))}"
    )
