"""The benchmarks, run for seconds: do they measure the right thing?"""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import broken
import cpu_time
import keep_run
import numpy as np
import pytest
import regression
import runs
import study
import throughput
import tmaze
import torch
from gymnasium.utils import env_checker
from limits import Costs, Line

from torchbeast.core import vtrace
from torchbeast.tools import trial

ROOT = Path(__file__).resolve().parents[2]


def test_windows_sps_follows_the_updates_and_not_the_windows():
    # An update of 640 steps every 0.8 s, seen through windows of 1 s.
    ticks = np.array([(100 + 0.8 * i, 640.0 * i) for i in range(20)])
    sps = throughput.windows_sps(ticks, start=101.3, end=109.7, seconds=1.0)
    assert sps.shape == (8,)
    np.testing.assert_allclose(sps, 800.0)


def test_read_ticks_leaves_out_an_unfinished_line(tmp_path):
    path = tmp_path / "logs.csv"
    assert trial.read_ticks(tmp_path).shape == (0, 2)
    path.write_text("_tick,_time,step,total_loss\n0,10.5,640,1.0\n1,11.5,1280,")
    np.testing.assert_array_equal(trial.read_ticks(tmp_path), [[10.5, 640.0]])


def test_process_tree_and_memory_see_grandchildren():
    # The shell's child holds 64 MiB and says so.
    hold = "x = b'x' * (64 << 20); print(len(x), flush=True); input()"
    process = subprocess.Popen(
        ["sh", "-c", f'{sys.executable} -c "{hold}"; true'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == f"{64 << 20}\n"
        tree = cpu_time.process_tree(process.pid)
        assert len(tree) == 2
        assert sum(tree.values()) > 0
        assert 64 < throughput.proportional_set_size(list(tree)) < 128
    finally:
        process.communicate("\n")


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


def test_transport_counts_what_goes_through(tmp_path):
    """Each observation is copied once by the server and once into its rollout."""
    pytest.importorskip("libtorchbeast", exc_type=ImportError)
    import transport

    result = transport.measure_ours("unix", 2, 3, 0.5, str(tmp_path))
    step = int(np.prod(transport.FRAME)) + 4 + 1 + 8 + 4
    assert result["steps_per_second"] > 0
    assert result["server_copied_bytes"] == pytest.approx(step, rel=0.1)
    # And one row of every rollout into the next; what the agent says besides.
    into_rollouts = step * (1 + 1 / transport.UNROLL_LENGTH)
    assert result["pool_copied_bytes"] == pytest.approx(into_rollouts, rel=0.1)
    assert 3 <= result["mean_inference_batch"] <= 6
    assert min(result["client_cpu_us"], result["server_cpu_us"]) > 0


@pytest.mark.timeout(240)  # three starts of a run
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
    file.write_text("monobeast\nslow --learning_rate 0\n")
    assert study.main([str(file), "--out", str(out)]) == 1
    assert "expected 'NAME: FLAGS', got 'slow --learning_rate 0'" in (
        capsys.readouterr().err
    )


@pytest.mark.timeout(240)  # three runs
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
    with pytest.raises(SystemExit):
        check("b")  # would mix the runs of two commits
    with pytest.raises(SystemExit):
        check("c", "--store", "--broken", "rho")


@pytest.mark.parametrize("fault", broken.FAULTS)
def test_each_fault_changes_the_targets(fault):
    shape = (4, 3)
    tensors = [torch.randn(shape), torch.full(shape, 0.9), torch.randn(shape)]
    tensors += [torch.randn(shape), torch.randn(3)]
    sound = vtrace.from_importance_weights(*tensors)
    faulty = broken.broken(fault)(*tensors)
    assert not torch.allclose(sound.vs[-1], faulty.vs[-1]) or fault == "lambda"
    assert not torch.allclose(sound.vs[0], faulty.vs[0])


@pytest.mark.timeout(120)
def test_policy_moves_measures_a_run(tmp_path):
    words = "policy_moves.py --preset minatar --disable_checkpoint --xpid moves"
    more = f"--total_steps 3200 --clip_ratio inf --savedir {tmp_path}"
    script, *flags = f"{words} {more}".split()
    out = runs.run_words([sys.executable, str(ROOT / "benchmarks" / script), *flags])
    rows = runs.read_logs(tmp_path, "moves")
    assert all(0 < float(row["kl_batch"]) < 10 for row in rows)
    largest = max(float(row["kl_batch"]) for row in rows[1:])
    (line,) = [x for x in out.splitlines() if x.startswith("| as it was |")]
    repeated = [float(x) for x in line.split("|")[2].split(",")]
    assert repeated[-1] == pytest.approx(largest, abs=1e-3)
    assert repeated == sorted(repeated)


def test_the_t_maze_rewards_the_turn_that_was_shown():
    env = tmaze.TMaze(length=3)
    checked = env_checker.check_env(env, skip_render_check=True)
    assert checked is None
    for seed in range(6):
        first, _ = env.reset(seed=seed)
        turn = tmaze.LEFT if first[0] else tmaze.RIGHT
        rewards = [env.step(tmaze.LEFT)[1]]  # a wall
        rewards += [env.step(tmaze.FORWARD)[1] for _ in range(3)]
        observation, reward, over, truncated, _ = env.step(turn)
        assert rewards == [-0.1, 0, 0, 0]
        assert (reward, over, truncated) == (1.0, True, False)
        assert observation.tolist() == [0, 0, 0, 1]
    env.reset()
    ends = [env.step(tmaze.FORWARD)[2:4] for _ in range(12)]
    assert ends == [(False, False)] * 11 + [(False, True)]


def test_scale_grows_until_a_part_of_the_learner_is_the_limit(capsys):
    pytest.importorskip("libtorchbeast", exc_type=ImportError)
    import scale

    costs = Costs(Line(1e-4, 1e-3), 0.0, Line(1e-3, 1e-5), 1e-5, 1e-5, 2e-6)
    args = argparse.Namespace(machine_cores=4, envs=8, gbits=1.0)
    found = list(scale.predict(costs, 2.0, 1e4, args))
    speeds = [min(x["limits"].values()) for x in found]
    # 4 cores with a stream each: 8 steps take 8.1 ms there, and 1.08 in inference.
    assert speeds[0] == pytest.approx(4 * 8 / 9.18e-3, rel=1e-2)
    assert speeds[1] == pytest.approx(2 * speeds[0], rel=0.1)
    assert speeds[-2:] == [1e9 / 8 / 1e4] * 2  # the network
    args.gbits = 1000.0
    found = list(scale.predict(costs, 2.0, 1e4, args))[-1]["limits"]
    assert min(found, key=found.get) == "cores"
    assert found["cores"] < 2 / (1e-5 + 1e-5 + 2e-6)
    assert "1,000 machines" in capsys.readouterr().out
    cart_pole = scale.row_bytes(["--env", "CartPole-v1"])
    assert 4 * 4 < cart_pole < 100 < 4 * 84 * 84 < scale.row_bytes([])


def test_lagged_weights_are_exactly_so_old(tmp_path):
    file = tmp_path / "study.txt"
    flags = "--sync --preset classic-control --updates_per_batch 1 --num_actors 2"
    sizes = "--envs_per_actor 4 --batch_size 8 --unroll_length 4 --total_steps 640"
    file.write_text(f"lagged.py {flags} {sizes}\nlag: --lag 3\n")
    assert study.main([str(file), "--out", str(tmp_path / "out")]) == 0
    rows = runs.read_logs(tmp_path / "out", "lag-1")
    # Row 0 of a rollout is of the round before: one version older, one of four rows.
    lags = [float(row["policy_lag"]) for row in rows]
    assert lags[:4] == pytest.approx([0, 1, 2, 3])
    assert lags[4:] == pytest.approx([3.25] * 16)


def test_a_permutation_test_against_all_orders():
    """The share of all orders whose first scores are as low, counted one by one."""
    new, stored = [1.0, 5.0], [2.0, 2.0, 7.0, 3.0]
    orders = list(itertools.permutations([*new, *stored]))
    low = sum(order[0] + order[1] <= 6.0 for order in orders)
    assert regression.p_value(new, stored) == pytest.approx(low / len(orders))
    assert regression.p_value([0.0, 0.1, 0.2, 0.3], range(1, 9)) == 1 / 495
    assert regression.p_value([3.0], [3.0]) == 1.0


def test_keep_run_keeps_every_evaluation():
    rows = [[str(i), str(i) if i % 7 == 1 else ""] for i in range(100)]
    kept = keep_run.thin(["step", "eval_return"], rows, 5)
    assert [row[1] for row in kept if row[1]] == [str(i) for i in range(1, 100, 7)]
    assert {row[0] for row in kept if not row[1]} <= {"0", "25", "50", "74", "99"}
    assert keep_run.thin(["step"], [["1"]], 5) == [["1"]]
