"""Reading the files of runs: logs.csv, meta.json, test.json. Loads no torch."""

from __future__ import annotations

import csv
import datetime
import gzip
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from torchbeast.base.errors import using
from torchbeast.runs.files import read_meta
from torchbeast.tools.protocol import describe, find_protocol

LOGS = ("logs.csv", "logs.csv.gz")  # archived logs may be compressed
MOST_NAMES = 20  # in a message
# A longer time without a row is a pause, if it is also far longer than the run's usual.
PAUSE_SECONDS, PAUSE_FACTOR = 60.0, 20.0


class SavedRun(NamedTuple):
    """One run: its name and the columns of its logs.csv, [N] float64; NaN if empty.

    Attributes:
      meta: the content of meta.json; {} without.
      test: see read_test.
    """

    name: str
    columns: dict[str, np.ndarray]
    meta: dict[str, Any]
    test: dict[str, Any] | None = None

    def protocol(self) -> dict[str, Any] | None:
        return find_protocol(self.meta.get("args"))

    def last(self, column: str) -> float | None:
        """The last value of a column; None if it has none."""
        values = self.columns.get(column, np.empty(0))
        values = values[np.isfinite(values)]
        return float(values[-1]) if len(values) else None

    def score(self, step: int | None = None) -> float:
        """The mean return of the last 100 games at `step`, or at the end.

        Raises:
          ValueError: the run has not reached `step`, or no game has ended until then.
        """
        last_step = self.last("step") or 0
        if step is not None and last_step < step:
            raise ValueError(
                f"{self.name!r} ends at step {last_step:,.0f}, before {step:,}"
            )
        returns = self.columns.get("mean_game_return_100", np.empty(0))
        known = np.isfinite(returns)
        if step is not None and len(returns):
            known &= self.columns["step"] <= step
        if not known.any():
            raise ValueError(f"run {self.name!r}: no game has ended until then")
        return float(returns[known][-1])

    def largest_fall(self) -> float:
        """How far the return fell at most, as a share of its highest value so far.

        The return is the mean of the last 100 games. It counts from where it reaches a
        tenth of the run's highest. NaN if the highest is not above 0.
        """
        returns = self.columns.get("mean_game_return_100", np.empty(0))
        returns = returns[np.isfinite(returns)]
        if not len(returns) or returns.max() <= 0:
            return math.nan
        peaks = np.maximum.accumulate(returns)
        counted = peaks >= 0.1 * returns.max()
        return float((1 - returns[counted] / peaks[counted]).max())

    def pauses(self) -> float:
        """Seconds in which the run was suspended; wall_clock() leaves them out."""
        seconds = self._wall_clock()
        trained = np.isfinite(self.columns.get("episodes", seconds))
        return float(_pauses(seconds)[trained].sum())  # evaluations write rows, too

    def wall_clock(self) -> np.ndarray:
        """[N] seconds of training at each row, without pauses; NaN if unknown.

        A start counts from its beginning to its last row. A pause is the time between
        two starts, or a time without a row far beyond the usual, such as that of a
        suspended machine.
        """
        seconds = self._wall_clock()
        return seconds - np.cumsum(_pauses(seconds))

    def _wall_clock(self) -> np.ndarray:
        """wall_clock() with the pauses inside of starts."""
        times = self.columns.get("_time", np.empty(0))
        dates = [self.meta.get("date_start"), *self.meta.get("resumed", ())]
        starts = [datetime.datetime.fromisoformat(x).timestamp() for x in dates if x]
        starts = starts or [float(times[0]) if len(times) else 0.0]
        seconds = np.full(len(times), np.nan)
        before = 0.0
        for begin, end in zip(starts, [*starts[1:], np.inf], strict=True):
            own = (times >= begin) & (times < end)
            seconds[own] = before + times[own] - begin
            before = seconds[own][-1] if own.any() else before
        return seconds

    def seconds(self) -> float | None:
        """The last of wall_clock(); None if it is unknown."""
        seconds = self.wall_clock()
        seconds = seconds[np.isfinite(seconds)]
        return float(seconds[-1]) if len(seconds) else None


def _pauses(seconds: np.ndarray) -> np.ndarray:
    """Of each row: the seconds before it that were a pause, 0 for most."""
    gaps = np.diff(seconds, prepend=seconds[:1])
    gaps[~np.isfinite(gaps)] = 0.0
    usual = np.median(gaps[gaps > 0]) if (gaps > 0).any() else 0.0
    longest = max(PAUSE_SECONDS, PAUSE_FACTOR * usual)
    return np.where(gaps > longest, gaps - usual, 0.0)


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
        f"Runs in {savedir}: {listing(sorted(names))}."
    )


def read_runs(xpids: Sequence[str], savedir: pathlib.Path) -> list[SavedRun]:
    """Reads each run once. Runs of the same name are named by their folders.

    Raises:
      ValueError: there is no such run.
    """
    folders = list(dict.fromkeys(find_run(xpid, savedir) for xpid in xpids))
    runs = [read_run(folder) for folder in folders]
    if len({run.name for run in runs}) == len(runs):
        return runs
    names = [printable(str(folder)) for folder in folders]
    return [run._replace(name=x) for x, run in zip(names, runs, strict=True)]


def read_run(folder: pathlib.Path) -> SavedRun:
    """Reads a run. Skips an unfinished last line; text counts as an empty cell.

    Raises:
      ValueError: logs.csv or meta.json is damaged.
    """
    there = [folder / name for name in LOGS if (folder / name).is_file()]
    path = there[0] if there else folder / LOGS[0]
    with using(path, "is damaged"):
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        lines = data[: data.rfind(b"\n") + 1].decode(errors="replace").splitlines()
        header, *rows = list(csv.reader(lines)) or [[]]
        if rows and len(rows[-1]) != len(header):
            del rows[-1]
        for i, row in enumerate(rows, start=1):
            if len(row) != len(header):
                sizes = f"row {i} has {len(row)} cells, and the header {len(header)}"
                raise ValueError(f"{sizes}. Remove this row")
        values = np.array([[_number(cell) for cell in row] for row in rows])
    values = values.reshape(len(rows), len(header))
    columns = {name: values[:, i] for i, name in enumerate(header)}
    name = printable(folder.name)
    run = SavedRun(name, columns, read_meta(folder), read_test(folder))
    with using(folder / "meta.json", "is damaged"):
        describe(run.protocol())
        run.seconds()
    return run


def read_test(folder: pathlib.Path) -> dict[str, Any] | None:
    """What test.json says, None if there is none. Older files lack step and flags.

    Raises:
      ValueError: the file is damaged.
    """
    path = folder / "test.json"
    if not path.exists():
        return None
    with using(path, "is not a result of --mode test"):
        test = json.loads(path.read_text(encoding="utf-8"))
        rules = find_protocol(test.get("flags"))
        describe(rules)
        return {
            "step": None if test.get("step") is None else int(test["step"]),
            "protocol": rules,
            "mean": float(test["mean"]),
            "std": float(test["std"]),
            "num_games": int(test["num_games"]),
            "policy": str(test["policy"]),
        }


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("nan")


def printable(name: str) -> str:
    """The name of a file, whose bytes may be no UTF-8."""
    return name.encode(errors="backslashreplace").decode()


def listing(names: list[str]) -> str:
    """The names for a message; of many only the first."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return (", ".join(names[:MOST_NAMES]) or "none") + more
