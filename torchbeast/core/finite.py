"""Infinity and NaN: finds them in weights, and finds their cause in a batch."""

import math
from typing import Any

import torch

from torchbeast.base import ranks
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
    reasons = []
    limited = {"reward": not reward_is_clipped, "observation": True}
    limited |= dict.fromkeys(EXTRA_FIELDS.keys() & batch.keys(), True)
    for field, too_large in limited.items():
        for place, x in with_places(batch[field], field):
            if x.is_floating_point():
                reasons += _describe(place, x, too_large)
    if reasons:
        return (
            f"{ENVIRONMENT_IS_THE_CAUSE}: {'; '.join(reasons)}"
            ". Check what its reset() and step() return"
        )
    return (
        "The cause is the update: rewards and observations are finite. Lower "
        "--learning_rate, or check the loss"
    )


def check_loss(
    columns: dict[str, Any], batch: dict[str, Any], flags: Any, step: int, in_turn: bool
) -> None:
    """Raises FloatingPointError if the loss or the gradient are not finite.

    in_turn: all ranks call it between the same two updates, so each can name the cause
      that another has found.
    """
    if all(math.isfinite(columns[name]) for name in ("total_loss", "grad_norm")):
        return
    # The sums are of all ranks, the cause is mostly one of them.
    own = [find_cause(batch, bounds_rewards(flags))]
    causes = ranks.joined_list(own) if in_turn else own
    cause = min(causes, key=lambda x: not x.startswith(ENVIRONMENT_IS_THE_CAUSE))
    raise FloatingPointError(
        f"loss or gradient are not finite at step {step}: {columns}. {cause}"
    )


def check_weights(total: Any, learning_rate: float, flags: Any, step: int) -> None:
    """Raises FloatingPointError if the new weights, or their sum, are not finite."""
    if math.isfinite(total):
        return
    raise FloatingPointError(
        f"the update at step {step} made weights that are not finite, from a finite "
        "loss and gradient. They are neither saved nor used: the same command resumes "
        "from the last checkpoint, if there is one. Lower --learning_rate (now "
        f"{learning_rate:g}), or raise --epsilon (now {flags.epsilon:g})"
    )


def _describe(name: str, x: torch.Tensor, too_large: bool) -> list[str]:
    """Describes the suspect values of x [T + 1, B, ...], if there are any."""
    finite = x.isfinite()
    if not finite.all():
        steps = (~finite).flatten(2).any(2) if x.dim() > 2 else ~finite
        example = x[~finite][0].item()
        return [
            f"the {name} is {example} in {int(steps.sum())} of {steps.numel()} steps"
        ]
    largest = x.abs().max().item() if x.numel() else 0.0
    if too_large and largest > TOO_LARGE:
        return [f"the {name} reaches {largest:.3g}, which is too large to learn from"]
    return []
