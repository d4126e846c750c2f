"""Draw learning curves of one or several runs to a PNG.

    python -m torchbeast.plot XPID [XPID ...]

A curve is a moving average of a column of logs.csv; the values themselves are drawn
faintly behind it. With --group, runs whose names differ only by a seed at the end
(pong-seed1, pong-seed2; pong_1, pong_2) are drawn as mean and standard deviation, with
--iqm as interquartile mean and its 95 % interval.

The title has the protocol: what makes scores comparable. If the runs have different
protocols, the legend says what differs, and a group refuses to average them.
"""

from __future__ import annotations

import argparse
import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from torchbeast.tools import groups, protocol
from torchbeast.tools.saved_runs import SavedRun, find_run, printable, read_runs

# Flag → (column, label of the axis).
X_AXES = {
    "step": ("step", "environment steps"),
    "frames": ("frames", "frames"),
    "time": ("_time", "hours of training"),
}
Y_LABELS = {
    "mean_game_return": "return of a game",
    "mean_game_return_100": "return, mean of the last 100 games",
    "sps": "steps per second",
    "entropy": "entropy of the policy (nats per step)",
}
GRID_POINTS = 400  # points in x where the runs of a group are averaged
TITLE_WIDTH = 100  # characters of a line of the protocol
MOST_LABELS, LABEL_WIDTH = 20, 60  # lines of the legend, and their characters


class Curve(NamedTuple):
    """A line and an optional band from low to high, all [N] float64."""

    label: str
    x: np.ndarray
    y: np.ndarray
    raw: np.ndarray | None = None
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    note: str = ""  # for the legend, after the label


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """[N] → [N]: mean of each value and up to `window` - 1 values before it."""
    window = min(window, len(values))
    numbers = np.minimum(np.arange(1, len(values) + 1), window)
    return np.convolve(values, np.ones(window))[: len(values)] / numbers


def curve(run: SavedRun, x: str, y: str, smooth: int) -> Curve | None:
    """The curve of column `y` over `x` (a key of X_AXES); None if it has no value.

    Raises:
      ValueError: the run lacks a column; the message lists its columns.
    """
    for name in (X_AXES[x][0], y):
        if name not in run.columns:
            raise ValueError(
                f"run {run.name!r} has no column {name!r}. "
                f"Its columns: {', '.join(run.columns) or 'none yet'}."
            )
    xs = run.wall_clock() / 3600 if x == "time" else run.columns[X_AXES[x][0]]
    if y.startswith("eval_"):  # a later row has the result, see evaluator.py
        xs = np.interp(run.columns["eval_step"], run.columns["step"], xs)
    ys = run.columns[y]
    some = np.isfinite(xs) & np.isfinite(ys)
    if not some.any():
        return None
    return Curve(run.name, xs[some], moving_average(ys[some], smooth), ys[some])


def group_curves(curves: Sequence[Curve], iqm: bool = False) -> list[Curve]:
    """Joins the curves of each group, over the x range that all its runs share.

    The result is mean ± standard deviation over the runs, or with `iqm` their
    interquartile mean with its 95 % interval. Values are interpolated linearly. If some
    runs are longer, this is printed.
    """
    joined: list[Curve] = []
    for name, members in groups.by_name(curves, lambda one: one.label).items():
        first = max(member.x[0] for member in members)
        shortest = min(members, key=lambda member: member.x[-1])
        last = shortest.x[-1]
        if len(members) == 1 or first > last:
            if first > last:
                print(f"{name}: its runs share no range, so each has its own curve")
            joined += members
            continue
        if last < 0.95 * max(member.x[-1] for member in members):
            print(f"{name}: drawn up to {last:g}, where {shortest.label} ends")
        x = np.linspace(first, last, GRID_POINTS)
        y = np.stack([np.interp(x, m.x, m.y) for m in members])  # [runs, GRID_POINTS]
        if iqm:
            center, what = groups.interquartile_mean(y.T), "IQM, 95 % interval"
            low, high = np.transpose([groups.iqm_interval([scores]) for scores in y.T])
        else:
            center, what = y.mean(axis=0), "mean ± std"
            low, high = center - y.std(axis=0), center + y.std(axis=0)
        label, note = f"{name} ({len(members)} runs, {what})", members[0].note
        joined.append(Curve(label, x, center, low=low, high=high, note=note))
    return joined


def plain(text: str) -> str:
    """Text that matplotlib does not take as a formula."""
    return text.replace("$", r"\$")


def label_of(one: Curve) -> str:
    """A curve's lines of the legend. Of a long name the middle is left out."""
    half = LABEL_WIDTH // 2
    is_long = len(one.label) > LABEL_WIDTH
    name = f"{one.label[:half]}…{one.label[-half:]}" if is_long else one.label
    return plain("\n".join([name, *textwrap.wrap(one.note, LABEL_WIDTH)]))


def draw_panel(axes: Any, curves: Sequence[Curve], colors: dict[str, str]) -> list[Any]:
    """Draws curves. Returns their lines."""
    lines: list[Any] = []
    for c in curves:
        color = colors[c.label]
        lines += axes.plot(c.x, c.y, color=color, linewidth=1.6, zorder=3)
        if len(c.x) == 1:
            axes.plot(c.x, c.y, "o", color=color)
        if c.raw is not None and not np.array_equal(c.raw, c.y):
            axes.plot(c.x, c.raw, color=color, alpha=0.25, linewidth=0.7, zorder=2)
        if c.low is not None and c.high is not None:
            axes.fill_between(c.x, c.low, c.high, color=color, alpha=0.2, lw=0)
    if not curves:
        place: dict[str, Any] = {"ha": "center", "transform": axes.transAxes}
        axes.text(0.5, 0.5, "no value yet", **place)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return lines


