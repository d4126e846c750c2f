"""The model of benchmarks/scale.py, beside a simulation."""

import random

import pytest
from cpu_time import Measured
from limits import Costs, Line, costs_of, fit, limits

from torchbeast.tools.autotune import Layout


def simulate(costs, layout, cores, seconds, batch=12, steps=5):
    """Steps per second that a learner gets from a network of threads.

    The learner has a core before all others, who share the rest; nobody has more than
    one core. All times are fixed. An actor or stream steps E environments, asks the
    inference thread for actions, if there is one, and hands over E rollouts every
    `steps` calls. It waits if two batches are ready. The learner takes one at a time.
    """
    A, E = layout
    own_work = costs.learn + costs.rest  # of the learner, per step
    work = {i: costs.env(E) * (1 + i / A) for i in range(A)}  # out of phase
    calls, asking, served, held = [0] * A, [], [], {}
    ready, learned, now = 0, 0, 0.0
    while now < seconds:
        if "learner" not in work and ready >= batch:
            ready -= batch
            work["learner"] = own_work * batch * steps
            for i in list(held):
                work[i] = held.pop(i)
        if asking and "inference" not in work:
            served, asking = asking, []
            work["inference"] = costs.infer(len(served) * E)
        others = [i for i in work if i != "learner"]
        left = cores - ("learner" in work)
        speed = {"learner": 1.0}
        speed |= dict.fromkeys(others, min(1.0, left / max(1, len(others))))
        running = [i for i in work if speed[i] > 0]
        step = min(work[i] / speed[i] for i in running)
        now += step
        work = {i: x - step * speed[i] for i, x in work.items()}
        for i in [i for i, x in work.items() if x < 1e-12]:
            del work[i]
            if i == "learner":
                learned += batch * steps
            elif i == "inference":
                for j in served:
                    work[j] = costs.env(E)
            else:
                calls[i] += 1
                is_full = ready >= 2 * batch
                ready += E if calls[i] % steps == 0 else 0
                if calls[i] % steps == 0 and is_full:
                    held[i] = costs.env(E)
                elif costs.infer(1):
                    asking.append(i)
                else:
                    work[i] = costs.env(E)
    return learned / now


def make_costs(env=(0.0, 1e-3), infer=(0.0, 0.0), learn=1e-4, rest=0.0, pause=0.0):
    return Costs(Line(*env), pause, Line(*infer), learn, learn + rest, rest)


CASES = {
    "actors, each with a core": (make_costs(), Layout(3, 2), 8, "actors"),
    "actors with costly calls": (
        make_costs(env=(4e-3, 1e-3)),
        Layout(2, 5),
        4,
        "actors",
    ),
    "two cores for all": (make_costs(learn=6e-4), Layout(5, 4), 2, "cores"),
    "one core for all": (make_costs(learn=3e-4), Layout(2, 3), 1, "cores"),
    "the learner": (make_costs(learn=9e-4), Layout(6, 4), 16, "learner"),
    "inference": (
        make_costs(infer=(1e-3, 1e-3), env=(0, 1e-4)),
        Layout(6, 4),
        16,
        "inference",
    ),
    "streams": (make_costs(infer=(2e-3, 1e-5)), Layout(3, 4), 16, "actors"),
    "streams that share two cores": (
        make_costs(infer=(1e-4, 2e-4), learn=4e-4),
        Layout(6, 4),
        2,
        "cores",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_lowest_limit_is_what_a_simulation_makes(name):
    costs, layout, cores, expected = CASES[name]
    found = limits(costs, layout, cores)
    assert found[expected] <= 1.03 * min(found.values())
    sps = simulate(costs, layout, cores, seconds=6.0)
    assert sps == pytest.approx(min(found.values()), rel=0.06)


def test_random_networks_never_exceed_their_limits():
    draw = random.Random(3)
    ratios = []
    for _ in range(60):
        costs = make_costs(
            env=(draw.choice([0, 1e-3, 4e-3]), draw.uniform(1e-4, 1e-3)),
            infer=draw.choice([(0.0, 0.0), (1e-3, draw.uniform(1e-5, 4e-4))]),
            learn=draw.uniform(5e-5, 6e-4),
        )
        layout = Layout(draw.choice([1, 2, 3, 6]), draw.choice([2, 4, 7]))
        cores = draw.choice([1, 2, 4, 16])
        sps = simulate(costs, layout, cores, seconds=2.0)
        ratios.append(sps / min(limits(costs, layout, cores).values()))
    assert max(ratios) < 1.1  # an inference batch may be larger than the mean
    assert sorted(ratios)[len(ratios) // 2] > 0.93
    assert min(ratios) > 0.6  # parts that wait for each other


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
