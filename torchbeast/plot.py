"""Draw learning curves of one or several runs to a PNG.

    python -m torchbeast.plot XPID [XPID ...]

A curve is a moving average of a column of logs.csv; the values themselves are drawn
faintly behind it. With --group, runs whose names differ only by a seed at the end
(pong-seed1, pong-seed2; pong_1, pong_2) are drawn as mean and standard deviation.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

# Names of log files, and how to open them. Archived logs may be compressed.
LOGS: dict[str, Callable[..., Any]] = {"logs.csv": open, "logs.csv.gz": gzip.open}
# Flag → (column, label of the axis).
X_AXES = {
    "step": ("step", "agent steps"),
    "frames": ("frames", "frames"),
    "time": ("_time", "hours since the first row"),
}
GRID_POINTS = 400  # points in x where the runs of a group are averaged
MOST_NAMES = 20  # maximal names in an error message


class Run(NamedTuple):
    """One run: its name and the columns of its logs.csv, [N] float64; NaN if empty."""

    name: str
    columns: dict[str, np.ndarray]


class Curve(NamedTuple):
    """A line and an optional band from low to high, all [N] float64."""

    label: str
    x: np.ndarray
    y: np.ndarray
    raw: np.ndarray | None = None
    low: np.ndarray | None = None
    high: np.ndarray | None = None


def find_run(xpid: str, savedir: pathlib.Path) -> pathlib.Path:
    """The folder of the run: savedir/xpid, or xpid itself if it is a path.

    Raises:
      ValueError: neither has a logs.csv; the message lists the runs in savedir.
    """
    for folder in (savedir / xpid, pathlib.Path(xpid).expanduser()):
        if any((folder / name).is_file() for name in LOGS):
            return folder.resolve()
    logs = savedir.glob("*/logs.csv")
    names = [path.parent.name for path in logs if not path.parent.is_symlink()]
    raise ValueError(
        f"no run {xpid!r}: neither {savedir / xpid} nor {xpid} has a logs.csv. "
        f"Runs in {savedir}: {_listing(sorted(names))}."
    )


def read_run(folder: pathlib.Path) -> Run:
    """Reads logs.csv. Skips an unfinished line; text counts as an empty cell."""
    path, open_text = next(
        (folder / name, function)
        for name, function in LOGS.items()
        if (folder / name).is_file()
    )
    with open_text(path, "rt", encoding="utf-8", newline="") as file:
        # A power failure can leave zeros, which csv refuses before Python 3.11.
        lines = (line.replace("\0", "\ufffd") for line in file)
        header, *rows = list(csv.reader(lines)) or [[]]
    rows = [row for row in rows if len(row) == len(header)]
    values = np.array([[_number(cell) for cell in row] for row in rows])
    values = values.reshape(len(rows), len(header))
    return Run(folder.name, {name: values[:, i] for i, name in enumerate(header)})


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """[N] → [N]: mean of each value and up to `window` - 1 values before it."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - window, 0)
    return (sums[last] - sums[first]) / (last - first)


def curve(run: Run, x: str, y: str, smooth: int) -> Curve | None:
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
    xs = run.columns[X_AXES[x][0]]
    if x == "time" and len(xs):
        xs = (xs - xs[0]) / 3600
    ys = run.columns[y]
    some = np.isfinite(xs) & np.isfinite(ys)
    if not some.any():
        return None
    return Curve(run.name, xs[some], moving_average(ys[some], smooth), ys[some])


def group_name(name: str) -> str:
    """The name of a run without the seed at its end: pong-seed1 → pong."""
    return re.sub(r"[-_.](seed|s)?[-_.]?\d+$", "", name) or name


