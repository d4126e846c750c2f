"""The model of benchmarks/scale.py, beside a simulation."""

import pytest
from cpu_time import Measured
from limits import Costs, Line, costs_of, fit, limits

from torchbeast.tools.autotune import Layout


def make_costs(env=(0.0, 1e-3), infer=(0.0, 0.0), learn=1e-4, rest=0.0, pause=0.0):
    return Costs(Line(*env), pause, Line(*infer), learn, learn + rest, rest)


def test_turns_add_up():
    costs = make_costs(env=(0.0, 2e-3), learn=1e-3)
    found = limits(costs, Layout(3, 5), 8, in_turns=True)
    # 15 steps take 10 ms of three actors at once, and then 15 ms of the learner.
    assert found == {"turns": pytest.approx(15 / 25e-3)}


def test_pauses_limit_actors_but_not_cores():
    costs = make_costs(env=(0.0, 1e-4), pause=9e-4, learn=1e-5)
    found = limits(costs, Layout(4, 3), 1)
    assert found["actors"] == pytest.approx(4 / 1e-3)
    assert found["cores"] == pytest.approx(1 / 1.1e-4)


def test_costs_are_those_that_the_runs_had():
    costs = Costs(Line(3e-3, 2e-4), 0.0, Line(1e-3, 5e-5), 4e-4, 4e-4, 7e-6)
    tries = []
    for E, sps, batch in ((4, 900, 5.0), (8, 1300, 12.0), (32, 1700, 40.0)):
        cores = {
            "environments": costs.env(E) / E * sps,
            "learner": costs.learn * sps,
            "inference": costs.infer(batch) / batch * sps,
            "rest": costs.rest * sps,
        }
        shares = {"environments": 0.0}
        run = Measured(sps, cores, 16.0, cores["learner"], shares, batch)
        tries.append((Layout(2, E), run))
    for x, y in zip(costs_of(tries), costs, strict=True):
        assert x == pytest.approx(y)


def test_a_line_has_no_negative_part():
    assert fit([(2, 7.0), (4, 9.0), (8, 13.0)]) == pytest.approx((5.0, 1.0))
    assert fit([(3, 6.0), (3, 6.6)]) == pytest.approx((0.0, 2.1))
    assert fit([(2, 2.0), (4, 8.0)]).per_call == 0
    assert fit([(2, 8.0), (4, 2.0)]).per_env > 0
