"""The folder of a run: its lock, logs.csv, meta.json and out.log."""

import codecs
import contextlib
import csv
import datetime
import fcntl
import json
import logging
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, BinaryIO

from torchbeast.base.errors import FlagError, UserError, using
from torchbeast.core.columns import join_columns

log = logging.getLogger(__name__)


class RunFileError(UserError, OSError):
    """A file or folder of a run can't be written, or is another process's."""


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Turns an OSError into a RunFileError that names its file, or else `path`."""
    try:
        yield
    except UserError:  # the message is good already
        raise
    except OSError as error:
        raise RunFileError(
            f"Cannot write {error.filename or path}: {error.strerror or error}. Free "
            "some space or choose another --savedir; what was written is intact"
        ) from None


@contextlib.contextmanager
def atomic_write(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Yields a file that replaces `path` once it is on the disk, or not at all.

    One writer at a time: a killed process leaves at most one temporary file behind.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class RunFolder:
    """The folder savedir/xpid, made and locked. An empty one is removed at the end.

    Raises FlagError if xpid is no plain name, RunFileError if it is locked.
    """

    def __init__(self, savedir: str, xpid: str) -> None:
        if xpid in ("", ".", "..", "latest") or "/" in xpid or "\0" in xpid:
            raise FlagError(f"--xpid must be a plain name for a folder, got {xpid!r}")
        self.path = pathlib.Path(savedir).expanduser().absolute() / xpid
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise RunFileError(
                f"Another process writes to this run, {self.path}. Wait for it, end "
                "it, or choose another --xpid (for a sweep: --name)"
            ) from None
        except OSError as error:  # some network file systems have no locks
            log.warning("Cannot lock %s: start one process only. %s", self.path, error)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it is not empty
            self.path.rmdir()
        os.close(self._descriptor)


class FileWriter:
    """Writes out.log, logs.csv and meta.json of one start of a run, in its folder.

    meta.json has the flags, as `args`; dates, the end of this start, and `about`. Rows
    of logs.csv after `resume_step`, of the checkpoint, are cut; None: all are.
    """

    def __init__(
        self,
        folder: RunFolder,
        args: Mapping[str, Any],
        resume_step: int | None = None,
        about: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.path = path = folder.path
        self._logs = path / "logs.csv"
        self._columns, self._tick, date = list[str](), 0, now()
        begun: dict[str, Any] = {"date_start": date, "resumed": []}
        if resume_step is not None:
            self._columns += next(read_rows(path), ())
            old = begun | read_meta(path)
            begun = {k: old[k] for k in begun} | {"resumed": [*old["resumed"], date]}
        self._meta = {"xpid": path.name, "args": dict(args), **begun}
        self._meta |= {"first_step": resume_step or 0, **about}
        # If this start is killed, these stay.
        self._meta |= {"date_end": None, "successful": False, "exit_status": None}
        with contextlib.ExitStack() as stack, writing(path):
            handler = logging.FileHandler(path / "out.log", errors="backslashreplace")
            # A full disk ends the run at the next row of logs.csv, with one message.
            handler.handleError = lambda record: None  # type: ignore[method-assign]
            line = "[%(asctime)s %(levelname)s %(name)s:%(lineno)d] %(message)s"
            handler.setFormatter(logging.Formatter(line))
            stack.enter_context(contextlib.suppress(OSError))  # of close: a full disk
            stack.callback(handler.close)
            logging.getLogger().addHandler(handler)
            stack.callback(logging.getLogger().removeHandler, handler)
            self._rewrite(-1 if resume_step is None else resume_step)
            write_json(path / "meta.json", self._meta)
            self._resources = stack.pop_all()

    def close(self, exit_status: int, **end: Any) -> None:
        """Writes the end of the run, with entries of `end`, to meta.json."""
        end |= {"successful": exit_status == 0, "exit_status": exit_status}
        self._meta |= {**end, "date_end": now()}
        try:
            write_json(self.path / "meta.json", self._meta)
        except OSError as failure:  # don't hide an earlier error
            log.warning("Cannot write the end of the run to meta.json: %s", failure)
        self._resources.close()

    def log(self, row: Mapping[str, float | None]) -> None:
        """Appends a row to logs.csv, with _tick (0, 1, ...) and _time (Unix seconds).

        A key that is new becomes the last column. None, NaN and missing values give an
        empty cell. Floats are written exactly. Raises RunFileError if the row can't be
        written; logs.csv is unchanged then.
        """
        full = join_columns({"_tick": self._tick, "_time": time.time()}, row)
        with writing(self._logs):
            if new := [name for name in full if name not in self._columns]:
                self._columns += new
                self._rewrite()
            cells = (full.get(name) for name in self._columns)
            line = ",".join("" if x is None or x != x else repr(x) for x in cells)
            rest = memoryview(f"{line}\n".encode())
            with self._logs.open("ab", buffering=0) as file:
                end = file.tell()
                try:
                    while rest:  # a disk that fills up takes a part first, then raises
                        rest = rest[file.write(rest) :]
                except OSError:
                    file.truncate(end)
                    raise
        self._tick += 1

    def _rewrite(self, last_step: float = math.inf) -> None:
        """Gives logs.csv all columns, and cuts the rows after last_step."""
        with atomic_write(self._logs) as file:
            writer = csv.DictWriter(
                codecs.getwriter("utf-8")(file), self._columns, lineterminator="\n"
            )
            if self._columns:
                writer.writeheader()
            for row in read_rows(self.path):
                with using(self._logs, "is damaged"):
                    if float(row["step"]) > last_step:
                        break
                    self._tick = int(row["_tick"]) + 1
                writer.writerow(row)


def read_rows(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """The complete rows of a run's logs.csv; none without the file."""
    path = folder / "logs.csv"
    if path.exists():
        with using(path), path.open(newline="") as file:
            yield from csv.DictReader(line for line in file if line.endswith("\n"))


def read_meta(folder: pathlib.Path) -> dict[str, Any]:
    """The content of meta.json; {} if the file is missing, or damaged: it warns."""
    path = folder / "meta.json"
    try:
        return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}
    except Exception as error:  # a damaged file may raise anything
        log.warning("%s is ignored: %s", path, error)
        return {}


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Replaces a file in one step. Raises OSError; then the file is unchanged."""
    text = json.dumps(strict_json(content), indent=2, default=str)
    with atomic_write(path) as file:
        file.write(f"{text}\n".encode())


def strict_json(x: Any) -> Any:
    """Infinity and NaN, which JSON lacks, as "inf", "-inf" and "nan"."""
    if isinstance(x, dict):
        return {k: strict_json(value) for k, value in x.items()}
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def now() -> str:
    """The date in UTC, for meta.json and test.json."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
