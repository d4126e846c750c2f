"""Columns of logs.csv that are means over the steps of a batch.

Several learners have a part of the batch each. So a mean is a sum and a count: both are
added up over all learners, and divided at the end.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from torchbeast.base import devices, ranks


class Mean(NamedTuple):
    sum: torch.Tensor  # [...]
    number: torch.Tensor  # scalar: of steps


def mean(x: torch.Tensor, steps: torch.Tensor) -> Mean:
    """The mean of x [T, B, ...] over some steps, [T, B] bool."""
    wide = steps.reshape(*steps.shape, *[1] * (x.dim() - 2))
    return Mean((x.detach() * wide).sum((0, 1)), steps.sum())


def fetch(
    columns: Mapping[str, Any], sums: Iterable[str]
) -> Callable[[], dict[str, Any]]:
    """Begins to copy columns to the CPU's memory, all at once.

    Args:
      columns: Means, and tensors or numbers.
      sums: names of sums over the batch. They and means become those of all learners;
        other columns stay this learner's.

    Returns:
      A function that waits for the copy, and returns the columns. A mean over no step
      is None.
    """
    means = {name: x for name, x in columns.items() if isinstance(x, Mean)}
    added = {name: columns[name] for name in sums}
    for name, x in means.items():
        added |= {f"{name} sum": x.sum, f"{name} number": x.number}
    own = {k: x for k, x in columns.items() if k not in means and k not in added}
    wait = devices.fetch(own | ranks.totals(added))

    def finish() -> dict[str, Any]:
        found = wait()
        for name in means:
            number = found[f"{name} number"]
            found[name] = found[f"{name} sum"] / number if number else None
        return {name: found[name] for name in columns}

    return finish
