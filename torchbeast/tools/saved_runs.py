"""Reading the files of runs: logs.csv, meta.json, test.json. Loads no torch."""

import csv
import datetime
import glob
import gzip
import itertools
import json
import math
import pathlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchbeast.base.errors import FlagError, using
from torchbeast.runs.files import read_meta
from torchbeast.tools.protocol import find_protocol

LOGS = ("logs.csv", "logs.csv.gz")  # archived logs may be compressed


class SavedRun(NamedTuple):
    """A run: columns of logs.csv, [N] float64, NaN if empty; meta.json, test.json."""

    name: str
    header: list[str]  # the names of all columns
    columns: dict[str, np.ndarray]  # those that were asked for
    meta: dict[str, Any]
    test: dict[str, Any]

    def protocol(self) -> dict[str, Any] | None:
        with using(f"meta.json of {self.name}", "is damaged"):
            return find_protocol(self.meta.get("args"))

    def values(self, column: str) -> np.ndarray:
        """The finite values of a column."""
        values = self.columns.get(column, np.empty(0))
        return values[np.isfinite(values)]

    def last(self, column: str) -> float | None:
        """The last value of a column; None if it has none."""
        values = self.values(column)
        return float(values[-1]) if len(values) else None

    def score(self, step: int | None = None) -> float:
        """The mean return of the last 100 games at `step`, or at the end.

        Raises:
          FlagError: the run has not reached `step`, or no game has ended until then.
        """
        steps = self.columns.get("step", np.empty(0))
        if step is not None and not (steps >= step).any():
            raise FlagError(f"run {self.name!r} ends before step {step:,}")
        returns = self.columns.get("mean_game_return_100", np.full(len(steps), np.nan))
        known = np.isfinite(returns) & (steps <= (math.inf if step is None else step))
        if not known.any():
            raise FlagError(f"run {self.name!r}: no game has ended until then")
        return float(returns[known][-1])

    def largest_fall(self) -> float:
        """How far the return fell at most, as a share of its highest value so far.

        The return is the mean of the last 100 games. It counts from where it reaches a
        tenth of the run's highest. NaN if the highest is not above 0.
        """
        returns = self.values("mean_game_return_100")
        if not len(returns) or returns.max() <= 0:
            return math.nan
        peaks = np.maximum.accumulate(returns)
        counted = peaks >= 0.1 * returns.max()
        return float((1 - returns[counted] / peaks[counted]).max())

    def wall_clock(self) -> np.ndarray:
        """[N] seconds of training at each row; NaN if unknown.

        A start counts from its beginning to its last row.
        """
        times = self.columns.get("_time", np.empty(0))
        with using(f"meta.json of {self.name}", "is damaged"):
            dates = [self.meta.get("date_start"), *self.meta.get("resumed", ())]
            parse = datetime.datetime.fromisoformat
            starts = [parse(x).timestamp() for x in dates if x]
        starts = starts or times[:1].tolist()
        seconds = np.full(len(times), np.nan)
        before = 0.0
        for begin, end in itertools.pairwise([*starts, np.inf]):
            own = (times >= begin) & (times < end)
            seconds[own] = before + times[own] - begin
            before = seconds[own][-1] if own.any() else before
        return seconds


def find_runs(xpid: str, savedir: pathlib.Path) -> list[pathlib.Path]:
    """Folders of runs: savedir/xpid, of a pattern ("a-*") all; or else the path xpid.

    Raises:
      ValueError: neither has a logs.csv; the message lists the runs in savedir.
    """
    there = sorted(glob.glob(xpid, root_dir=savedir)) or [xpid]
    for paths in [savedir / x for x in there], [pathlib.Path(xpid).expanduser()]:
        if runs := [x.resolve() for x in paths if any((x / y).is_file() for y in LOGS)]:
            return runs
    logs = savedir.glob("*/logs.csv")
    names = [path.parent.name for path in logs if not path.parent.is_symlink()]
    raise ValueError(
        f"no run {xpid!r}: neither {savedir / xpid} nor {xpid} has a logs.csv. "
        f"Runs in {savedir} (--savedir): {', '.join(sorted(names)) or 'none'}."
    )


def read_runs(
    xpids: Sequence[str], savedir: pathlib.Path, wanted: Collection[str]
) -> list[SavedRun]:
    """Reads each run once. Runs of the same name are named by their folders.

    Args:
      wanted: columns. All columns of many long runs would not fit into the memory.

    Raises:
      ValueError: there is no such run.
    """
    folders = [*dict.fromkeys(x for xpid in xpids for x in find_runs(xpid, savedir))]
    runs = [read_run(folder, wanted) for folder in folders]
    if len({run.name for run in runs}) == len(runs):
        return runs
    return [x._replace(name=str(y)) for x, y in zip(runs, folders, strict=True)]


def read_run(folder: pathlib.Path, wanted: Collection[str] | None = None) -> SavedRun:
    """Reads a run. Skips an unfinished last line; text counts as an empty cell.

    Args:
      wanted: columns; None: all.

    Raises:
      ValueError: a file is damaged.
    """
    there = [folder / name for name in LOGS if (folder / name).is_file()]
    path = there[0] if there else folder / LOGS[0]
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with using(path, "is damaged"), opened(path, "rt", errors="replace") as file:
        lines = (line for line in file if line.endswith("\n") and line.strip())
        header = next(csv.reader(lines), [])
        kept = [i for i, x in enumerate(header) if wanted is None or x in wanted]
        blocks = [np.empty((len(kept), 0))]
        while block := list(itertools.islice(lines, 10_000)):
            blocks.append(_numbers(block, kept))
        names, cells = [header[i] for i in kept], np.concatenate(blocks, axis=1)
        columns = dict(zip(names, cells, strict=True))
    test = folder / "test.json"
    with using(test, "is damaged"):
        result = json.loads(test.read_text("utf-8")) if test.exists() else {}
    return SavedRun(folder.name, header, columns, read_meta(folder), result)


def _numbers(lines: list[str], kept: Sequence[int]) -> np.ndarray:
    """The cells of lines in these columns: [columns, lines] float64."""
    columns = list(zip(*csv.reader(lines), strict=True))
    cells = [[_number(cell) for cell in columns[i]] for i in kept]
    return np.array(cells).reshape(len(kept), len(lines))


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan
