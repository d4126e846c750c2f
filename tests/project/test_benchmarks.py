"""The benchmarks, run for seconds: do they measure the right thing?"""

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import exact_run
import numpy as np
import pytest
import regression
import runs
import study
import throughput

ROOT = Path(__file__).resolve().parents[2]


def test_windows_sps_follows_the_updates_and_not_the_windows():
    # An update of 640 steps every 0.8 s, seen through windows of 1 s.
    ticks = np.array([(100 + 0.8 * i, 640.0 * i) for i in range(20)])
    sps = throughput.windows_sps(ticks, start=101.3, end=109.7, seconds=1.0)
    assert sps.shape == (8,)
    np.testing.assert_allclose(sps, 800.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "word"), [("monobeast", "wait"), ("polybeast", "Bottleneck")]
)
def test_throughput_of_a_short_run_is_sane(tmp_path, variant, word):
    if variant == "polybeast":
        pytest.importorskip("libtorchbeast", exc_type=ImportError)
    path = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "throughput.py")]
    command += ["--variants", variant, "--precisions", "fp32"]
    command += ["--seconds", "3", "--window", "1"]
    command += ["--warm_up", "1", "--part_seconds", "0.3", "--json", str(path), "--"]
    command += ["--env", "CartPole-v1", "--num_actors", "2", "--envs_per_actor", "3"]
    command += ["--batch_size", "6", "--unroll_length", "5"]  # win over the contract's
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=runs.patience(200)
    )
    assert done.returncode == 0, done.stdout + done.stderr

    report = json.loads(path.read_text())
    assert report["layout"]["num_actors"] == 2
    (run,) = report["runs"][f"{variant} fp32"]
    cores = report["machine"]["cores"]
    parts = [run[name] for name in ("environment", "acting", "learning")]
    assert all(0.001 < part < 100 for part in parts)
    assert run["bound"] == pytest.approx(1e3 * cores / sum(parts))
    assert 0 < run["sps_low"] <= run["sps"] <= run["sps_high"]
    assert run["share"] == pytest.approx(100 * run["sps"] / run["bound"])
    # On a busy machine the parts may be measured at a worse time than the run. A wrong
    # unit would still be seen.
    assert run["share"] < 10_000
    assert 0 < run["cores_used"] < cores + 0.5
    per_step = run["learner_cpu"] + run["actors_cpu"]
    assert 0.25 < run["cores_used"] / (run["sps"] * per_step / 1e3) < 4
    assert 50 < run["memory"] < 4000
    assert word in run["waited"]
    assert run["status"] == 130


def test_study_compares_settings_and_keeps_finished_runs(tmp_path, capsys):
    file, out = tmp_path / "study.txt", tmp_path / "out"
    slow = "monobeast --preset classic-control --total_steps 2560  # all\n\n"
    slow += "slow: --momentum 0\n"
    file.write_text(slow)
    assert study.main([str(file), "--out", str(out)]) == 0
    logs = (out / "slow-1" / "logs.csv").read_bytes()
    file.write_text(slow + "still: --learning_rate 0\n")
    assert study.main([str(file), "--out", str(out)]) == 0
    assert (out / "slow-1" / "logs.csv").read_bytes() == logs
    header, _, *lines = (out / "table.md").read_text().splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == ["| slow", "| still"]
    assert "`--learning_rate 0`" in lines[1]
    assert header.count("|") == lines[0].count("|")
    for name in ("slow", "still"):
        curve = study.read_curve(out / f"{name}-1")
        assert curve[-1]["step"] == 2560
        assert len((out / "curves" / f"{name}-1.csv").read_text().splitlines()) > 5
        assert (
            curve[-1]["mean_game_return_100"] > 5
        )  # steps a random policy keeps it up
    shutil.rmtree(out / "slow-1")  # its curve is enough
    table = (out / "table.md").read_text()
    assert study.main([str(file), "--out", str(out)]) == 0
    assert (out / "table.md").read_text() == table
    assert not (out / "slow-1").exists()
    file.write_text(slow.replace("2560", "2561"))
    assert study.main([str(file), "--out", str(out)]) == 1
    assert "slow-1.csv ends at step 2560, not 2561" in capsys.readouterr().err


def test_regression_compares_with_the_stored_scores(tmp_path, monkeypatch, capsys):
    flags = ["--preset", "classic-control", "--total_steps", "2560"]
    monkeypatch.setitem(regression.CASES, "cartpole", flags)
    stored = tmp_path / "stored.json"

    def check(name, *arguments):
        out = str(tmp_path / name)
        few = ["--cases", "mono-cartpole", "--stored", str(stored), "--out", out]
        status = regression.main([*few, *arguments])
        return status, capsys.readouterr().out

    assert check("a", "--store", "--seeds", "1", "2")[0] == 0
    content = json.loads(stored.read_text())
    assert len(content["mono-cartpole"]["scores"]) == 2
    assert all(5 < x < 100 for x in content["mono-cartpole"]["scores"])
    content["mono-cartpole"]["scores"] = [400.0 + x for x in range(60)]
    stored.write_text(json.dumps(content))
    status, said = check("b", "--seeds", "1", "--broken", "bootstrap")
    assert status == 1
    assert "; FAILED: p = 0.016 against 429.5 of 60 stored seeds" in said
    content["mono-cartpole"]["flags"] = ["--preset", "other"]
    assert regression.verdict("mono-cartpole", [1.0], content).startswith("new: ")


def test_a_permutation_test_against_all_orders():
    """The share of all orders whose first scores are as low, counted one by one."""
    new, stored = [1.0, 5.0], [2.0, 2.0, 7.0, 3.0]
    orders = list(itertools.permutations([*new, *stored]))
    low = sum(order[0] + order[1] <= 6.0 for order in orders)
    assert regression.p_value(new, stored) == pytest.approx(low / len(orders))
    assert regression.p_value([0.0, 0.1, 0.2, 0.3], range(1, 9)) == 1 / 495
    assert regression.p_value([3.0], [3.0]) == 1.0


def test_a_repeated_run_is_held_against_each_digit_of_the_kept_one():
    names = ("step", "total_loss", "mean_game_return_100")
    kept = [dict(zip(names, (str(i), "2", "20"), strict=True)) for i in range(12)]
    meta = {"sha256": exact_run.checksum(kept, names), "digits": exact_run.kind()}
    newer = [row | {"a_new_column": "1"} for row in kept]
    nearly, far = ([kept[0] | {"total_loss": x}, *kept[1:]] for x in ("2.001", "2.1"))
    found = newer, nearly, far, [*kept[:11], kept[11] | {"mean_game_return_100": "9"}]
    assert [exact_run.judge(x, kept, meta)[0] for x in found] == [True, *[False] * 3]
    meta["digits"] = "another PyTorch"
    assert [exact_run.judge(x, kept, meta)[0] for x in found] == [True] * 2 + [
        False
    ] * 2
