"""--eval_interval, model.best.tar, in real runs."""

import os
import re
import shutil
import signal
import statistics
import types

import pytest
import runs
import torch
from watched_runs import processes_of_session, wait_until

from torchbeast import monobeast
from torchbeast.base import parts
from torchbeast.base.errors import FlagError
from torchbeast.extras import evaluator
from torchbeast.extras.play import games as played
from torchbeast.runs import flagset
from torchbeast.runs.files import read_meta

FLAGS = {
    **runs.SMALL,
    "batch_size": 3,
    "total_steps": 6000,
    "eval_interval": 500,
    "eval_episodes": 3,
}
FOREVER = 10**9


def results(folder):
    """(step of the weights, mean return) of each evaluation in logs.csv."""
    rows = [row for row in runs.read_logs(folder, "a") if row["eval_return"]]
    return [(int(row["eval_step"]), float(row["eval_return"])) for row in rows]


def load(path):
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("module", ["torchbeast.monobeast", "torchbeast.polybeast"])
def test_results_and_the_best_checkpoint(tmp_path, module):
    process = runs.start(
        tmp_path, "a", **{**FLAGS, "module": module, "total_steps": FOREVER}
    )
    runs.wait_for_rows(process, tmp_path, "a", 1)
    wait_until(lambda: len(results(tmp_path)) >= 3, "three evaluations", 60)
    process.send_signal(signal.SIGINT)
    output = runs.finish(process)
    assert process.returncode == 130
    wait_until(lambda: not processes_of_session(process.pid), "all ended")
    found = results(tmp_path)
    assert [step for step, _ in found] == sorted({step for step, _ in found})
    assert len(re.findall("3 test games, mean return", output)) >= len(found)
    best = load(tmp_path / "a" / "model.best.tar")
    assert best["stats"]["eval_return"] >= max(value for _, value in found)
    # What another process says of these weights:
    argv = ["--xpid=a", "--mode=test"]
    typed = flagset.read(monobeast.make_parser(), argv)
    flags = flagset.merge(typed, best)
    flags = flagset.resolve(flags).freeze()
    weights, stream = best["model_state_dict"], played.EVAL_STREAM
    games = list(played.play(flags, weights, range(3), stream=stream))
    mean = statistics.fmean(game.game_return for game in games)
    assert mean == best["stats"]["eval_return"]
    assert games != list(played.play(flags, weights, range(3))), "not the test's"
    output = runs.run(
        tmp_path, "a", module=module, mode="test", checkpoint="model.best.tar"
    )
    assert "10 games: mean return" in output
    assert (tmp_path / "a" / "test.best.json").exists()
    assert not (tmp_path / "a" / "test.json").exists()


def test_a_stop_signal_while_a_test_game_hangs(tmp_path, monkeypatch):
    hangs = tmp_path / "hangs"
    monkeypatch.setenv("HANGS", str(hangs))
    flags = {**FLAGS, "env": "evaluated:HangsInTests", "total_steps": FOREVER}
    process = runs.start(tmp_path, "a", **flags)
    wait_until(hangs.exists, "a test game hangs", 60)
    runs.wait_for_rows(process, tmp_path, "a", 60)
    process.send_signal(signal.SIGTERM)
    runs.finish(process, 30)
    assert process.returncode == 143
    wait_until(lambda: not processes_of_session(process.pid), "all ended")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ending", ["signal", "kill", "timeout"])
