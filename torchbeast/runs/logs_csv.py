"""logs.csv, one row per batch, and fields.csv, its columns."""

from __future__ import annotations

import csv
import gzip
import io
import logging
import os
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torchbeast.base.errors import FileError, UserError, using
from torchbeast.runs.folder import atomic_write

log = logging.getLogger(__name__)

# Columns about an evaluation of the weights of `eval_step`, see evaluator.py.
EVAL_COLUMNS = ("eval_step", "eval_return", "eval_length")


class ColumnError(UserError, ValueError):
    """Two columns of logs.csv have the same name, or a column is not a number."""


def join_columns(*rows: Mapping[str, Any]) -> dict[str, Any]:
    """Joins parts of a row of logs.csv.

    Raises:
      ColumnError: two parts have a column of the same name.
    """
    joined: dict[str, Any] = {}
    for row in rows:
        if twice := sorted(joined.keys() & row.keys()):
            raise ColumnError(
                f"logs.csv would have two columns named {', '.join(twice)}. Rename the "
                "auxiliary loss (Net.auxiliary_losses), the column of your --explorer "
                "or the value that your fork logs"
            )
        joined |= row
    return joined


def spread(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row, as Python's numbers.

    A number is one column, and so is None, an empty cell. A vector [K] is K columns:
    NAME_0, NAME_1, ... They may be Python's, NumPy's or torch's.

    Raises:
      ColumnError: a value is something else, or two columns have the same name.
    """
    columns: dict[str, Any] = {}
    for name, value in row.items():
        value = value.tolist() if hasattr(value, "tolist") else value
        parts = {name: value}
        if isinstance(value, list | tuple):
            parts = {f"{name}_{i}": x for i, x in enumerate(value)}
        for column, x in parts.items():
            if not isinstance(x, int | float | None):
                raise ColumnError(
                    f"the column {column} of logs.csv would be {x!r:.60}. Allowed are "
                    f"a number, or a vector [K] as {name}_0 to {name}_{{K - 1}}: sum "
                    "it, or take its mean, where your fork returns it"
                )
            parts[column] = int(x) if isinstance(x, bool) else x
        columns = join_columns(columns, parts)
    return columns


class LogsCsv:
    """logs.csv and fields.csv of one run. One thread at a time.

    Existing rows are kept up to the first with a step larger than `last_step`. The
    others are cut, and an unfinished last line with them.

    Args:
      folder: of the run, locked by the caller.
      last_step: None cuts all rows.

    Raises:
      FileError: logs.csv was not written by this class, or is damaged.
    """

    def __init__(self, folder: pathlib.Path, last_step: int | None) -> None:
        self.path = folder / "logs.csv"
        self._columns: list[str] = []
        self._tick = 0
        if self.path.exists():
            self._cut(last_step)
        self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()

    def write(self, row: Mapping[str, float | None]) -> None:
        """Appends a row with _tick (0, 1, ...) and _time (Unix seconds).

        A key that is new becomes the last column. None, NaN and missing values give an
        empty cell. Floats are written exactly: float(cell) is the same number.

        Args:
          row: plain numbers, see `spread`.

        Raises:
          ColumnError: `row` has a key _tick or _time.
          OSError: the row can't be written; logs.csv is unchanged.
        """
        full = join_columns({"_tick": self._tick, "_time": time.time()}, row)
        new = [name for name in full if name not in self._columns]
        if new:
            self._add_columns(new)
        self._append(_csv([[_cell(full.get(name)) for name in self._columns]]))
        self._tick += 1

    def _cut(self, last_step: int | None) -> None:
        columns, rows, complete = read_csv(self.path)
        if columns and columns[:2] != ["_tick", "_time"]:
            raise FileError(
                f"{self.path} begins with the columns {columns[:2]}, expected _tick "
                "and _time: another program wrote it. Move it away."
            )
        kept: list[list[str]] = []
        for number, row in enumerate(rows if last_step is not None else ()):
            try:
                cells = dict(zip(columns, row, strict=True))
                int(cells["_tick"])
                step = float(cells.get("step") or "-inf")
            except (ValueError, KeyError) as error:
                if number < len(rows) - 1:
                    raise FileError(
                        f"Row {number + 1} below the header of {self.path} is damaged "
                        f"({row!s:.99}: {error}). Repair it or move the file away."
                    ) from error
                break  # a power failure can damage only the last line
            if last_step is not None and step > last_step:
                break
            kept.append(row)
        if not complete or len(kept) < len(rows):
            lines = len(rows) + (not complete)
            log.info("%d of %d lines of logs.csv are kept.", len(kept), lines)
            with atomic_write(self.path) as file:
                file.write(_csv([columns, *kept] if columns else []))
        self._columns = columns
        self._tick = int(kept[-1][0]) + 1 if kept else 0
        self._write_fields()

    def _add_columns(self, new: list[str]) -> None:
        _, rows, _ = read_csv(self.path)
        columns = self._columns + new
        with atomic_write(self.path) as whole:
            whole.write(_csv([columns, *(row + [""] * len(new) for row in rows)]))
        file = self.path.open("ab", buffering=0)
        self._file.close()
        self._file = file
        self._columns = columns
        self._write_fields()

    def _write_fields(self) -> None:
        """Appends the columns to fields.csv, unless its last line has them already."""
        path = self.path.with_name("fields.csv")
        old = path.read_bytes() if path.exists() else b""
        line = _csv([self._columns])
        if self._columns and old.splitlines(keepends=True)[-1:] != [line]:
            with atomic_write(path) as file:
                file.write(old + line)

    def _append(self, line: bytes) -> None:
        end = self._file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(line)
            while rest:  # a disk that fills up takes a part first, then raises
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(end)
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def read_rows(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """The rows of a run's logs.csv; none without the file."""
    path = folder / "logs.csv"
    with using(path):
        columns, rows, _ = read_csv(path) if path.exists() else ([], [], True)
    return (dict(zip(columns, row, strict=False)) for row in rows)


def _csv(rows: Iterable[Sequence[str]]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue().encode()


def read_csv(path: pathlib.Path) -> tuple[list[str], list[list[str]], bool]:
    """Returns header, complete rows, and whether the last line is complete.

    The file may be an archived one, compressed by gzip.
    """
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    end = data.rfind(b"\n") + 1
    # A power failure can leave zeros, which csv refuses before Python 3.11.
    text = data[:end].decode("utf-8", errors="replace").replace("\0", "\ufffd")
    lines = [_cells(line) for line in text.split("\n")[:-1]]
    return (lines[0] if lines else []), lines[1:], end == len(data)


def _cells(line: str) -> list[str]:
    """The cells of one line; none if csv can't read it. A quote ends with its line."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def _cell(value: float | None) -> str:
    is_nan = value != value
    return "" if value is None or is_nan else repr(value)
