"""Draw learning curves of one or several runs to a PNG.

    python -m torchbeast.plot XPID [XPID ...]

A curve is a moving average of a column of logs.csv, with the values faintly behind it.
Without --title it is the protocol; if protocols differ, the legend says in what.
"""

import argparse
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchbeast.base.errors import needing
from torchbeast.tools import groups, protocol
from torchbeast.tools.grid import positive
from torchbeast.tools.saved_runs import SavedRun, find_runs, read_runs

# Flag → (column, label of the axis).
X_AXES = {
    "step": ("step", "environment steps"),
    "frames": ("frames", "frames"),
    "time": ("_time", "hours of training"),
}
Y_LABELS = {  # other columns have their names
    "mean_game_return": "return of a game",
    "mean_game_return_100": "mean return of 100 games",
    "sps": "steps per second",
}
GRID_POINTS = 400  # points in x where the runs of a group are averaged
WIDTH = 60  # characters of a line
MOST_LABELS = 20  # curves in the legend


class Curve(NamedTuple):
    """A line and an optional band from low to high, all [N] float64."""

    name: str
    x: np.ndarray
    y: np.ndarray
    raw: np.ndarray | None = None
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    note: str = ""  # for the legend, after the name


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """[N] → [N]: mean of each value and up to `window` - 1 values before it."""
    total = np.zeros(len(values))
    for i in range(min(window, len(values))):
        total[i:] += values[: len(values) - i]
    return total / np.minimum(np.arange(1, len(values) + 1), window)


def curve(run: SavedRun, x: str, y: str, smooth: int) -> Curve | None:
    """The curve of column `y` over `x` (a key of X_AXES); None if it has no value.

    Raises:
      ValueError: the run lacks a column; the message lists its columns.
    """
    if not run.header:  # it has just begun
        return None
    for name in (X_AXES[x][0], y):
        if name not in run.header:
            raise ValueError(
                f"run {run.name!r} has no column {name!r}. "
                f"Its columns: {', '.join(run.header)}."
            )
    xs = run.wall_clock() / 3600 if x == "time" else run.columns[X_AXES[x][0]]
    if y.startswith("eval_"):  # a later row has the result, see evaluator.py
        xs = np.interp(run.columns["eval_step"], run.columns["step"], xs)
    ys = run.columns[y]
    some = np.isfinite(xs) & np.isfinite(ys)
    if not some.any():
        return None
    return Curve(run.name, xs[some], moving_average(ys[some], smooth), ys[some])


def group_curves(
    curves: Sequence[Curve], iqm: bool = False, labels: Mapping[str, str] = {}
) -> list[Curve]:
    """Joins the curves of each group, over the x range that all its runs share.

    The result is mean ± standard deviation over the runs, or with `iqm` their
    interquartile mean with its 95 % interval. Values are interpolated linearly.
    `labels` has other names of groups.
    """
    joined: list[Curve] = []
    for name, members in groups.by_name(curves).items():
        first = max(member.x[0] for member in members)
        last = min(member.x[-1] for member in members)
        if len(members) == 1 or first > last:  # they share no range
            joined += [m._replace(name=labels.get(name, m.name)) for m in members]
            continue
        x = np.linspace(first, last, GRID_POINTS)
        y = np.stack([np.interp(x, m.x, m.y) for m in members])  # [runs, GRID_POINTS]
        if iqm:
            center, what = groups.interquartile_mean(y.T), "IQM, 95 % interval"
            low, high = np.transpose([groups.iqm_interval([scores]) for scores in y.T])
        else:
            center, what = y.mean(axis=0), "mean ± std"
            low, high = center - y.std(axis=0), center + y.std(axis=0)
        joint = f"{labels.get(name, name)} ({len(members)} runs, {what})"
        joined.append(Curve(joint, x, center, None, low, high, members[0].note))
    return joined


