import gzip
import json
import os
import pathlib
import subprocess
import sys

import ale_py
import numpy as np
import pytest
import runs
from test_files import FileWriter

from torchbeast.extras.code import differences
from torchbeast.tools import report
from torchbeast.tools.groups import iqm_interval
from torchbeast.tools.saved_runs import read_run

ROOT = pathlib.Path(__file__).parents[2]
FLAGS = {
    "env": "MinAtar/Breakout-v1",
    "preset": "minatar",
    "entropy_cost": 0.05,
    "reward_clipping": "none",
    "seed": 3,
}


def make_run(savedir, xpid="a", flags=FLAGS):
    about = {"preset_changes": differences(flags), "git": {"commit": "0123"}}
    writer = FileWriter(str(savedir), xpid, flags, about=about)
    for step, games, mean in ((1000, 0, None), (2000, 7, 0.5), (3000, 250, 1.25)):
        writer.log({"step": step, "games": games, "mean_game_return_100": mean})
    writer.close(exit_status=0)
    return writer.path


def row_of(path):
    return report.table_row(read_run(path))


def edit_meta(path, **changes):
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | changes))


def test_the_row_of_a_run(tmp_path):
    path = make_run(tmp_path)
    edit_meta(
        path,
        git={"commit": "0123456789abcdef", "dirty": True},
        hardware={"cpu": "Some CPU", "cpus": 2, "gpus": ["Some GPU"]},
    )
    row = row_of(path)
    assert row == {
        "run": "a",
        "protocol": "MinAtar/Breakout-v1, sticky_actions 0.1, full_action_space False, "
        "reward_clipping none",
        "preset": "minatar --entropy_cost 0.05",
        "seed": "3",
        "commit": "0123456 + changes",
        "steps": "3,000",
        "test, mean ± std": "",
        "return, last 100 games": "1.25",
        "largest fall": "0%",
        "wall-clock": row["wall-clock"],
        "hardware": "2 × Some CPU, Some GPU",
    }
    test = {"mean": 2.5, "std": 0.75, "num_games": 200, "policy": "greedy"}
    (path / "test.json").write_text(json.dumps(test))
    tested = row_of(path)["test, mean ± std"]
    assert tested == "2.50 ± 0.75 (200 games, greedy)"
    (path / "test.json").write_text(json.dumps(test | {"step": 3000, "flags": FLAGS}))
    assert row_of(path)["test, mean ± std"] == tested
    other = FLAGS | {"env_kwargs": '{"sticky_action_prob": 0.25}'}
    other = {"step": 2000, "flags": other}
    (path / "test.json").write_text(json.dumps(test | other))
    assert row_of(path)["test, mean ± std"] == (
        "2.50 ± 0.75 (200 games, greedy, **at step 2,000**, **other protocol: "
        "MinAtar/Breakout-v1, sticky_actions 0.25, full_action_space False, "
        "reward_clipping none**)"
    )


def test_the_command_prints_a_table(tmp_path):
    make_run(tmp_path)
    b = make_run(tmp_path, "b", {"env": "a|b"})
    done = subprocess.run(
        [*(sys.executable, "-m", "torchbeast.report", "a", b), "--savedir", tmp_path],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=runs.patience(60),
        check=True,
    )
    header, line, first, second = done.stdout.splitlines()
    assert header.startswith("| run | protocol | preset | seed | commit |")
    assert "test" not in header  # no run was tested
    assert line.count("---") == header.count("|") - 1
    assert first.startswith("| a | MinAtar/Breakout-v1, sticky_")
    assert second.startswith("| b | a\\|b |  |")


def test_the_results_of_the_docs_have_rows():
    folders = [path.parent for path in (ROOT / "docs/results").glob("*/meta.json")]
    assert len(folders) > 5
    for folder in folders:
        row = row_of(folder)
        assert row["commit"]
        assert row["wall-clock"] > "0:00:05"


@pytest.mark.parametrize(
    ("test", "message"),
    [(None, "no run 'b'"), ("{", "test.json is damaged"), ('{"a": 1}', "KeyError")],
)
@pytest.mark.parametrize("more", [[], ["--group"]])
def test_errors(tmp_path, capsys, test, message, more):
    path = make_run(tmp_path)
    if test is not None:
        (path / "test.json").write_text(test.replace("a", "policy" if more else "a"))
    words = ["b" if test is None else "a", "--savedir", str(tmp_path), *more]
    with pytest.raises(SystemExit, match="2"):
        report.main(words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["cut", "row"])
