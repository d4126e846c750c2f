"""Grids of seeds and settings: real sweeps of real runs."""

import logging
import os
import shlex
import signal

import pytest
import runs
import sweeps
import watched_runs

from torchbeast.runs.files import read_meta
from torchbeast.tools import grid, report, sweep
from torchbeast.tools.groups import by_name
from torchbeast.tools.saved_runs import read_run

pytestmark = pytest.mark.timeout(400)
FOREVER = 10**9


@pytest.fixture
def refused(tmp_path, capsys, caplog):
    """Starts a sweep that is refused; returns its message. No folder is left."""

    def start(*own, status, **flags):
        words = sweeps.words(tmp_path, *own, **flags)[3:]
        before = set(tmp_path.iterdir())
        with caplog.at_level(logging.INFO):
            if status == 2:  # argparse
                with pytest.raises(SystemExit, match="2"):
                    sweep.main(words)
            else:
                assert sweep.main(words) == status
        assert set(tmp_path.iterdir()) == before
        return capsys.readouterr().err + caplog.text

    return start


@pytest.mark.slow
def test_a_grid_with_seeds(tmp_path, capsys):
    own = ["--jobs", "2", "--seeds", "1-2", "--grid", "use_lstm=true,false"]
    own += ["--grid", "entropy_cost=0.02"]
    sweeps.finished(tmp_path, *own)
    kinds = [f"sweep-use_lstm={x}-entropy_cost=0.02" for x in ("true", "false")]
    names = [f"{kind}-{seed}" for kind in kinds for seed in (1, 2)]
    folders = sorted(path.name for path in tmp_path.iterdir() if not path.is_symlink())
    assert folders == sorted(names)
    for name in names:
        sweeps.assert_finished(tmp_path, name)
        flags = read_meta(tmp_path / name)["args"]
        assert flags["use_lstm"] == ("true" in name)
        assert flags["entropy_cost"] == 0.02
        assert flags["seed"] == int(name[-1])
    groups = by_name(read_run(tmp_path / x) for x in names)
    assert sorted(groups) == sorted(kinds)  # as plot --group and report --group do
    # Again: nothing is started.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")}
    output = sweeps.finished(tmp_path, *own)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")}
    assert output.count(" finished.") == 4
    command = shlex.split(output.partition("-m torchbeast.report ")[2])
    report.main(command)
    table = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[1] for line in table] == sorted(kinds)


@pytest.mark.slow
def test_a_stopped_sweep_goes_on(tmp_path, tmp_path_factory, monkeypatch):
    """Ctrl-C in a terminal. Each of two runs has one core, with all its processes."""
    pytest.importorskip("libtorchbeast", exc_type=ImportError)
    slow = tmp_path_factory.mktemp("slow") / "slow"
    slow.touch()
    monkeypatch.setenv("SLOW_FILE", str(slow))
    flags = {"variant": "polybeast", "total_steps": 6_000, "batch_size": 3}
    flags |= {"wrapper": "environments:SlowWhileMarked"}
    own = ["--name", "x", "--jobs", "2", "--cores", "1", "--seeds", "1-3"]
    with sweeps.started(tmp_path, *own, **flags) as process:
        for xpid in ("x-1", "x-2"):
            runs.wait_for_rows(process, tmp_path, xpid, 10, timeout=200)
        used = []
        for xpid in ("x-1", "x-2"):
            (pid,) = sweeps.processes_of_run(process.pid, xpid)
            used.append(os.sched_getaffinity(pid))
            assert family_affinity(process.pid, pid) == used[-1]
        assert len(used[0]) == len(used[1]) == 1
        assert not used[0] & used[1]
        os.killpg(process.pid, signal.SIGINT)
        output = runs.finish(process, 200)
        assert process.returncode == 130, output
        assert "Give the same command again to continue with the other runs." in output
        assert "Traceback" not in output
        wait_for_no_process(process)
    assert not (tmp_path / "x-3").exists()
    steps = {}
    for xpid in ("x-1", "x-2"):
        end = read_meta(tmp_path / xpid)
        assert end["exit_status"] == 130
        steps[xpid] = end["last_step"]
        assert 0 < steps[xpid] < 6_000
    slow.unlink()
    sweeps.finished(tmp_path, *own, **flags)
    for xpid in ("x-1", "x-2", "x-3"):
        sweeps.assert_finished(tmp_path, xpid, 6_000)
        console = (tmp_path / xpid / "console.log").read_text()
        resumed = f"Resuming at step {steps.get(xpid)}." in console
        assert resumed == (xpid in steps)


def wait_for_no_process(sweep_process):
    pid = sweep_process.pid
    watched_runs.wait_until(
        lambda: not watched_runs.processes_of_session(pid), "no process left"
    )


def family_affinity(session, pid):
    """The cores that a process and its descendants may use."""
    processes = watched_runs.processes_of_session(session)
    family, cores = {pid}, set()
    while more := {p.pid for p in processes if p.parent in family} - family:
        family |= more
    assert len(family) > 2  # with its actors or servers
    for member in family:
        cores |= os.sched_getaffinity(member)
    return cores


