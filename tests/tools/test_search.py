"""Searches with Optuna: real studies over real runs.

Skipped without Optuna: pip install optuna.
"""

import json
import signal

import pytest
import runs
import sweeps

from torchbeast.base.errors import FileError, FlagError
from torchbeast.runs.files import read_meta
from torchbeast.tools import jobs

optuna = pytest.importorskip("optuna")

from torchbeast.tools import search  # noqa: E402 # after the skip: it imports Optuna

pytestmark = pytest.mark.timeout(400)
SPACE = ["--name", "s", "--search", "learning_rate=loguniform:1e-4:1e-2"]
STATE = optuna.trial.TrialState


def trials(folder):
    path = folder / "s" / "study.db"
    return optuna.load_study(study_name="sweep", storage=f"sqlite:///{path}").trials


def last_return(folder, xpid):
    known = [row["mean_game_return_100"] for row in runs.read_logs(folder, xpid)]
    return float(next(value for value in reversed(known) if value))


def test_a_search_that_goes_on(tmp_path):
    """Its values are means over the seeds; --trials counts those of all starts."""
    output = sweeps.finished(tmp_path, *SPACE, "--trials", "1", "--seeds", "1,4")
    assert "The best is trial 0" in output
    sweeps.finished(tmp_path, *SPACE, "--trials", "2", "--seeds", "1,4")
    found = trials(tmp_path)
    assert [trial.state for trial in found] == [STATE.COMPLETE] * 2
    for trial in found:
        names = [f"s-trial{trial.number}-{seed}" for seed in (1, 4)]
        returns = [last_return(tmp_path, name) for name in names]
        assert trial.value == pytest.approx(sum(returns) / 2)
        for name in names:
            sweeps.assert_finished(tmp_path, name)
            assert read_meta(tmp_path / name)["resumed"] == []
            rate = read_meta(tmp_path / name)["args"]["learning_rate"]
            assert rate == trial.params["learning_rate"]
            assert 1e-4 <= rate <= 1e-2
    assert found[0].params != found[1].params
    other = ["--trials", "3", "--seeds", "1"]
    output = sweeps.finished(tmp_path, *SPACE, *other, status=1)
    assert "Give the same values and seeds again, or another --name" in output
    assert len(trials(tmp_path)) == 2


def test_a_trial_that_fails(tmp_path):
    own = [*SPACE, "--trials", "2", "--jobs", "2"]
    output = sweeps.finished(tmp_path, *own, status=1, env="nowhere:Nothing")
    assert [trial.state for trial in trials(tmp_path)] == [STATE.FAIL] * 2
    own = ["--name", "t", "--search", "precision=choice:fp31:fp33", "--trials", "2"]
    assert "Failed: all trials." in sweeps.finished(tmp_path, *own, status=1)
    assert "Trial 1: a run has failed, or has no return." in output
    assert "nowhere" in output.partition("console.log:")[2]


def test_a_trial_whose_run_was_killed_goes_on(tmp_path):
    """Perhaps between its result and the end of meta.json."""
    space = [("x", "int:1:4")]
    job = jobs.Job("a", tmp_path / "a", ("command",))

    def open_study():
        return search.Search(tmp_path / "study.db", space, ["same"], lambda *_: [job])

    study = open_study()
    assert list(study.jobs(1)) == [job]
    study.ended(job, -signal.SIGKILL)
    assert [trial.state for trial in study.study.trials] == [STATE.RUNNING]
    again = open_study()
    assert list(again.jobs(1)) == [job]
    assert again.study.trials[0].params == study.study.trials[0].params
    again.ended(job, 1)
    assert [trial.state for trial in again.study.trials] == [STATE.FAIL]


def test_the_return_of_an_evaluation_counts(tmp_path):
    def final_return(*rows, eval_interval=0):
        flags = {"eval_interval": eval_interval}
        (tmp_path / "meta.json").write_text(json.dumps({"args": flags}))
        header = "step,mean_game_return_100,eval_step,eval_return"
        (tmp_path / "logs.csv").write_text("\n".join([header, *rows, ""]))
        return search.final_return(tmp_path)

    assert final_return("10,,,") is None
    assert final_return("10,5,,", "20,6,,", "30,,,") == 6
    rows = "10,5,,", "20,6,10,2.5"
    assert final_return(*rows, "20,,20,3.5", eval_interval=10) == 3.5
    # The last evaluation failed; the one before is of other weights. The mean of the
    # training games can't be compared with the evaluations of other trials.
    assert final_return(*rows, "30,7,,", eval_interval=10) is None
    # Damaged files count as no return.
    assert final_return("10,5,,", "20,6", "30,,,") is None


@pytest.mark.parametrize("text", ["normal:0:1", "uniform:1", "int:1:x", "choice"])
def test_values_that_make_no_sense(text):
    with pytest.raises(FlagError, match="is not uniform:LOW:HIGH"):
        search.distribution(text)


def test_a_study_that_can_not_be_used(tmp_path):
    path = tmp_path / "study.db"
    path.write_text("no database")
    with pytest.raises(FileError, match=r"study\.db can't be used: "):
        search.Search(path, [("x", "uniform:0:1")], ["a"], lambda *_: [])
