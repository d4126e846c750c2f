"""Sums and means over the steps of a batch, of which each learner has a part.

No other arithmetic knows of several learners. A mean is a sum and a count: both are
added up over all learners, and divided at the end.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from torchbeast.base import devices, ranks


class Mean(NamedTuple):
    x: torch.Tensor  # [T, B, ...]
    steps: torch.Tensor  # [T, B] bool
    column: Callable[[Any], Any] = lambda mean: mean  # what is logged of the mean


def mean(x: torch.Tensor, steps: torch.Tensor) -> Mean:
    """The mean of x [T, B, ...] over some steps, [T, B] bool, for a column."""
    return Mean(x.detach(), steps)  # computed by `fetch`, if it is needed at all


def effective_share(weights: torch.Tensor, steps: torch.Tensor) -> Mean:
    """The effective sample size of n weights [T, B] as a share, (Σw)² / (n Σw²)."""
    x = torch.stack([weights, weights.square()], -1).detach()
    return Mean(x, steps, lambda mean: mean[0].square() / mean[1])


def normalize(
    advantages: torch.Tensor, weights: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """Centres and scales advantages (Schulman et al. 2017, in PPO's implementations).

    They [T, B] contain weights [T, B], min(rho, clip_pg_rho), so the mean gets these,
    too. Without them, advantages that are all equal would change the policy. Both are 0
    at steps that don't count.
    """
    total = ranks.total
    sums = total(advantages.sum()), total(weights.sum())
    centred = advantages - weights * sums[0] / (sums[1] + 1e-8)
    number = total(valid.sum()).clamp(min=1)
    deviation = (total(centred.pow(2).sum()) / number).sqrt()
    return centred / (deviation + 1e-8)


def fetch(
    columns: Mapping[str, Any], sums: Iterable[str]
) -> Callable[[], dict[str, Any]]:
    """Begins to copy columns to the CPU's memory, all at once.

    Those that `sums` names, and Means, become those of all learners; other tensors and
    numbers stay this learner's. Returns a function that waits for the copy, and returns
    the columns. A mean over no step is None.
    """
    added = {name: columns[name] for name in sums}
    own = {name: x for name, x in columns.items() if name not in added}
    means = [name for name, x in own.items() if isinstance(x, Mean)]
    for name in means:
        x, steps, _ = own.pop(name)
        wide = steps.reshape(*steps.shape, *[1] * (x.dim() - 2))
        added[f"{name} sum"] = (x * wide).sum((0, 1))
        added[f"{name} number"] = steps.sum()
    wait = devices.fetch(own | ranks.totals(added))

    def finish() -> dict[str, Any]:
        found = wait()
        for name in means:
            total, number = found[f"{name} sum"], found[f"{name} number"]
            found[name] = columns[name].column(total / number) if number else None
        return {name: found[name] for name in columns}

    return finish
