"""The folder of a run: its lock, logs.csv, meta.json, out.log and the link `latest`."""

from __future__ import annotations

import contextlib
import csv
import datetime
import fcntl
import importlib.metadata
import io
import json
import logging
import math
import mmap
import os
import pathlib
import platform
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from torchbeast.base.errors import FileError, FlagError, UserError, using
from torchbeast.base.hardware import hardware
from torchbeast.core.columns import join_columns

log = logging.getLogger(__name__)

PACKAGES = ("torchbeast", "torch", "numpy", "gymnasium", "ale-py", "minatar")
SLURM = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
ERROR_LENGTH = 1000  # characters of an error in meta.json; out.log has all of them


class RunBusyError(UserError, BlockingIOError):
    """Another process writes to the run."""


class RunFileError(UserError, OSError):
    """A file or folder of a run can't be written; the message names it."""


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Turns an OSError into a RunFileError that names its file, or else `path`."""
    try:
        yield
    except UserError:  # the message is good already
        raise
    except OSError as error:
        raise RunFileError(
            f"Cannot write {error.filename or path}: {error.strerror or error}. The "
            "files written so far are intact. Free some space or make the folder "
            "writable, then start the same command again; or choose another --savedir."
        ) from None


@contextlib.contextmanager
def atomic_write(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Yields a file that replaces `path` once it is on the disk, or not at all.

    One writer at a time: a killed process leaves at most one temporary file behind.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # it may be a link to another file
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some network file systems can't
        os.fsync(folder)  # so that the new name survives a power failure
    os.close(folder)


class RunFolder:
    """The folder savedir/xpid, made and locked. An empty one is removed at the end.

    Raises:
      FlagError: xpid is not a plain name.
      RunBusyError: another process has locked the folder.
      RunFileError: the folder can't be made.
    """

    def __init__(self, savedir: str, xpid: str) -> None:
        check_name(xpid, savedir)
        self.path = pathlib.Path(os.path.abspath(os.path.expanduser(savedir)), xpid)
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise RunBusyError(
                f"Another process writes to this run, {self.path}. Wait for it, end "
                "it, or choose another --xpid (for a sweep: --name)"
            ) from None
        except OSError as error:  # some network file systems have no locks
            log.warning("Cannot lock %s: start one process only. %s", self.path, error)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it is not empty
            self.path.rmdir()
        os.close(self._descriptor)


def check_name(xpid: str, savedir: str, flag: str = "--xpid") -> None:
    """Raises FlagError if xpid is no plain name for a folder in savedir."""
    if xpid in ("", ".", "..", "latest") or "/" in xpid or "\0" in savedir + xpid:
        raise FlagError(
            f"{flag} names a folder in {savedir!r}, so it must be one plain name "
            f'without "/" and other than "latest", got {xpid!r}'
        )


class _OutLog(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk ends the run at the next row of logs.csv, with one message."""


