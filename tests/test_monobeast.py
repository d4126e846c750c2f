"""MonoBeast as a whole: training, resuming, reproducing, testing."""

import json
import shutil
import signal
import subprocess
import time

import pytest
import runs
import torch

from torchbeast import load_agent, monobeast
from torchbeast.base.errors import FlagError

SYNC = {**runs.SMALL, "sync": True}


@pytest.fixture
def savedir(tmp_path):
    return tmp_path


def test_run_files(savedir):
    runs.run(savedir, "a", **runs.SMALL)
    path = savedir / "a"
    rows = runs.read_logs(savedir, "a")
    per_update = runs.SMALL["batch_size"] * runs.SMALL["unroll_length"]
    assert [int(row["step"]) for row in rows] == list(
        range(per_update, runs.SMALL["total_steps"] + 1, per_update)
    )
    assert float(rows[-1]["learning_rate"]) == pytest.approx(
        0.0007 * per_update / runs.SMALL["total_steps"]
    )
    meta = json.loads((path / "meta.json").read_text())
    assert meta["successful"] is True
    assert meta["args"]["env"] == "CartPole-v1"
    saved = torch.load(path / "model.tar", weights_only=True)
    assert saved["stats"]["step"] == runs.SMALL["total_steps"]
    assert {"model_state_dict", "optimizer_state_dict", "scheduler_state_dict"} <= set(
        saved
    )
    assert saved["flags"]["unroll_length"] == runs.SMALL["unroll_length"]
    assert "Finished at step 600" in (path / "out.log").read_text()


def test_defaults_of_pytorch_that_no_run_can_have(savedir, caplog):
    torch.set_default_dtype(torch.float64)  # as in a notebook
    try:
        assert monobeast.main(runs.command(savedir, "a", **runs.SMALL)[3:]) == 1
        with pytest.raises(FlagError, match="default dtype and device"):
            load_agent(savedir)
    finally:
        torch.set_default_dtype(torch.float32)
    assert "default dtype and device are (torch.float64, 'cpu')" in caplog.text
    assert "Traceback" not in caplog.text


def test_sync_runs_are_equal(savedir):
    """A bound that no step exceeds changes nothing."""
    for xpid, bound in (("a", None), ("b", 5), ("c", 0)):
        flags = {"use_lstm": True, "max_policy_lag": bound}
        runs.run(savedir, xpid, **SYNC, **flags)
    a, b, c = (runs.logs(savedir, xpid) for xpid in "abc")
    assert len(a) == 60
    assert a == b
    assert {row["frac_too_old"] for row in a} == {"0.0"}
    # Three updates per round. Row 0 is of the round before, and counts as one of five.
    lags = [float(row["policy_lag"]) for row in a]
    assert lags == pytest.approx([i % 3 + (0.6 if i >= 3 else 0) for i in range(60)])
    too_old = [float(row["frac_too_old"]) for row in c]
    assert too_old == [i % 3 > 0 or (0.2 if i >= 3 else 0) for i in range(60)]
    runs.run(savedir, "d", **{**SYNC, "seed": 2}, use_lstm=True)
    assert runs.logs(savedir, "d") != a


ALL_THAT_HAS_STATE = {
    "use_lstm": True,
    "normalize_observations": True,
    "normalize_rewards": True,
    "normalize_advantages": True,
    "updates_per_batch": 4,
    "minibatches": 2,
    "optimizer": "adam",
    "epsilon": 0.00001,
    "clip_ratio": 0.2,
}


@pytest.mark.parametrize(
    ("env", "more"),
    [
        ("environments:Steering", ALL_THAT_HAS_STATE),
        ("Pong-v4", {}),
    ],
)
def test_stopped_and_resumed_equals_not_stopped(
    savedir, tmp_path, monkeypatch, env, more
):
    slow = tmp_path / "slow"
    monkeypatch.setenv("SLOW_FILE", str(slow))
    flags = {**SYNC, "env": env, "envs": "python", **more}
    flags["wrapper"] = "environments:SlowWhileMarked"
    runs.run(savedir, "whole", **flags)
    slow.touch()
    process = runs.start(savedir, "parts", **flags)
    # Stop it in the middle: after the first lines of the log, before the last.
    runs.wait_for_rows(process, savedir, "parts", 7)
    process.send_signal(signal.SIGINT)
    output = runs.finish(process)
    slow.unlink()
    stopped_at = len(runs.read_logs(savedir, "parts"))
    assert stopped_at < 60, "the run was over before it could be stopped"
    assert process.returncode == 130, output
    meta = json.loads((savedir / "parts" / "meta.json").read_text())
    assert meta["successful"] is False
    assert meta["date_end"]
    output = runs.run(savedir, "parts", **flags)
    assert "Resuming at step" in output
    whole, parts = (runs.logs(savedir, xpid) for xpid in ("whole", "parts"))
    assert whole == parts
    weights = [
        torch.load(savedir / xpid / "model.tar", weights_only=True)["model_state_dict"]
        for xpid in ("whole", "parts")
    ]
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


def test_sync_resumes_in_the_middle_of_games_that_use_autograd(savedir, monkeypatch):
    monkeypatch.setenv("DRAWN_IN", str(savedir))
    flags = {**SYNC, "env": "faulty:UsesTorch", "total_steps": 300}
    runs.run(savedir, "a", **flags)
    assert "Resuming at step 300" in runs.run(
        savedir, "a", **flags | {"total_steps": 600}
    )
    assert int(runs.read_logs(savedir, "a")[-1]["step"]) == 600


def test_sync_refuses_games_that_it_could_not_save(savedir):
    output = runs.run(savedir, "a", **{**SYNC, "env": "Pong-v4"}, status=1)
    assert "--atari_backend python" in output
    assert not (savedir / "a").exists()


