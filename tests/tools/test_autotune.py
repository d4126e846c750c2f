"""--autotune: its model beside a simulation, its layouts, and the whole command."""

import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs

from torchbeast import monobeast
from torchbeast.base.errors import FlagError
from torchbeast.procs import processes
from torchbeast.runs import start
from torchbeast.tools import autotune, trial
from torchbeast.tools.autotune import Tried, choose, costs_of, fit, layouts, predict
from torchbeast.tools.limits import Costs, Layout, Line, limits

# --- The model beside a simulation ---


def simulate(costs, layout, cores, seconds, batch=12, steps=5, env_cores=None):
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
        apart = [i for i in work if isinstance(i, int) and env_cores is not None]
        others = [i for i in work if i != "learner" and i not in apart]
        left = cores - ("learner" in work)
        speed = {"learner": 1.0}
        speed |= dict.fromkeys(others, min(1.0, left / max(1, len(others))))
        speed |= dict.fromkeys(apart, min(1.0, (env_cores or 0) / max(1, len(apart))))
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


@pytest.mark.parametrize(("number", "limit"), [(2, "environments"), (40, "learner")])
def test_environments_of_other_machines_do_not_use_the_cores(number, limit):
    costs = make_costs(infer=(1e-3, 1e-5), learn=3e-4)
    # Two streams per core: one waits for its actions while the other steps.
    layout, env_cores = Layout(2 * number, 4), number
    found = limits(costs, layout, 2, env_cores=env_cores)
    assert min(found, key=found.get) == limit
    sps = simulate(costs, layout, 2, seconds=4.0, env_cores=env_cores)
    assert sps == pytest.approx(found[limit], rel=0.1)


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


# --- Service times ---


def measured(sps, cores, free=16.0):
    return trial.Measured(sps, cores, free, cores["learner"])


def try_of(costs, layout, sps, batch, shares):
    """What a run with these costs would show at a speed."""
    cores = {
        "environments": costs.env(layout.envs_per_actor) / layout.envs_per_actor * sps,
        "learner": costs.learn * sps,
        "inference": costs.infer(batch) / batch * sps,
        "rest": costs.rest * sps,
    }
    return Tried(layout, measured(sps, cores), batch, shares)


def test_costs_are_those_that_the_runs_had():
    costs = Costs(Line(3e-3, 2e-4), 0.0, Line(1e-3, 5e-5), 4e-4, 4e-4, 7e-6)
    tries = [
        try_of(costs, Layout(2, E), sps, batch, {"environments": 0.0})
        for E, sps, batch in ((4, 900, 5.0), (8, 1300, 12.0), (32, 1700, 40.0))
    ]
    for x, y in zip(costs_of(tries), costs, strict=True):
        assert x == pytest.approx(y)


def test_a_pause_is_what_neither_waits_nor_computes():
    costs = make_costs(env=(0.0, 1e-4))
    sps, layout = 4 / 1e-3, Layout(4, 3)  # four actors, 1 ms a step, of which 0.9 idle
    shares = {"wait": 0.0, "env": 0.9, "act": 0.1}
    (tried,) = [try_of(costs, layout, sps, 3, shares)]
    assert costs_of([tried]).pause == pytest.approx(9e-4)
    busy = tried.measured._replace(free_cores=0.85)  # it may wait for a core
    assert costs_of([tried._replace(measured=busy)]).pause == 0


def test_a_line_has_no_negative_part():
    assert fit([(2, 7.0), (4, 9.0), (8, 13.0)]) == pytest.approx((5.0, 1.0))
    assert fit([(3, 6.0), (3, 6.6)]) == pytest.approx((0.0, 2.1))
    assert fit([(2, 2.0), (4, 8.0)]).per_call == 0
    assert fit([(2, 8.0), (4, 2.0)]).per_env > 0


# --- The search ---


def resolver(line, script=monobeast):
    typed = start.read(script.make_parser(), shlex.split(line))

    def resolve(layout):
        flags = start.merge(typed)
        for name, value in (layout._asdict() if layout else {}).items():
            setattr(flags, name, value)
        return script.resolve_layout(start.resolve(flags)).freeze()

    return resolve


LINES = [
    "",
    "--batch_size 6 --unroll_length 7",
    "--preset minatar",
    "--num_buffers 30",
    "--sync --batch_size 4",
    "--sync --preset classic-control --disable_checkpoint",
]