def draw(
    panels: dict[str, Sequence[Curve]], xlabel: str, title: str, out: pathlib.Path
) -> None:
    """Draws one panel per entry of `panels`, one below the other, to the file `out`.

    Raises:
      ImportError: matplotlib is missing.
      OSError, ValueError: the file can't be written, or has an unknown suffix.
    """
    # Figure needs no display and, unlike pyplot, no global state.
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    every = [c for curves in panels.values() for c in curves]
    names = list(dict.fromkeys(c.label for c in every))
    beside = len(names) > 4 or any(c.note for c in every)  # a legend that hides curves
    size = (11 if beside else 8, 0.8 + 3.6 * len(panels))
    figure = Figure(figsize=size, layout="constrained")
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    colors = {name: f"C{i % 10}" for i, name in enumerate(names)}
    for axes, (column, curves) in zip(all_axes, panels.items(), strict=True):
        lines = draw_panel(axes, curves, colors)
        axes.set_ylabel(plain(Y_LABELS.get(column, column)))
        if len(names) > 1 and curves:
            labels = list(map(label_of, curves[:MOST_LABELS]))
            if (more := len(curves) - MOST_LABELS) > 0:
                labels[-1] += f"\nand {more} more"
            place = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if beside else {}
            style = {"frameon": False, "fontsize": "small", **place}
            axes.legend(lines[:MOST_LABELS], labels, **style)
    all_axes[-1].set_xlabel(xlabel)
    if xlabel != X_AXES["time"][1]:  # it would print 0.05 hours as 50m
        all_axes[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.suptitle(plain(title), fontsize="medium")
    figure.savefig(out, dpi=120)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchbeast.plot",
        description="Draw learning curves of one or several runs to a PNG.",
    )
    add = parser.add_argument
    runs_help = "name of a run in savedir, or a run's folder"
    add("xpids", nargs="+", metavar="XPID", help=runs_help)
    add("--savedir", type=pathlib.Path, default="~/logs/torchbeast")
    add("--x", choices=X_AXES, default="step")
    y_help = "columns of logs.csv, one panel each (mean_game_return)"
    add("--y", nargs="+", metavar="COLUMN", default=["mean_game_return"], help=y_help)
    smooth_help = "average over the last N values; 1: none (10; 1 for evaluations)"
    add("--smooth", type=int, metavar="N", help=smooth_help)
    group_help = (
        "mean and standard deviation over runs whose names differ only by a seed at "
        "the end: pong-seed1, pong-seed2"
    )
    add("--group", action="store_true", help=group_help)
    iqm_help = "like --group, with the interquartile mean and its 95 %% interval"
    add("--iqm", action="store_true", help=iqm_help)
    title_help = "first line of the title; default: the name of a single curve"
    add("--title", help=title_help)
    out_help = "default: plot.png in the run's folder; of several runs, in this one"
    add("--out", type=pathlib.Path, metavar="FILE.png", help=out_help)
    return parser


def plot(flags: argparse.Namespace) -> pathlib.Path:
    """Draws what the flags ask for. Returns the file."""
    savedir = flags.savedir.expanduser()
    runs = read_runs(flags.xpids, savedir)
    if grouped := flags.group or flags.iqm:
        groups.check_protocols(groups.by_name(runs, lambda run: run.name))
    common, own = protocol.split_common(run.protocol() for run in runs)
    panels: dict[str, Sequence[Curve]] = {}
    for y in flags.y:
        smooth = flags.smooth or (1 if y.startswith("eval_") else 10)
        found = []
        for run, rest in zip(runs, own, strict=True):
            if one := curve(run, flags.x, y, smooth):
                found.append(one._replace(note=protocol.describe(rest)))
            else:
                print(f"{run.name}: no value of {y} yet")
        panels[y] = group_curves(found, flags.iqm) if grouped else found
    if not any(panels.values()):
        raise ValueError("there is nothing to draw yet")
    folder = find_run(flags.xpids[0], savedir) if len(runs) == 1 else pathlib.Path()
    names = {one.label for curves in panels.values() for one in curves}
    only = list(names) if len(names) == 1 else []  # else the legend has them
    title = only if flags.title is None else [flags.title]
    title += textwrap.wrap(protocol.describe(common), TITLE_WIDTH)
    out = flags.out or folder / "plot.png"
    draw(panels, X_AXES[flags.x][1], "\n".join(title), out)
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    flags = parser.parse_args(argv)
    if flags.smooth is not None and flags.smooth < 1:
        parser.error(f"--smooth is {flags.smooth}; it must be 1 or more")
    try:
        out = plot(flags)
    except ImportError as error:
        parser.exit(1, f"Drawing needs matplotlib ({error}): pip install matplotlib\n")
    except (ValueError, OSError, RuntimeError) as error:  # the last: of ~ without HOME
        parser.exit(2, f"Cannot draw: {error}\n")
    print(f"Drawn to {printable(str(out))}")