STOPS_IN_PYTHONS_START = """
import os, sys, time
folder = os.environ["STOPS_IN"]
if "torchbeast.monobeast" in sys.orig_argv:
    open(os.path.join(folder, "starting"), "w").close()
    while not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.01)
"""


def test_a_signal_while_a_run_is_in_pythons_start(
    tmp_path, tmp_path_factory, monkeypatch
):
    """The run ends when it handles signals, and counts as stopped, not as failed."""
    extra = tmp_path_factory.mktemp("site")
    (extra / "sitecustomize.py").write_text(STOPS_IN_PYTHONS_START)
    monkeypatch.setenv("PYTHONPATH", str(extra))
    monkeypatch.setenv("STOPS_IN", str(extra))
    with sweeps.started(tmp_path, total_steps=FOREVER) as process:
        watched_runs.wait_until((extra / "starting").exists, "start of a run", 60)
        (run,) = sweeps.processes_of_run(process.pid, "sweep-1")
        os.kill(run, signal.SIGTERM)  # a batch system sends it to all processes
        os.kill(process.pid, signal.SIGTERM)
        (extra / "go").touch()
        output = runs.finish(process)
    assert process.returncode == 143, output
    assert "sweep-1 ended with exit status 143." in output
    console = (tmp_path / "sweep-1" / "console.log").read_text()
    assert console == ""


@pytest.mark.slow
def test_a_killed_sweep_leaves_nothing(tmp_path):
    """Its runs save and end."""
    with sweeps.started(tmp_path, "--seeds", "1", total_steps=FOREVER) as process:
        runs.wait_for_rows(process, tmp_path, "sweep-1", 10, timeout=200)
        process.kill()
        runs.finish(process)
        wait_for_no_process(process)
    end = read_meta(tmp_path / "sweep-1")
    assert end["exit_status"] == 143
    assert end["last_step"] > 0
    assert (tmp_path / "sweep-1" / "model.tar").exists()


@pytest.mark.slow
def test_a_run_that_fails(tmp_path):
    """The others go on, and at the end comes its output."""
    own = ["--grid", "env=nowhere:Nothing,CartPole-v1", "--name", "two"]
    output = sweeps.finished(tmp_path, *own, status=1)
    sweeps.assert_finished(tmp_path, "two-env=CartPole-v1-1")
    assert "two-env=nowhere_Nothing-1 ended with exit status 1" in output
    assert "Failed: 1 of 2 runs: two-env=nowhere" in output.splitlines()[-1]
    before, _, after = output.partition("two-env=CartPole-v1-1 finished.")
    assert "No module named 'nowhere'" not in before
    assert "No module named 'nowhere'" in after


def test_a_run_with_other_flags_is_not_touched(tmp_path, refused):
    runs.run(tmp_path, "sweep-1", **runs.SMALL)
    (tmp_path / "latest").unlink()
    message = refused(status=1, discounting=0.9)
    assert "sweep-1 has a run with other flags (--discounting 0.99 -> 0.9)" in message
    assert "Give another --name" in message
    assert sweep.main(sweeps.words(tmp_path)[3:]) == 0  # with its own flags
    assert read_meta(tmp_path / "sweep-1")["resumed"] == []
    assert sweep.main(sweeps.words(tmp_path, total_steps=700)[3:]) == 0
    assert read_meta(tmp_path / "sweep-1")["first_step"] == 600
    sweeps.assert_finished(tmp_path, "sweep-1", 700)


@pytest.mark.parametrize(
    ("own", "flags", "status", "message"),
    [
        (["--grid", "alfa=1"], {}, 1, "monobeast has no flag --alfa"),
        (["--grid", "num_buffers=1"], {}, 1, "--num_buffers 1 is too small"),
        (["--grid", "entropy_cost"], {}, 2, "is not of the form FLAG=VALUES"),
        (["--grid", "seed=1,2"], {}, 2, "seed can't be varied like this"),
        (["--grid", "env=a b,a/b"], {}, 1, "two runs of the grid would be named"),
        (["--seeds", "3-1"], {}, 2, "argument --seeds: '3-1' has no seed"),
        (["--seeds", "1-9000000000000"], {}, 2, "or more than 1,000,000"),
        (["--grid", "alpha=0.9", "--grid", "alpha=0.8"], {}, 2, "alpha is given twice"),
        (["--name", "a/b"], {}, 1, "must be a plain name"),
        (["--search", "x=int:1:2", "--grid", "y=1"], {}, 2, "goes neither with --grid"),
        ([], {"seed": 3}, 1, "give --seeds and --name in place of --seed"),
    ],
)
def test_what_can_not_work(refused, own, flags, status, message):
    assert message in refused(*own, status=status, **flags)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2", ["1", "2"]),
        ('{"a":1,"b":[2,3]},{}', ['{"a":1,"b":[2,3]}', "{}"]),
        ('m:a,"m:a,m:b"', ["m:a", "m:a,m:b"]),
        ('a.b:C{"a":1,"b":2},d:E,{}', ['a.b:C{"a":1,"b":2}', "d:E", "{}"]),
    ],
)
def test_values_with_commas(text, values):
    assert grid.split_values(text) == values