class FileWriter:
    """Writes the files of one start of a run. Thread-safe.

    out.log     the output of the root logger while this object is open, appended
    logs.csv    one row per call of `log`; the first line names the columns
    meta.json   flags, commit, versions, hardware, dates and the end of the newest
                start; `starts` has the same of every start

    savedir/latest links to the run that was started last.

    Args:
      folder: of the run, locked; the caller closes it.
      args: the flags. Values that JSON lacks are written as str(value).
      resume_step: of the checkpoint: later rows of logs.csv are cut. None: all.
      about: more entries of this start for meta.json.

    Raises:
      FileError: another program wrote logs.csv, or a row to cut is damaged.
      RunFileError: a file can't be written.
    """

    def __init__(
        self,
        folder: RunFolder,
        args: Mapping[str, Any],
        resume_step: int | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self.path, self._logs = folder.path, folder.path / "logs.csv"
        self._columns: list[str] = []
        self._tick = 0
        old, date = read_meta(self.path), now()
        self._start: dict[str, Any] = {
            "args": dict(args),
            "preset": args.get("preset"),
            "slurm": {k: x for k, x in os.environ.items() if k in SLURM},
            **provenance(),
            **(about or {}),
            **{"date_start": date, "first_step": resume_step or 0},
            # If this start is killed, its entry stays like this.
            **{"date_end": None, "successful": False, "exit_status": None},
        }
        self._starts = [*old.get("starts", ()), self._start]
        self._of_run = {"xpid": self.path.name, "date_start": date, "resumed": []}
        if resume_step is not None:
            self._of_run["date_start"] = old.get("date_start", date)
            self._of_run["resumed"] = [*old.get("resumed", ()), date]
        with contextlib.ExitStack() as stack, writing(self.path):
            self._attach(stack)
            self._file = stack.enter_context(self._logs.open("a+b", buffering=0))
            self._cut(-1 if resume_step is None else resume_step)
            self._write_meta()
            _link_latest(self.path)
            self._resources = stack.pop_all()

    def _attach(self, stack: contextlib.ExitStack) -> None:
        handler = _OutLog(
            self.path / "out.log", encoding="utf-8", errors="backslashreplace"
        )
        line = "[%(asctime)s %(levelname)s %(process)d %(name)s:%(lineno)d] %(message)s"
        handler.setFormatter(logging.Formatter(line))
        stack.enter_context(contextlib.suppress(OSError))  # to close it on a full disk
        stack.callback(handler.close)
        logging.getLogger().addHandler(handler)
        stack.callback(logging.getLogger().removeHandler, handler)

    def close(self, exit_status: int, **end: Any) -> None:
        """Writes the end of the run, with entries of `end`, to meta.json.

        exit_status is 0 finished, 1 failed, 128 + n ended by signal n.
        """
        if error := end.get("error"):
            end["error"] = error[:ERROR_LENGTH]
        end |= {"successful": exit_status == 0, "exit_status": exit_status}
        with self._lock:
            self._start |= {**end, "date_end": now()}
            try:
                self._write_meta()
            except OSError as failure:  # don't hide an earlier error
                log.warning("Cannot write the end of the run to meta.json: %s", failure)
            self._resources.close()

    def _write_meta(self) -> None:
        meta = {**self._start, **self._of_run, "starts": self._starts}
        write_json(self.path / "meta.json", meta)

    def log(self, row: Mapping[str, float | None]) -> None:
        """Appends a row to logs.csv, with _tick (0, 1, ...) and _time (Unix seconds).

        A key that is new becomes the last column. None, NaN and missing values give an
        empty cell. Floats are written exactly: float(cell) is the same number.

        Raises:
          ColumnError: `row` has a key _tick or _time.
          RunFileError: the row can't be written; logs.csv is unchanged.
        """
        with self._lock, writing(self._logs):
            full = join_columns({"_tick": self._tick, "_time": time.time()}, row)
            if new := [name for name in full if name not in self._columns]:
                self._add_columns(new)
            cells = (full.get(name) for name in self._columns)
            line = ",".join("" if x is None or x != x else repr(x) for x in cells)
            end = self._file.seek(0, os.SEEK_END)
            rest = memoryview(f"{line}\n".encode())
            try:
                while rest:  # a disk that fills up takes a part first, then raises
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(end)
                raise
            self._tick += 1

    def _add_columns(self, new: list[str]) -> None:
        header = io.StringIO()
        csv.writer(header, lineterminator="\n").writerow([*self._columns, *new])
        with self._logs.open("rb") as old, atomic_write(self._logs) as whole:
            old.readline()
            whole.write(header.getvalue().encode())
            for line in old:
                whole.write(line[:-1] + b"," * len(new) + b"\n")
        self._file.close()
        self._file = self._resources.enter_context(self._logs.open("ab", buffering=0))
        self._columns += new

    def _cut(self, last_step: int) -> None:
        """Cuts the rows after last_step; reads no others, for there can be many."""
        if last_step < 0 or not self._file.seek(0, os.SEEK_END):
            self._file.truncate(0)
            return
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            end = last = data.rfind(b"\n") + 1
            first_row = data.find(b"\n") + 1
            self._columns = _cells(data[:first_row])
            if end and self._columns[:2] != ["_tick", "_time"]:
                raise FileError(f"{self._logs}: another program wrote it. Move it away")
            while end > first_row:
                begin = data.rfind(b"\n", 0, end - 1) + 1
                try:
                    cells = _cells(data[begin:end])
                    row = dict(zip(self._columns, cells, strict=True))
                    if float(row.get("step") or "inf") <= last_step:
                        self._tick = int(row["_tick"]) + 1
                        break
                except (ValueError, csv.Error) as error:
                    if end != last:  # a power failure damages only the last line
                        why = f"{error} in the row {data[begin:end]!r:.99}"
                        raise FileError(f"{self._logs} is damaged: {why}") from error
                end = begin
        self._file.truncate(end)


def _cells(line: bytes) -> list[str]:
    return next(csv.reader([line.decode(errors="replace")]), [])


def read_rows(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """The complete rows of a run's logs.csv; none without the file."""
    path = folder / "logs.csv"
    if path.exists():
        with using(path), path.open(newline="") as file:
            yield from csv.DictReader(line for line in file if line.endswith("\n"))


def _link_latest(folder: pathlib.Path) -> None:
    """Lets savedir/latest name this run."""
    # A unique name, because several runs may start at the same time.
    link = folder.with_name(f".latest.{os.getpid()}")
    try:
        link.symlink_to(folder.name, target_is_directory=True)
        link.replace(folder.with_name("latest"))  # fails if that is a folder
    except OSError as error:
        link.unlink(missing_ok=True)
        log.warning("Cannot link %s/latest to the run: %s", folder.parent, error)


def provenance() -> dict[str, Any]:
    """The code and the machine: git state, versions, hardware."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {"git": _git_state(), "versions": versions, "hardware": hardware()}


def run_git(*words: str, **variables: str) -> bytes:
    """What git prints about the folder of this file.

    Raises:
      OSError, subprocess.SubprocessError: there is no git or no checkout.
    """
    command = ["git", "-C", str(pathlib.Path(__file__).parent), *words]
    env = {**os.environ, **variables}
    return subprocess.check_output(
        command, stderr=subprocess.DEVNULL, timeout=10, env=env
    )


def _git_state() -> dict[str, Any] | None:
    """The commit of the checkout with this file, and whether files were changed."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if run_git("ls-files", "--", __file__):  # else it is that of another project
            dirty = bool(run_git("status", "--porcelain", "--untracked-files=no"))
            commit = run_git("rev-parse", "HEAD").decode().strip()
            return {"commit": commit, "dirty": dirty}
    return None


def read_meta(folder: pathlib.Path) -> dict[str, Any]:
    """The content of meta.json; {} if the file is missing, or damaged: it warns."""
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text("utf-8"), object_hook=_with_infinities)
        parts = [meta, meta.get("args", {}), *meta.get("starts", ())]
        if all(isinstance(part, dict) for part in parts):
            return meta
        log.warning("%s is ignored: it is not the meta.json of a run", path)
    except FileNotFoundError:
        pass
    except Exception as error:  # a damaged file may raise anything
        log.warning("%s is damaged and is ignored: %s", path, error)
    return {}


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Replaces a file in one step. Raises OSError; then the file is unchanged."""
    text = json.dumps(strict_json(content), indent=2, default=str)
    with atomic_write(path) as file:
        file.write(f"{text}\n".encode())


def strict_json(nested: Any) -> Any:
    """Infinity and NaN, which JSON lacks, as "inf", "-inf" and "nan"."""
    if isinstance(nested, dict):
        return {k: strict_json(x) for k, x in nested.items()}
    is_number = isinstance(nested, float)
    return str(nested) if is_number and not math.isfinite(nested) else nested


def _with_infinities(values: dict[str, Any]) -> dict[str, Any]:
    """The reverse of strict_json, for each object of a file."""
    return {k: float(x) if x in ("inf", "-inf") else x for k, x in values.items()}


def now() -> str:
    """The date in UTC, for meta.json and test.json."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