def test_the_last_evaluation_hangs(tmp_path, ending):
    """If it was cut off, the next start makes up for it, and only for it."""
    flags = {**FLAGS, "env": "evaluated:HangsInTests", "total_steps": 60}
    module = "torchbeast.monobeast"
    if ending == "timeout":
        flags |= {"module": "impatient", "actor_timeout": 30}
    if ending == "kill":
        module = flags["module"] = "torchbeast.polybeast"
    process = runs.start(tmp_path, "a", **flags)
    log = tmp_path / "a" / "out.log"

    def evaluates():
        return log.exists() and "Evaluating the final weights" in log.read_text()

    wait_until(evaluates, "the training has ended", 60)
    if ending != "timeout":
        process.send_signal(signal.SIGTERM if ending == "signal" else signal.SIGKILL)
    output = runs.finish(process, 200)
    statuses = {"signal": 143, "kill": -signal.SIGKILL, "timeout": 0}
    assert process.returncode == statuses[ending], output
    stuck = "There are no more evaluations: its process (pid "
    assert (stuck in output) == (ending == "timeout")
    assert ("in step" in output) == (ending == "timeout")  # its stack
    wait_until(lambda: not processes_of_session(process.pid), "all ended")
    path = tmp_path / "a" / "model.tar"
    saved, logged = path.read_bytes(), without_evaluations(tmp_path)
    assert load(path)["stats"]["step"] == 60
    meta = read_meta(path.parent)
    assert meta["successful"] == (ending == "timeout") == ("Finished" in output)
    if ending == "timeout":
        return
    output = runs.run(tmp_path, "a", module=module, env="faulty:Environment")
    assert "Finished at step 60" in output
    assert results(tmp_path)[-1][0] == 60
    assert without_evaluations(tmp_path) == logged
    assert path.read_bytes() == saved
    meta = read_meta(path.parent)
    assert (meta["successful"], meta["last_step"]) == (True, 60)
    output = runs.run(tmp_path, "a", module=module)
    assert "is at step 60 of --total_steps 60 already" in output
    assert read_meta(path.parent) == meta


def test_an_evaluation_needs_the_part_that_plays(monkeypatch):
    monkeypatch.setattr(parts, "optional", lambda name: None)
    run = types.SimpleNamespace(flags=monobeast.make_flags(["--eval_interval=9"]))
    with pytest.raises(FlagError, match="--eval_interval needs extras/play"):
        evaluator.attach(run)


def without_evaluations(folder):
    rows = runs.read_logs(folder, "a")
    return [row["step"] for row in rows if not row["eval_return"]]


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_run_goes_on_without_evaluations(tmp_path, monkeypatch, how):
    fault = tmp_path / "fault"
    monkeypatch.setenv("FAULT_FILE", str(fault))
    env = "evaluated:OnlyTraining" if how == "raises" else "CartPole-v1"
    process = runs.start(tmp_path, "a", **{**FLAGS, "env": env, "total_steps": FOREVER})
    log = tmp_path / "a" / "out.log"
    runs.wait_for_rows(process, tmp_path, "a", 5)
    if how == "killed":

        def evaluators():  # it lowers its priority after its start
            children = processes_of_session(process.pid)
            return [p.pid for p in children if os.getpriority(0, p.pid) == 19]

        wait_until(evaluators, "an evaluator runs", 60)
        os.kill(evaluators()[0], signal.SIGKILL)
    message = "There are no more evaluations"
    wait_until(lambda: message in log.read_text(), "no more evaluations", 60)
    runs.wait_for_rows(process, tmp_path, "a", len(runs.read_logs(tmp_path, "a")) + 50)
    process.send_signal(signal.SIGINT)
    output = runs.finish(process)
    assert process.returncode == 130
    if how == "killed":
        assert "its process (pid " in output
        assert "died by signal SIGKILL" in output
    else:
        assert "FileNotFoundError: no such level" in output


def test_what_is_of_steps_that_were_cut_off_is_removed(tmp_path):
    """As after a kill: model.tar is older than the best checkpoint."""
    flags = {**FLAGS, "total_steps": 600, "eval_interval": 300}
    runs.run(tmp_path, "a", **flags, checkpoint_history=2)
    folder = tmp_path / "a"
    shutil.copy(min(folder.glob("model.[3-5]*.tar")), folder / "model.tar")
    best = load(folder / "model.best.tar")
    best["stats"] |= {"step": 600, "eval_return": 1e9}
    torch.save(best, folder / "model.best.tar")
    runs.run(tmp_path, "a", total_steps=600)
    found = load(folder / "model.best.tar")["stats"]
    assert found["eval_return"] == max(value for _, value in results(tmp_path)) < 1e9
