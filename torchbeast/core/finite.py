"""Infinity and NaN: finds them in weights, and finds their cause in a batch."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

TOO_LARGE = 1e15  # its square nearly overflows float32
ENVIRONMENT_IS_THE_CAUSE = "The cause is the environment"


def all_finite(model: torch.nn.Module) -> bool:
    """Whether all weights are finite. Takes far less than 1 % of an update."""
    sums = [
        x.detach().sum()
        for tensors in (model.parameters(), model.buffers())
        for x in tensors
        if x.is_floating_point()
    ]
    return not sums or math.isfinite(torch.stack(sums).sum().item())


def find_not_finite(nested: Any, name: str) -> str | None:
    """The place of a tensor that is not finite, or of a NaN, in the state of an object.

    Numbers may be infinite, such as the best loss so far of a schedule.

    Args:
      nested: dicts, lists and tuples of tensors and plain values.

    Returns:
      Such as `name['state'][0]['square_avg']`; None if there is none.
    """
    if isinstance(nested, torch.Tensor):
        return (
            name
            if nested.is_floating_point() and not bool(nested.isfinite().all())
            else None
        )
    if isinstance(nested, float):
        return name if math.isnan(nested) else None
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(nested, dict):
        items = nested.items()
    elif isinstance(nested, list | tuple):
        items = enumerate(nested)
    places = (find_not_finite(x, f"{name}[{key!r}]") for key, x in items)
    return next(filter(None, places), None)


def find_cause(batch: dict[str, Any], reward_is_clipped: bool) -> str:
    """Describes what made the loss not finite: rewards, observations or the update.

    Args:
      batch: rollouts [T + 1, B, ...], see torchbeast/core/rollout.py.
    """
    reasons = []
    for name, x in _floats("reward", batch["reward"]):
        reasons += _describe(name, x, too_large=not reward_is_clipped)
    for name, x in _floats("observation", batch["observation"]):
        reasons += _describe(name, x, too_large=True)
    if reasons:
        return (
            f"{ENVIRONMENT_IS_THE_CAUSE}: {'; '.join(reasons)}"
            ". Check what its reset() and step() return"
        )
    return (
        "The cause is the update: rewards and observations are finite. Lower "
        "--learning_rate, or check the loss"
    )


def explain_loss(
    batch: dict[str, Any], columns: dict[str, float], flags: Any, step: int
) -> str:
    """The message about a loss or a gradient that is not finite."""
    bounded = flags.reward_clipping == "abs_one" or flags.normalize_rewards
    return (
        f"loss or gradient are not finite at step {step}: {columns}. "
        f"{find_cause(batch, bounded)}"
    )


def explain_weights(step: int, learning_rate: float, flags: Any) -> str:
    """The message about weights that are not finite, after a finite gradient."""
    return (
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


def _floats(name: str, nested: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The float tensors of a nested structure, by names such as observation['x'][0]."""
    if isinstance(nested, dict | tuple):
        items = nested.items() if isinstance(nested, dict) else enumerate(nested)
        for key, value in items:
            yield from _floats(f"{name}[{key!r}]", value)
    elif nested.is_floating_point():
        yield name, nested
