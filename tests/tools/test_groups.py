"""The interval of an interquartile mean, against enumeration. See test_report.py."""

import itertools

import numpy as np
import pytest

from torchbeast.tools.groups import iqm_interval

stats = pytest.importorskip("scipy.stats")


def test_the_interval_of_two_tasks():
    """Each task's runs are drawn from that task only: all equally likely draws."""
    tasks = [np.array([0.0, 1.0, 5.0]), np.array([10.0, 12.0])]
    draws = [itertools.product(scores, repeat=len(scores)) for scores in tasks]
    means = np.array(
        [stats.trim_mean([*a, *b], 0.25) for a, b in itertools.product(*draws)]
    )
    assert len(means) == 27 * 4
    low, high = iqm_interval(tasks)
    assert (low, high) == iqm_interval(tasks)
    assert np.mean(means < low - 1e-9) <= 0.025 <= np.mean(means <= low + 1e-9) + 0.005
    assert (
        np.mean(means > high + 1e-9) <= 0.025 <= np.mean(means >= high - 1e-9) + 0.005
    )