def test_damaged_logs(tmp_path, capsys, damage):
    path = make_run(tmp_path)
    logs = path / "logs.csv"
    if damage == "cut":
        packed = gzip.compress(logs.read_bytes())
        (path / "logs.csv.gz").write_bytes(packed[: len(packed) // 2])
        logs.unlink()
    else:
        header, first, *others = logs.read_text().splitlines()
        logs.write_text("\n".join([header, first + ",1", *others]) + "\n")
    with pytest.raises(SystemExit, match="2"):
        report.main([str(path), "--savedir", str(tmp_path)])
    assert "is damaged: " in capsys.readouterr().err


# --- Groups ---

stats = pytest.importorskip("scipy.stats")
SCORES = {"MinAtar/Breakout-v1": [1, 11], "CartPole-v1": [0, 500]}


def make_group(savedir, name, returns, **flags):
    """Runs of 200 steps that have half of their return at step 100."""
    names = []
    for seed, value in enumerate(returns, start=1):
        names.append(f"{name}-{seed}")
        writer = FileWriter(str(savedir), names[-1], FLAGS | flags | {"seed": seed})
        for step, mean in ((50, None), (100, value / 2), (200, value)):
            writer.log({"step": step, "mean_game_return_100": mean})
        writer.close(exit_status=0)
    return names


def table(capsys, *words):
    """The rows that the command prints, as dicts."""
    report.main([str(word) for word in words])
    header, _, *rows = capsys.readouterr().out.splitlines()
    split = [[cell.strip() for cell in row.split("|")[1:-1]] for row in (header, *rows)]
    return [dict(zip(split[0], row, strict=True)) for row in split[1:]]


def test_a_row_per_group(tmp_path, capsys):
    a = make_group(tmp_path, "a", [1.0, 2.0, 30.0, 4.0, 5.0])
    b = make_group(tmp_path, "b", [3.0])
    more = ["--savedir", tmp_path, "--group", "--at", "100", "150"]
    FileWriter(str(tmp_path), "a-6", FLAGS).close(0)  # it has just begun
    first, second = table(capsys, *a, "a-6", *b, *more)
    low, high = iqm_interval([np.array([1.0, 2.0, 30.0, 4.0, 5.0])])
    middle = stats.trim_mean([1, 2, 30, 4, 5], 0.25)
    assert first == {
        "group": "a",
        "task": "MinAtar/Breakout-v1",
        "runs": "5 (1 without a return left out)",
        "steps": "200",
        "IQM at 100 [95 %]": f"{middle / 2:.2f} [{low / 2:.2f}, {high / 2:.2f}]",
        "IQM at 150 [95 %]": f"{middle / 2:.2f} [{low / 2:.2f}, {high / 2:.2f}]",
        "IQM at the end [95 %]": f"{middle:.2f} [{low:.2f}, {high:.2f}]",
        "largest fall": "0%",
    }
    # One run has no interval.
    assert second["IQM at the end [95 %]"] == "3.00"


def test_tests_falls_and_seeds_of_tuning(tmp_path, capsys):
    """The tests of all runs are the headline; runs that were tuned on don't count."""
    names = make_group(tmp_path, "a", [9.0, 1.0, 2.0])
    with (tmp_path / "a-3" / "logs.csv").open("a") as file:
        file.write((tmp_path / "a-3" / "logs.csv").read_text().splitlines()[2] + "\n")
    more = ["--savedir", tmp_path, "--group", "--tuned_on", "1", "7"]
    (row,) = table(capsys, *names, *more)
    assert row["runs"] == "2 (1 of tuning left out)"
    assert row["largest fall"] == "50%"  # from 2 to 1
    assert row["IQM at the end [95 %]"] == "1.00 [1.00, 1.00]"
    assert "IQM of tests [95 %]" not in row
    test = {"std": 1.0, "num_games": 100, "policy": "sampled"}
    for name, mean in zip(names, (50.0, 3.0, 5.0), strict=True):
        (tmp_path / name / "test.json").write_text(json.dumps({**test, "mean": mean}))
    (row,) = table(capsys, *names, *more)
    assert row["IQM of tests [95 %]"] == "4.00 [3.00, 5.00]"
    for change in {"step": 7}, {"policy": "greedy"}:  # of one of the two
        changed = {**test, "mean": 5.0, **change}
        (tmp_path / names[2] / "test.json").write_text(json.dumps(changed))
        (row,) = table(capsys, *names, *more)
        assert "IQM of tests [95 %]" not in row
    with pytest.raises(SystemExit):
        report.main([*names, *map(str, more), "2", "3"])
    assert "all seeds are of --tuned_on" in capsys.readouterr().err


def test_scores_of_every_atari_game():
    scores = report.read_references(pathlib.Path("atari"))
    games = {f"Atari {game}" for game in ale_py.roms.get_all_rom_ids()}
    assert len(scores.keys() & games) == len(scores) == 57
    assert all(low < high for low, high in scores.values())


def test_on_a_terminal_it_is_aligned():
    rows = [{"run": "a", "x": "", "seed": "1"}, {"run": "abc", "x": "", "seed": "1"}]
    assert report.aligned(rows) == "seed: 1\nrun\na  \nabc"
    more = [rows[0] | {"y": "22"}, rows[1] | {"y": "3"}]
    assert report.aligned(more) == "seed: 1\nrun  y \na    22\nabc  3 "
    wide = [rows[0] | {"y": "2" * 70}, rows[1] | {"y": "3"}]
    assert report.aligned(wide) == f"seed: 1\na: {'2' * 70}\nabc: 3\nrun\na  \nabc"


def test_methods_over_several_tasks(tmp_path, capsys):
    (tmp_path / "scores.json").write_text(json.dumps(SCORES))
    one = make_group(tmp_path, "one-breakout", [6.0, 11.0, 16.0])
    one += make_group(tmp_path, "one-pole", [100.0, 250.0], env="CartPole-v1")
    two = make_group(tmp_path, "two", [1.0, 1.0])
    words = ["--savedir", tmp_path, "--method", "one", *one, "--method", "two", *two]
    scores = ["--scores", tmp_path / "scores.json"]
    breakout, pole, both, other = table(capsys, *words, *scores)
    assert breakout["IQM at the end [95 %]"].startswith("11.00 [6.00, 16.00]")
    assert pole["IQM at the end [95 %]"].startswith("175.00 [")
    middle = stats.trim_mean([0.5, 1.0, 1.5, 0.2, 0.5], 0.25)
    assert both["task"] == "all 2, normalised"
    assert both["runs"] == "3 + 2"
    assert both["IQM at the end [95 %]"].startswith(f"{middle:.2f} [")
    assert other["group"] == "two"
    assert len(table(capsys, *words)) == 3  # no references, so no row over all tasks
    # A method may be given in parts.
    words = ["--savedir", tmp_path, "--method", "one", *one[:2], "--method", "one"]
    assert table(capsys, *words, *one[2:], *scores) == [breakout, pole, both]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a-1", "--group", "--at", "201"], "'a-1' ends before step 201"),
        (["a-1", "--group", "--at", "50"], "'a-1': no game has ended until then"),
        (["a-1", "--method", "m", "b-1"], "give either runs, or --method"),
        (["--method", "m"], "m has no return yet"),
        (["--method", "m", "a-1", "c-1"], "have different protocols"),
        (["--method", "m", "a-1", "b-1", "--scores", "{}"], "has no 'MinAtar/Break"),
        (["--method", "m", "a-1", "--scores", "[1]"], "two returns per task, such as"),
        (["--method", "m", "a-1", "--scores", '{"a": [1, 1]}'], "numbers that differ"),
    ],
)
def test_groups_that_can_not_be_compared(tmp_path, capsys, words, message):
    make_group(tmp_path, "a", [1.0])
    make_group(tmp_path, "b", [1.0], env="CartPole-v1")
    make_group(tmp_path, "c", [1.0], reward_clipping="abs_one")
    if "--scores" in words:
        (tmp_path / "scores").write_text(
            words[-1].replace("{}", '{"CartPole-v1": [0, 1]}')
        )
        words = [*words[:-1], str(tmp_path / "scores")]
    with pytest.raises(SystemExit, match="2"):
        report.main([*words, "--savedir", str(tmp_path)])
    assert message in capsys.readouterr().err