def draw(
    panels: dict[str, Sequence[Curve]], xlabel: str, title: str, out: Any, dark: bool
) -> None:
    """Draws one panel per entry of `panels`, one below the other, to the file `out`."""
    from matplotlib import rc_context, style
    from matplotlib.figure import Figure  # unlike pyplot, it needs no display
    from matplotlib.ticker import EngFormatter

    names = list(dict.fromkeys(c.name for curves in panels.values() for c in curves))
    looks = ["dark_background"] * dark
    with rc_context({"text.parse_math": False}), style.context(looks):  # "$" in a name
        # Small, so that the letters are large enough for a phone.
        figure = Figure(figsize=(5, 1 + 2.4 * len(panels)), layout="constrained")
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        legend: dict[str, Any] = {}
        for axes, (column, curves) in zip(all_axes, panels.items(), strict=True):
            for c in curves:
                color, dot = f"C{names.index(c.name) % 10}", "o" * (len(c.x) == 1)
                (line,) = axes.plot(c.x, c.y, color=color, marker=dot, zorder=3)
                if c.raw is not None and not np.array_equal(c.raw, c.y):
                    axes.plot(c.x, c.raw, color=color, alpha=0.25, lw=0.7, zorder=2)
                if c.low is not None and c.high is not None:
                    axes.fill_between(c.x, c.low, c.high, color=color, alpha=0.2, lw=0)
                label = "\n".join([c.name, *textwrap.wrap(c.note, WIDTH)])
                legend.setdefault(label, line)
            axes.set_ylabel(Y_LABELS.get(column, column))
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        if len(names) > 1:
            shown = [*legend.values()][:MOST_LABELS], [*legend][:MOST_LABELS]
            figure.legend(*shown, loc="outside lower center", frameon=False)
            figure.set_figheight(figure.get_figheight() + 0.25 * len(shown[1]))
        all_axes[-1].set_xlabel(xlabel)
        if "training" not in xlabel:  # it would print 0.05 hours as 50m
            all_axes[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
        figure.suptitle(title, fontsize="medium")
        figure.savefig(out, dpi=200, transparent=dark)


def plot(flags: argparse.Namespace) -> pathlib.Path:
    """Draws what the flags ask for. Returns the file."""
    savedir = flags.savedir.expanduser()
    wanted = {"step", "eval_step", "_time", X_AXES[flags.x][0], *flags.y}
    runs = read_runs(flags.xpids, savedir, wanted)
    if grouped := flags.group or flags.iqm:
        groups.check_protocols(groups.by_name(runs))
    name = groups.group_name if grouped else str
    before = dict.fromkeys(name(run.name) for run in runs)
    if flags.labels and len(flags.labels) != len(before):
        raise ValueError(f"--labels needs one name each for {', '.join(before)}")
    labels = dict(zip(before, flags.labels, strict=False))
    common, own = protocol.split_common(run.protocol() for run in runs)
    panels: dict[str, Sequence[Curve]] = {}
    for y in flags.y:
        smooth = flags.smooth or (1 if y.startswith("eval_") else 10)
        found = []
        for run, rest in zip(runs, own, strict=True):
            if one := curve(run, flags.x, y, smooth):
                note = "" if labels else protocol.describe(rest)
                label = run.name if grouped else labels.get(run.name, run.name)
                found.append(one._replace(name=label, note=note))
            else:
                print(f"{run.name}: no value of {y} yet")
        panels[y] = group_curves(found, flags.iqm, labels) if grouped else found
    if not any(panels.values()):
        raise ValueError("there is nothing to draw yet")
    folder = find_runs(flags.xpids[0], savedir)[0] if len(runs) == 1 else pathlib.Path()
    names = {one.name for curves in panels.values() for one in curves}
    only = list(names) if len(names) == 1 else []  # else the legend has them
    lines = [*only, *textwrap.wrap(protocol.describe(common), WIDTH)]
    title = "\n".join(lines) if flags.title is None else flags.title
    out = flags.out or folder / "plot.png"
    xlabel = X_AXES[flags.x][1]
    if flags.x == "time" and max(c.x[-1] for y in panels.values() for c in y) < 2:
        xlabel = "minutes of training"
        panels = {k: [c._replace(x=c.x * 60) for c in y] for k, y in panels.items()}
    draw(panels, xlabel, title, out, flags.dark)
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m torchbeast.plot",
        description="Draw learning curves of one or several runs to a PNG.",
    )
    add = parser.add_argument
    add("xpids", nargs="+", metavar="XPID", help="a name, a pattern or a folder")
    add("--savedir", type=pathlib.Path, default="~/logs/torchbeast")
    add("--x", choices=X_AXES, default="step")
    y_help = "columns of logs.csv, one panel each (mean_game_return)"
    add("--y", nargs="+", metavar="COLUMN", default=["mean_game_return"], help=y_help)
    smooth_help = "average over the last N values (10; 1 for evaluations)"
    add("--smooth", type=positive, metavar="N", help=smooth_help)
    group_help = "mean and standard deviation over runs whose names differ by a seed"
    add("--group", action="store_true", help=group_help)
    iqm_help = "like --group, with the interquartile mean and its 95 %% interval"
    add("--iqm", action="store_true", help=iqm_help)
    labels_help = "names of the curves, in the order of the runs or groups"
    add("--labels", nargs="+", metavar="NAME", default=[], help=labels_help)
    add("--title", help="default: what makes scores comparable")
    add("--dark", action="store_true", help="for a dark page")
    out_help = "default: plot.png in the run's folder; of several runs, in this one"
    add("--out", type=pathlib.Path, metavar="FILE.png", help=out_help)
    flags = parser.parse_args(argv)
    try:
        with needing("torchbeast.plot", "matplotlib"):
            out = plot(flags)
    except (ValueError, OSError, RuntimeError) as error:  # the last: of ~ without HOME
        parser.exit(2, f"Cannot draw: {error}\n")
    print(f"Drawn to {out}")
