"""Groups of runs that differ only by their seed, and what they reach together.

Interquartile mean and interval are those of Agarwal et al. 2021
(https://arxiv.org/abs/2108.13264), whose library is rliable.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from torchbeast.base.errors import FlagError
from torchbeast.tools import protocol
from torchbeast.tools.saved_runs import SavedRun

RESAMPLES = 10_000


def group_name(name: str) -> str:
    """The name of a run without the seed at its end: pong-seed1 → pong."""
    named = r"[-_.](seed|s)[-_.]?\d+"
    bare = r"((?<!\d)\.|(?<!\de)[-_])\d+"  # not the end of 0.001 or 1e-3
    return re.sub(f"({named}|{bare})$", "", name) or name


def by_name(items: Iterable[Any]) -> dict[str, list[Any]]:
    """Runs or curves of each group, by the group's name."""
    groups: dict[str, list[Any]] = {}
    for item in items:
        groups.setdefault(group_name(item.name), []).append(item)
    return groups


def check_protocols(groups: Mapping[str, Sequence[SavedRun]]) -> None:
    """Raises FlagError if runs of one group have different protocols."""
    for name, members in groups.items():
        _, own = protocol.split_common(run.protocol() for run in members)
        if any(own):
            pairs = zip(members, own, strict=True)
            each = [f"{run.name}: {protocol.describe(x)}" for run, x in pairs if x]
            raise FlagError(
                f"the runs of the group {name} have different protocols, so their "
                f"mean says nothing ({'; '.join(each)}). Leave out some of them"
            )


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """[..., N] → [...]: the mean without the lowest and the highest quarter.

    N / 4 is rounded down, so with less than 4 scores this is their mean.
    """
    cut = scores.shape[-1] // 4
    middle = np.sort(scores, axis=-1)[..., cut : scores.shape[-1] - cut]
    return middle.mean(axis=-1)


def iqm_interval(tasks: Sequence[np.ndarray]) -> tuple[float, float]:
    """The 95 % interval of the interquartile mean of all scores: low and high.

    It is a stratified bootstrap: each resample draws the runs of every task anew, with
    replacement. The same scores always give the same interval.

    Args:
      tasks: the scores of each task's runs, [runs] float64.
    """
    random = np.random.default_rng(0)
    drawn = [random.choice(scores, (RESAMPLES, len(scores))) for scores in tasks]
    means = interquartile_mean(np.concatenate(drawn, axis=1))
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
