import gzip
import json
import tracemalloc

import numpy as np
import pytest
from test_files import FileWriter

from torchbeast.tools import plot
from torchbeast.tools.groups import group_name
from torchbeast.tools.saved_runs import find_runs, read_run


def make_run(savedir, xpid, returns, flags=None, **columns):
    """A run with `returns` (None: no game ended) every 15 steps of 4 frames."""
    writer = FileWriter(str(savedir), xpid, flags or {})
    for tick, value in enumerate(returns):
        row = {"step": 15 * tick, "frames": 60 * tick, "mean_game_return": value}
        writer.log(row | {name: values[tick] for name, values in columns.items()})
    writer.close(exit_status=0)
    return writer.path


@pytest.mark.parametrize("window", [1, 3, 6, 11, 100])
def test_moving_average(window):
    values = np.random.default_rng(0).normal(size=11) * 1000
    expected = [
        sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window)
        for i in range(len(values))
    ]
    np.testing.assert_allclose(plot.moving_average(values, window), expected)


def test_curve_skips_rows_without_a_value(tmp_path):
    path = make_run(tmp_path, "run", [None, 1.0, None, 5.0, float("nan"), 6.0])
    run = read_run(path)
    result = plot.curve(run, "step", "mean_game_return", smooth=2)
    assert result.name == "run"
    assert result.x.tolist() == [15, 45, 75]
    assert result.raw.tolist() == [1, 5, 6]
    assert result.y.tolist() == [1, 3, 5.5]
    frames = plot.curve(run, "frames", "mean_game_return", smooth=2)
    assert frames.x.tolist() == [60, 180, 300]


def test_a_compressed_log_reads_as_the_plain_one(tmp_path):
    path = make_run(tmp_path, "run", [2.0, None, 4.0])
    plain = read_run(path)
    logs = path / "logs.csv"
    (path / "logs.csv.gz").write_bytes(gzip.compress(logs.read_bytes()))
    logs.unlink()
    assert find_runs("run", tmp_path) == [path]
    assert find_runs("r*", tmp_path) == [path]  # not what is no run
    for name, column in read_run(path).columns.items():
        np.testing.assert_array_equal(column, plain.columns[name])


def test_a_long_log_takes_little_more_memory_than_its_numbers(tmp_path):
    header, rows = "step,,b", [f"{i},,{i / 7}" for i in range(60_000)]
    rows[11_111] = ",a word,"
    (tmp_path / "logs.csv").write_text("\n".join([header, *rows, ""]))
    tracemalloc.start()
    columns = read_run(tmp_path, {"b", ""}).columns
    assert tracemalloc.get_traced_memory()[1] < 12e6
    tracemalloc.stop()
    expected = [i / 7 for i in range(60_000)]
    expected[11_111] = np.nan
    np.testing.assert_array_equal(columns["b"], expected)
    assert np.isnan(columns.pop("")).all()
    assert columns.keys() == {"b"}


def test_a_curve_of_evaluations_is_at_the_steps_of_their_weights(tmp_path):
    rows = [
        "0,0.0,0,0,,",
        "1,3600.0,10,40,,",
        "2,7200.0,20,80,10,5",
        "3,9000.0,30,120,,",
    ]
    header = "_tick,_time,step,frames,eval_step,eval_return"
    (tmp_path / "logs.csv").write_text("\n".join([header, *rows, ""]))
    run = read_run(tmp_path)
    for axis, x in (("step", 10), ("frames", 40), ("time", 1.0)):
        result = plot.curve(run, axis, "eval_return", smooth=1)
        assert (result.x.tolist(), result.y.tolist()) == ([x], [5])


def test_the_time_of_a_resumed_run_has_no_pauses(tmp_path):
    """Two starts of an hour each, with a day in between."""
    lines = ["_tick,_time,step,loss", "0,1800,15,1", "1,3600,30,2"]
    lines += ["2,91800,45,3", "3,93600,60,4"]
    (tmp_path / "logs.csv").write_text("\n".join(lines) + "\n")
    dates = {"date_start": "1970-01-01T00:00:00+00:00"}
    dates["resumed"] = ["1970-01-02T01:00:00+00:00"]
    (tmp_path / "meta.json").write_text(json.dumps(dates))
    result = plot.curve(read_run(tmp_path), "time", "loss", smooth=1)
    assert result.x.tolist() == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("last", ["2,3.", "2,3.5,30", "x,y,z,text\n", "\n"])
def test_a_line_that_is_being_written_is_left_out(tmp_path, last):
    text = "_tick,_time,step,loss\n0,1.0,0,7\n1,2.0,15,8\n"
    (tmp_path / "logs.csv").write_text(text + last)
    result = plot.curve(read_run(tmp_path), "step", "loss", smooth=1)
    assert result.x.tolist() == [0, 15]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("pong-seed1", "pong"),
        ("pong_4", "pong"),
        ("pong5", "pong5"),
        ("v5-deep-2", "v5-deep"),
        ("lr0.001", "lr0.001"),
        ("lr=0.001-2", "lr=0.001"),
    ],
)
def test_group_name(name, group):
    assert group_name(name) == group