def fails(savedir, xpid, **flags):
    """Runs a command that has to fail with one message; returns its output."""
    output = runs.run(savedir, xpid, **flags, status=1)
    assert "Traceback" not in output
    assert output.count("[ERROR ") == 1, output
    return output


def test_a_run_goes_on_where_it_was(savedir):
    """Resuming needs no flags, and typed flags win."""
    runs.run(savedir, "a", **runs.SMALL, preset="classic-control")
    before = (savedir / "a" / "logs.csv").read_bytes()
    output = runs.run(
        *(savedir, "a"), preset="classic-control", total_steps=900, learning_rate=0.0003
    )
    assert "--learning_rate 0.001 -> 0.0003, --total_steps 600 -> 900." in output
    assert "--learning_rate 0.001" in (savedir / "a" / "out.log").read_text()
    assert (savedir / "a" / "logs.csv").read_bytes().startswith(before)
    rows = runs.read_logs(savedir, "a")
    assert [int(row["_tick"]) for row in rows] == list(range(90))
    assert int(rows[-1]["step"]) == 900
    assert int(rows[60]["episodes"]) >= int(rows[59]["episodes"]) > 0
    saved = torch.load(savedir / "a" / "model.tar", weights_only=True)
    assert saved["scheduler_state_dict"]["last_epoch"] == 90
    # The new rate and the new end count from where the run was.
    assert float(rows[60]["learning_rate"]) == pytest.approx(0.0003 * (1 - 600 / 900))

    meta = json.loads((savedir / "a" / "meta.json").read_text())
    assert (meta["first_step"], meta["last_step"]) == (600, 900)
    assert (meta["args"]["env"], meta["args"]["total_steps"]) == ("CartPole-v1", 900)
    assert (meta["exit_status"], meta["error"]) == (0, None)


def test_flags_that_a_checkpoint_lacks_has_or_can_not_have(savedir):
    """Checkpoints of forks, and of another machine."""
    runs.run(savedir, "a", **runs.SMALL, num_buffers=7)
    path = savedir / "a" / "model.tar"
    saved = torch.load(path, weights_only=True)
    assert {"learner_device", "max_restarts"}.isdisjoint(saved["flags_left_open"])
    del saved["flags"]["noop_max"]
    saved["flags"] |= {"curiosity": 0.5}
    # Typed, but the environments alone need 9 buffers now.
    torch.save(saved, path)
    output = runs.run(savedir, "a", num_actors=3, total_steps=700)
    assert "--noop_max None -> 30" in output
    assert "--num_actors 2 -> 3" in output
    assert "--num_buffers 7 -> 12" in output
    assert runs.read_logs(savedir, "a")[-1]["step"] == "700"

    before = path.read_bytes()
    output = fails(savedir, "a", use_lstm=True, total_steps=800)
    assert "core.weight_ih_l0" in output
    assert "size mismatch for policy.weight" in output
    output = fails(savedir, "a", env="environments:GridWorld", total_steps=800)
    assert (
        "torch.Size([1, 131]) from checkpoint, the shape in current model is" in output
    )
    assert path.read_bytes() == before


def test_sync_refuses_flags_that_break_the_promise(savedir):
    flags = {**SYNC, "total_steps": 60}
    runs.run(savedir, "a", **flags)
    output = fails(savedir, "a", num_actors=3, total_steps=120)
    assert "can't change --num_actors 2 -> 3" in output
    runs.run(savedir, "a", total_steps=120)
    assert len(runs.read_logs(savedir, "a")) == 12
    runs.run(savedir, "b", **{**runs.SMALL, "total_steps": 60})
    output = fails(savedir, "b", sync=True, total_steps=120)
    assert "a run that was saved with --sync" in output


@pytest.fixture
def pong(savedir):
    """A run on Pong with hardly any training, and flags for a short test of it."""
    layout = {"num_actors": 1, "envs_per_actor": 2, "batch_size": 2}
    runs.run(savedir, "a", **layout, env="Pong-v4", unroll_length=5, total_steps=20)
    return {"num_test_episodes": 1, "max_episode_frames": 200}


@pytest.mark.skipif(not shutil.which("Xvfb"), reason="needs Xvfb for a display")
def test_render_shows_a_window(savedir, pong, tmp_path, monkeypatch):
    xvfb = ["Xvfb", "-displayfd", "1", "-screen", "0", "640x480x24"]
    with subprocess.Popen(
        [*xvfb, "-fbdir", str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as display:
        try:
            assert display.stdout is not None
            monkeypatch.setenv("DISPLAY", f":{display.stdout.readline().strip()}")
            process = runs.start(savedir, "a", **pong, mode="test_render")
            screen = tmp_path / "Xvfb_screen0"  # what the display shows, all of it
            colours: set[int] = set()
            while process.poll() is None and len(colours) < 4:
                colours |= set(screen.read_bytes()[-640 * 480 * 4 :: 97])
                time.sleep(0.05)
            output = runs.finish(process)
        finally:
            display.terminate()
    assert process.returncode == 0, output
    assert len(colours) >= 4, "nothing was drawn"


def test_sync_without_checkpoints_needs_no_state_of_games(tmp_path):
    """Native Atari environments can't save theirs."""
    flags = {**runs.SMALL, "env": "PongNoFrameskip-v4", "envs_per_actor": 2}
    flags |= {"sync": True, "disable_checkpoint": True, "total_steps": 40}
    runs.run(tmp_path, "sync", **flags)
    assert len(runs.read_logs(tmp_path, "sync")) == 4
    assert not (tmp_path / "sync" / "model.tar").exists()