@pytest.mark.parametrize("cores", [1, 2, 16])
@pytest.mark.parametrize("line", LINES)
def test_all_layouts_are_allowed(line, cores):
    resolve = resolver(line)
    found = layouts(resolve, cores)
    own = resolve(None)
    first = Layout(own.num_actors, own.envs_per_actor)
    assert next(iter(found)) == first
    assert len(found) >= (3 if own.sync else 5)
    for layout, flags in found.items():
        assert (flags.num_actors, flags.envs_per_actor) == layout
        assert resolve(layout).as_dict() == flags.as_dict()
        assert layout.num_envs <= max(first.num_envs, 8 * own.batch_size)
        kept = ("batch_size", "unroll_length", "env", "preset", "sync", "seed")
        assert all(getattr(flags, x) == getattr(own, x) for x in kept)


@pytest.mark.parametrize(
    "line",
    [
        "--batch_size 24",
        "--sync --disable_checkpoint --batch_size 2",
        "--num_servers 1",
    ],
)
def test_all_layouts_of_polybeast_are_allowed(line):
    pytest.importorskip("libtorchbeast", exc_type=ImportError)
    from torchbeast.polybeast import start as polybeast

    resolve = resolver(line, polybeast)
    for layout, flags in layouts(resolve, 4).items():
        assert flags.num_actors == layout.num_actors
        large, small = sorted([flags.batch_size, layout.envs_per_actor])[::-1]
        assert large % small == 0
        assert flags.num_servers <= flags.num_actors


def test_typed_flags_stay():
    found = layouts(resolver("--num_actors 3"), 2)
    assert {x.num_actors for x in found} == {3}
    assert len(found) > 2
    assert layouts(resolver("--num_actors 3 --envs_per_actor 5"), 2).keys() == {(3, 5)}


def test_the_choice_prefers_fewer_environments():
    assert choose({Layout(2, 8): 100.0, Layout(4, 8): 102.0}) == Layout(2, 8)
    assert choose({Layout(2, 8): 100.0, Layout(4, 8): 110.0}) == Layout(4, 8)


def test_predictions_for_other_layouts_follow_the_costs():
    costs = make_costs(env=(4e-3, 1e-3), learn=2e-4)
    choices = layouts(resolver("--batch_size 8"), 2)
    idle = 0.9  # of the limits, for whatever reason
    tries = []
    for layout in (Layout(2, 8), Layout(2, 32), Layout(4, 16)):
        sps = idle * min(limits(costs, layout, 2).values())
        tried = try_of(costs, layout, sps, 8, {"wait": 1.0})
        tries.append(tried._replace(measured=tried.measured._replace(free_cores=2.0)))
    speeds, _ = predict(tries, choices)
    assert speeds.keys() == choices.keys()
    for layout, speed in speeds.items():
        expected = idle * min(limits(costs, layout, 2).values())
        assert speed == pytest.approx(expected, rel=1e-3)


# --- The whole command ---

SMALL = "--env CartPole-v1 --batch_size 4 --unroll_length 5 --precision fp32"


def tune(line, variant="monobeast", seconds=0.4):
    if variant == "polybeast":
        pytest.importorskip("libtorchbeast", exc_type=ImportError)
    script = __import__(f"torchbeast.{variant}", fromlist=["main"])
    typed = start.read(script.make_parser(), shlex.split(line))
    return autotune.main(typed, script.resolve_layout, seconds)


@runs.needs_proc
@pytest.mark.timeout(600)  # three starts of a run, and two
@pytest.mark.parametrize(
    ("variant", "more"), [("monobeast", ""), ("polybeast", "--envs_per_actor 2")]
)
def test_it_prints_flags_and_leaves_nothing(
    variant, more, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(trial, "START_SECONDS", 500.0)
    line = f"{SMALL} --num_actors 2 {more} --savedir {tmp_path}/runs --autotune"
    assert tune(line, variant) == 0
    out = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"--num_actors 2 --envs_per_actor \d+", out[-1])
    predicted = float(re.search(r"([\d,]+) steps per", out[-2])[1].replace(",", ""))
    # On two busy cores and on many free ones.
    assert 0 < predicted < 100_000
    flags = start.parse(monobeast.make_parser(), shlex.split(out[-1]))
    assert flags.envs_per_actor <= 32
    assert any(f"{out[-1]}, tried" in x for x in out)
    assert not (tmp_path / "runs").exists()
    assert not list(tmp_path.glob("torchbeast-autotune-*"))