def test_group_curves():
    x = np.array([0.0, 10.0, 20.0, 30.0])
    one = plot.Curve("a-1", x, 2 * x)
    two = plot.Curve("a-2", x[1:] + 5, 4 * (x[1:] + 5))
    other = plot.Curve("b-1", x, x)
    both, alone = plot.group_curves([one, other, two])
    assert alone == other
    assert both.name == "a (2 runs, mean ± std)"
    assert both.x[0] == 15  # Where both have values
    assert both.x[-1] == 30
    np.testing.assert_allclose(both.y, 3 * both.x)
    np.testing.assert_allclose(both.low, 2 * both.x)  # std of 2x and 4x is x
    np.testing.assert_allclose(both.high, 4 * both.x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope*"], "Runs in {savedir} (--savedir): a, b, c, d."),
        (["a", "--y", "retrun"], "Its columns: _tick, _time, step, frames, mean_game_"),
        (["b", "d"], "there is nothing to draw yet"),
        (["a", "--smooth", "0"], "0 is not from 1 to 1,000,000"),
        (["c"], "meta.json of c is damaged"),
        (["c", "--x", "time"], "meta.json of c is damaged"),
        (["a", "--out", "{savedir}/none/x.png"], "No such file or directory"),
        (["a", "--out", "{savedir}/x.foo"], "'foo' is not supported"),
    ],
)
def test_errors(tmp_path, capsys, arguments, message):
    pytest.importorskip("matplotlib")
    make_run(tmp_path, "a", [1.0, 2.0])
    make_run(tmp_path, "b", [None, None])
    make_run(tmp_path, "d", [])
    damaged = {"env": "x", "env_kwargs": "[" * 9000}
    damaged = json.dumps({"args": damaged, "date_start": 7})
    (make_run(tmp_path, "c", [1.0, 2.0]) / "meta.json").write_text(damaged)
    arguments = [argument.format(savedir=tmp_path) for argument in arguments]
    with pytest.raises(SystemExit, match="2"):
        plot.main([*arguments, "--savedir", str(tmp_path)])
    assert message.format(savedir=tmp_path) in capsys.readouterr().err


# --- Protocols ---

PONG = {"env": "Pong-v4", "sticky_actions": 0.0, "life_loss": True, "seed": 1}


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws runs by their names; returns the texts of the title and the legend."""
    figure = pytest.importorskip("matplotlib.figure")
    texts = []

    class Figure(figure.Figure):
        def savefig(self, *arguments, **options):
            texts.append(self._suptitle.get_text())
            texts.extend(t.get_text() for x in self.legends for t in x.get_texts())

    monkeypatch.setattr(figure, "Figure", Figure)

    def draw(*arguments):
        plot.main([*arguments, "--savedir", str(tmp_path)])
        return texts

    return draw


def test_the_legend_says_what_differs(tmp_path, drawn):
    make_run(tmp_path, "a-1", [0.0, 5.0], PONG)
    make_run(tmp_path, "a-2", [0.0, 6.0], PONG | {"seed": 2, "env": "ALE/Pong-v5"})
    make_run(tmp_path, "b", [0.0, 6.0], PONG | {"sticky_actions": 0.25})
    make_run(tmp_path, "_$old$", [0.0, 6.0])
    assert drawn("a-1", "a-2", "b", "_$old$", "--group") == [
        "Atari pong, life_loss True",
        "a (2 runs, mean ± std)\nsticky_actions 0.0",
        "b\nsticky_actions 0.25",
        "_$old$",
    ]


def test_curves_can_be_named(tmp_path, drawn, capsys):
    for name in ("a-1", "a-2", "b-1"):
        make_run(tmp_path, name, [0.0, 5.0])
    group = "--group", "--title", "T"
    names = drawn("a-1", "b-1", "a-2", *group, "--labels", "batch-8", "batch-16")
    assert names == ["T", "batch-8 (2 runs, mean ± std)", "batch-16"]
    with pytest.raises(SystemExit):
        drawn("a-1", "b-1", *group, "--labels", "MonoBeast")


@pytest.mark.parametrize("flag", ["--group", "--iqm"])
def test_runs_of_different_protocols_are_not_averaged(tmp_path, capsys, flag):
    make_run(tmp_path, "a-1", [0.0, 5.0], PONG)
    make_run(tmp_path, "a-2", [0.0, 6.0], PONG | {"life_loss": False})
    with pytest.raises(SystemExit) as caught:
        plot.main(["a-1", "a-2", "--savedir", str(tmp_path), flag])
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert "the runs of the group a have different protocols" in message
    assert "a-1: life_loss True; a-2: life_loss False" in message
