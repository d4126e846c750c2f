"""Interquartile means and their intervals, against SciPy and against enumeration."""

import itertools

import numpy as np
import pytest

from torchbeast.tools.groups import interquartile_mean, iqm_interval

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("num_scores", [1, 3, 4, 13])
def test_interquartile_mean(num_scores):
    """rliable's definition is SciPy's trim_mean of all scores."""
    scores = np.random.default_rng(num_scores).normal(size=(3, num_scores))
    expected = stats.trim_mean(scores, 0.25, axis=1)
    np.testing.assert_allclose(interquartile_mean(scores), expected)


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