@runs.needs_proc
@pytest.mark.timeout(200)
def test_the_runs_have_the_flags_of_the_command(monkeypatch, tmp_path, capsys):
    seen = []

    def spy(command, layout, folder, seconds):
        seen.append(start.parse(monobeast.make_parser(), command[3:]))
        return try_of(make_costs(), layout, 1000.0, 4, {})

    monkeypatch.setattr(autotune, "try_command", spy)
    line = "--preset minatar --learning_rate 0.003 --wandb x --init_from y --sync"
    line += f" --mirror {tmp_path}/copy --metrics_port 1234"
    assert tune(f"{line} --savedir {tmp_path}") == 0
    for flags in seen:
        assert (flags.preset, flags.env) == ("minatar", "MinAtar/Breakout-v1")
        assert flags.batch_size == 16
        assert flags.learning_rate == 0.003
        assert flags.sync
        assert (flags.wandb, flags.init_from, flags.autotune) == (None, None, False)
        assert (flags.mirror, flags.metrics_port) == (None, 0)
        assert flags.num_actors * flags.envs_per_actor == flags.num_buffers
    assert len({(x.num_actors, x.envs_per_actor) for x in seen}) > 2
    seen.clear()
    line = "--preset minatar --clip_ratio inf --replay_size 9000 --replay_ratio 1"
    assert tune(f"{line} --savedir {tmp_path}") == 0
    assert {(x.replay_size, x.learn_start) for x in seen} == {(9000, 0)}
    capsys.readouterr()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--mode test", "has no effect with --mode test"),
        ("--num_buffers 2", "--num_buffers 2 is too small"),
        ("--batch_size 0", "--batch_size must be at least 1"),
    ],
)
def test_flags_of_no_run_are_refused(line, message):
    with pytest.raises(FlagError, match=re.escape(message)):
        tune(line)


def test_under_torchrun_it_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(FlagError, match="can't try several learners of torchrun"):
        tune("")


@runs.needs_proc
@pytest.mark.timeout(400)
@pytest.mark.parametrize("variant", ["monobeast", "polybeast"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [("raise_error", "the ball left the table"), ("hang", "made no|no step|did not")],
)
def test_a_fault_of_the_environment_is_named(
    variant, fault, message, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", runs.environment()["PYTHONPATH"])
    monkeypatch.setenv("FAULT_FILE", str(tmp_path / "fault"))
    (tmp_path / "fault").write_text(fault)
    line = "--env faulty:Environment --actor_timeout 20 --num_actors 1"
    if variant == "polybeast" and fault == "hang":  # its streams reconnect
        monkeypatch.setattr(trial, "START_SECONDS", 40.0)
    with pytest.raises(trial.TrialError, match=message):
        tune(line, variant)


@runs.needs_proc
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_all_processes(number, tmp_path):
    words = [sys.executable, "-m", "torchbeast.monobeast", "--autotune"]
    process = subprocess.Popen(
        [*words, *shlex.split(SMALL)],
        env={**runs.environment(), "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    tree = {}
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("torchbeast-autotune-*/run/logs.csv")):
        tree |= trial.process_tree(process.pid)
        assert time.monotonic() < deadline
        time.sleep(0.1)
    tree |= trial.process_tree(process.pid)
    assert len(tree) > 3
    process.send_signal(number)
    _, errors = process.communicate(timeout=runs.patience(60))
    if number == signal.SIGINT:
        assert process.returncode == 128 + number, errors
        assert b"Traceback" not in errors
        assert not list(tmp_path.glob("torchbeast-autotune-*"))
    deadline = time.monotonic() + 40
    while alive := [pid for pid in tree if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)


@runs.needs_proc
def test_threads_have_the_names_that_trials_look_for():
    names = []

    def work():
        processes.name_thread("learner-0")
        names.extend(name for name, _ in trial.threads(os.getpid()))

    import threading

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "learner-0" in names
    assert math.isfinite(trial.machine_busy())