def group_curves(curves: Sequence[Curve]) -> list[Curve]:
    """Joins the curves of each group: mean ± standard deviation over its runs.

    The result covers the x range that all runs of the group share. Values are
    interpolated linearly.
    """
    groups: dict[str, list[Curve]] = {}
    for one in curves:
        groups.setdefault(group_name(one.label), []).append(one)
    joined = []
    for name, members in groups.items():
        first = max(member.x[0] for member in members)
        last = min(member.x[-1] for member in members)
        if len(members) == 1 or first > last:
            joined += members
            continue
        x = np.linspace(first, last, GRID_POINTS)
        y = np.stack([np.interp(x, m.x, m.y) for m in members])  # [runs, GRID_POINTS]
        mean, spread = y.mean(axis=0), y.std(axis=0)
        label = f"{name} ({len(members)} runs, mean ± std)"
        joined.append(Curve(label, x, mean, low=mean - spread, high=mean + spread))
    return joined


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

    figure = Figure(figsize=(8, 0.8 + 3.6 * len(panels)), layout="constrained")
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    labels = list(dict.fromkeys(c.label for curves in panels.values() for c in curves))
    colors = {label: f"C{i % 10}" for i, label in enumerate(labels)}
    for axes, (column, curves) in zip(all_axes, panels.items(), strict=True):
        for c in curves:
            color = colors[c.label]
            axes.plot(c.x, c.y, color=color, label=c.label, linewidth=1.6, zorder=3)
            if len(c.x) == 1:
                axes.plot(c.x, c.y, "o", color=color)
            if c.raw is not None and not np.array_equal(c.raw, c.y):
                axes.plot(c.x, c.raw, color=color, alpha=0.25, linewidth=0.7, zorder=2)
            if c.low is not None and c.high is not None:
                axes.fill_between(c.x, c.low, c.high, color=color, alpha=0.2, lw=0)
        axes.set_ylabel(column)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if not curves:
            style: dict[str, Any] = {"ha": "center", "transform": axes.transAxes}
            axes.text(0.5, 0.5, "no value yet", **style)
        elif len(labels) > 1:
            axes.legend(frameon=False, fontsize="small")
    all_axes[-1].set_xlabel(xlabel)
    if xlabel != X_AXES["time"][1]:  # it would print 0.05 hours as 50m
        all_axes[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.suptitle(title)
    figure.savefig(out, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m torchbeast.plot",
        description="Draw learning curves of one or several runs to a PNG.",
    )
    parser.add_argument(
        "xpids",
        nargs="+",
        metavar="XPID",
        help="name of a run in savedir, or a run's folder",
    )
    parser.add_argument("--savedir", type=pathlib.Path, default="~/logs/torchbeast")
    parser.add_argument("--x", choices=X_AXES, default="step")
    parser.add_argument(
        "--y",
        nargs="+",
        metavar="COLUMN",
        default=["mean_game_return"],
        help="columns of logs.csv, one panel each (mean_game_return)",
    )
    parser.add_argument(
        "--smooth",
        type=int,
        metavar="N",
        default=10,
        help="average over the last N values; 1: none (10)",
    )
    parser.add_argument(
        "--group",
        action="store_true",
        help="mean and standard deviation over runs whose names differ only by a seed "
        "at the end: pong-seed1, pong-seed2",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="FILE.png",
        help="default: plot.png in the run's folder; for several runs, in the "
        "current folder",
    )
    flags = parser.parse_args(argv)
    if flags.smooth < 1:
        parser.error(f"--smooth is {flags.smooth}; it must be 1 or more")
    try:
        savedir = flags.savedir.expanduser()
        folders = list(dict.fromkeys(find_run(xpid, savedir) for xpid in flags.xpids))
        runs = [read_run(folder) for folder in folders]
        names = [run.name for run in runs]
        if len(set(names)) < len(names):  # the same name in different folders
            runs = [
                Run(str(folder), run.columns)
                for folder, run in zip(folders, runs, strict=True)
            ]
        panels: dict[str, Sequence[Curve]] = {}
        for y in flags.y:
            found = [curve(run, flags.x, y, flags.smooth) for run in runs]
            for run, one in zip(runs, found, strict=True):
                if one is None:
                    print(f"{run.name}: no value of {y} yet")
            panels[y] = [one for one in found if one is not None]
            if flags.group:
                panels[y] = group_curves(panels[y])
        if not any(panels.values()):
            raise ValueError("there is nothing to draw yet")
        out = flags.out or (folders[0] if len(folders) == 1 else pathlib.Path()) / (
            "plot.png"
        )
        title = runs[0].name if len(runs) == 1 else ""
        draw(panels, X_AXES[flags.x][1], title, out)
    except ImportError as error:
        parser.exit(1, f"Drawing needs matplotlib ({error}): pip install matplotlib\n")
    except (ValueError, OSError) as error:
        parser.exit(2, f"Cannot draw: {error}\n")
    print(f"Drawn to {out}")


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("nan")


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return (", ".join(names[:MOST_NAMES]) or "none") + more


if __name__ == "__main__":
    main()
