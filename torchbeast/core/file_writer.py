"""The files of one run: out.log, logs.csv, fields.csv, meta.json and the link latest.

This module does not import torch, so that light processes can use it too.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import errno
import fcntl
import importlib.metadata
import io
import json
import logging
import math
import os
import pathlib
import platform
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, BinaryIO

from torchbeast.core.errors import UserError

log = logging.getLogger(__name__)

# The environment variables in meta.json: these and no others, because the
# environment of a process often holds passwords and tokens.
ENVIRONMENT_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "KMP_AFFINITY",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
SLURM_VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_RESTART_COUNT",
)
ERROR_LENGTH = 1000  # characters of an error that meta.json keeps; out.log has all
ROOM_FOR_THE_END = 2048  # bytes of meta.json that its end may need on a full disk
PACKAGES = ("torchbeast", "torch", "numpy", "gymnasium", "ale-py", "minatar")


@contextlib.contextmanager
def atomic_write(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Replace `path` by what is written to the binary file that this yields.

    The bytes go to a temporary file beside `path`, reach the disk, and only then take
    its name: a reader, a crash or a full disk meets the old file or the new one, never
    a part. The temporary name is fixed, so that a killed process leaves at most one;
    hence one writer at a time.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: pathlib.Path) -> None:
    """Make the renames done in `folder` outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RunExistsError(UserError, FileExistsError):
    """The run was started before, and can't go on."""


class RunBusyError(UserError, BlockingIOError):
    """Another process writes to the run."""


class RunFileError(UserError, OSError):
    """A file or folder of a run cannot be made or written; the message names it."""


class ColumnError(UserError, ValueError):
    """Two columns of logs.csv have one name."""


def join_columns(*rows: Mapping[str, Any]) -> dict[str, Any]:
    """One row of logs.csv from several, whose names have to differ.

    Raises:
        ColumnError: two have the same name.
    """
    joined: dict[str, Any] = {}
    for row in rows:
        if twice := sorted(joined.keys() & row.keys()):
            raise ColumnError(
                f"logs.csv would have two columns named {', '.join(twice)}: give an "
                "auxiliary loss (Net.auxiliary_losses), or what else a fork logs, a "
                "name of its own"
            )
        joined |= row
    return joined


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Turns an OSError into a RunFileError that names the place.

    Args:
        path: the place, if the error does not name one.
    """
    try:
        yield
    except UserError:  # its message says all
        raise
    except OSError as error:
        raise RunFileError(
            f"Cannot write {error.filename or path}: {error.strerror or error}. What "
            "was there before is untouched. Free some space or make it writable, then "
            "start the same command again; or choose another --savedir."
        ) from None


class RunFolder:
    """The folder savedir/xpid, which one process at a time may have open.

    It is made if it is missing, and removed by `close` if nothing was put into it.

    Args:
        savedir: the folder of all runs; `~` is expanded.
        xpid: the run's name, one path component.

    Raises:
        ValueError: xpid is not a plain name.
        RunBusyError: another process has it open.
        RunFileError: it cannot be made.
    """

    def __init__(self, savedir: str, xpid: str) -> None:
        if xpid in ("", ".", "..", "latest") or "/" in xpid or "\0" in xpid:
            raise ValueError(
                f"xpid is {xpid!r}; it names a folder in {savedir}, so it must be one "
                'plain name without "/" and other than "latest".'
            )
        self.path = pathlib.Path(os.path.abspath(os.path.expanduser(savedir)), xpid)
        self._descriptor = -1
        with writing(self.path):
            while self._descriptor < 0:
                try:
                    self.path.mkdir(parents=True, exist_ok=True)
                except FileExistsError:  # as a file
                    raise NotADirectoryError(
                        errno.ENOTDIR, "it is not a folder", str(self.path)
                    ) from None
                descriptor = _lock_folder(self.path)
                # Another process may have removed the folder just before the lock.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), self.path.stat()):
                        self._descriptor = descriptor
                if self._descriptor < 0:
                    os.close(descriptor)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self.path.rmdir()  # fails if there is anything in it
            os.close(self._descriptor)
            self._descriptor = -1


class FileWriter:
    """The files of one run, in the folder savedir/xpid.

    out.log     what the root logger got while this object was open, appended
    logs.csv    one line per call of `log`; the first line names the columns
    fields.csv  one line per set of columns that logs.csv has had, the last is valid
    meta.json   args, git state, Slurm ids, versions, dates, and how the run ended, of
                the newest start; `starts` has the same of every start
    savedir/latest is a link to the run that was started last.

    One process writes to a run at a time: the folder is locked until `close`.

    Args:
        savedir: the folder of all runs; `~` is expanded; created where missing.
        xpid: the run's name, one path component.
        args: the run's flags. Values that JSON lacks are written as str(value).
        resume_step: None for a new run. For one that goes on from a checkpoint, the
            step of the checkpoint: lines of logs.csv from the first larger step on are
            cut away, as is an unfinished last line, and _tick goes on from the last
            line kept.
        folder: the run's folder, if the caller has locked it; the caller closes it.
        anew: cut all lines of a run that was started before, if resume_step is None.

    Raises:
        ValueError: xpid is not a plain name, or logs.csv cannot be understood.
        RunExistsError: logs.csv has content, resume_step is None and anew is False.
        RunBusyError: another process writes to this run.
        RunFileError: a file cannot be written.
    """

    path: pathlib.Path

    def __init__(
        self,
        savedir: str,
        xpid: str,
        args: Mapping[str, Any],
        resume_step: int | None = None,
        folder: RunFolder | None = None,
        anew: bool = False,
    ) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._columns: list[str] = []
        self._tick = 0
        with contextlib.ExitStack() as stack:
            if folder is None:
                folder = stack.enter_context(RunFolder(savedir, xpid))
            self.path = folder.path
            self._logs = self.path / "logs.csv"
            self._meta_path = self.path / "meta.json"
            started = has_content(self._logs)
            if started and resume_step is None and not anew:
                raise RunExistsError(
                    f"{self._logs} exists: a run {xpid!r} was started before. Resume "
                    "it from its checkpoint, choose another --xpid, or remove "
                    f"{self.path}."
                )
            with writing(self.path):
                stack.callback(_detach, _attach(self.path / "out.log"))
                if started:
                    self._cut_logs(resume_step)
                self._file = stack.enter_context(self._logs.open("ab", buffering=0))
                self._meta = self._start_meta(xpid, args, resume_step)
                self._write_meta(reserve=ROOM_FOR_THE_END)
                _link_latest(self.path.with_name("latest"), xpid)
            self._resources = stack.pop_all()

    def log(self, row: Mapping[str, Any]) -> None:
        """Append one line to logs.csv, with _tick (0, 1, …) and _time (Unix seconds).

        None and NaN give an empty cell, as does a column that `row` lacks. Floats are
        written so that float(cell) is the same number. A key seen for the first time
        becomes a new last column. May be called from several threads.

        Raises:
            ColumnError: `row` has a key _tick or _time.
            RuntimeError: the writer is closed.
            RunFileError: the line cannot be written; then logs.csv is as it was.
        """
        if "_tick" in row or "_time" in row:
            raise ColumnError(f"_tick and _time are added by log(); got {list(row)}.")
        with self._lock, writing(self._logs):
            if self._closed:
                raise RuntimeError(f"log() after close() on the run {self.path}.")
            full = {"_tick": self._tick, "_time": time.time(), **row}
            new = [name for name in full if name not in self._columns]
            if new:
                self._add_columns(new)
            self._append(_csv([[_cell(full.get(name)) for name in self._columns]]))
            self._tick += 1

    def close(
        self,
        successful: bool,
        last_step: int | None = None,
        exit_status: int | None = None,
        signal: str | None = None,
        error: str | None = None,
    ) -> None:
        """Write how and when the run ended to meta.json, and release the files.

        A second call does nothing. A full disk does not raise, so that the error which
        ended the run is not hidden by one from here: it is logged.

        Args:
            successful: whether the run got to its end.
            last_step: where it got to.
            exit_status: of the process.
            signal: the name of the signal that asked for the end.
            error: what ended the run, if it failed.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            end = {"successful": successful, "date_end": _now()}
            self._meta |= end
            self._meta["starts"][-1] |= end | {
                "last_step": last_step,
                "exit_status": exit_status,
                "signal": signal,
                "error": error[:ERROR_LENGTH] if error else error,
            }
            try:
                self._write_meta()
            except OSError as failure:
                log.warning("Cannot write the end of the run to meta.json: %s", failure)
            self._resources.close()

    def _cut_logs(self, resume_step: int | None) -> None:
        """Keeps the lines up to a step; none if it is None."""
        columns, rows, complete = _read_csv(self._logs)
        if columns and columns[:2] != ["_tick", "_time"]:
            raise ValueError(
                f"{self._logs} begins with the columns {columns[:2]}, expected _tick "
                "and _time: it was not written by this class. Move it away."
            )
        kept: list[list[str]] = []
        for number, row in enumerate(rows):
            try:
                cells = dict(zip(columns, row, strict=True))
                int(cells["_tick"])
                step = float(cells.get("step") or "-inf")
            except ValueError as error:
                if number < len(rows) - 1:
                    raise ValueError(
                        f"Row {number + 1} below the header of {self._logs} is damaged "
                        f"({row}: {error}). Repair it or move the file away."
                    ) from error
                break  # A power cut can leave rubbish in the last line only.
            if resume_step is None or step > resume_step:
                break
            kept.append(row)
        if not complete or len(kept) < len(rows):
            lines = len(rows) + (not complete)
            if resume_step is None:
                log.info("Starting anew: %d lines of logs.csv are cut.", lines)
            else:
                log.info(
                    "Resuming at step %d: %d of %d lines of logs.csv are kept.",
                    *(resume_step, len(kept), lines),
                )
            with atomic_write(self._logs) as file:
                file.write(_csv([columns, *kept] if columns else []))
        self._columns = columns
        self._tick = int(kept[-1][0]) + 1 if kept else 0
        self._note_fields()

    def _add_columns(self, new: list[str]) -> None:
        _, rows, _ = _read_csv(self._logs)
        columns = self._columns + new
        with atomic_write(self._logs) as whole:
            whole.write(_csv([columns, *(row + [""] * len(new) for row in rows)]))
        file = self._resources.enter_context(self._logs.open("ab", buffering=0))
        self._file.close()
        self._file = file
        self._columns = columns
        self._note_fields()

    def _note_fields(self) -> None:
        """Add the current columns to fields.csv unless its last line has them."""
        path = self.path / "fields.csv"
        old = path.read_bytes() if path.exists() else b""
        line = _csv([self._columns])
        if self._columns and old.splitlines(keepends=True)[-1:] != [line]:
            with atomic_write(path) as file:
                file.write(old + line)

    def _append(self, line: bytes) -> None:
        end = self._file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(line)
            while rest:  # A disk that fills up takes a part first, then raises.
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(end)
            raise OSError(error.errno, error.strerror, str(self._logs)) from error

    def _start_meta(
        self, xpid: str, args: Mapping[str, Any], resume_step: int | None
    ) -> dict[str, Any]:
        old = read_meta(self.path)
        first = old if resume_step is not None else {}
        now = _now()
        start = {
            "args": dict(args),
            "git": _git_state(),
            "slurm": _environment(SLURM_VARIABLES) or None,
            "env": _environment(ENVIRONMENT_VARIABLES),
            "versions": _versions(),
        }
        # Of a start that is killed, the entry stays as it is here.
        entry = {
            "date_start": now,
            "date_end": None,
            "first_step": resume_step or 0,
            "last_step": None,
            "successful": False,
            "exit_status": None,
            "signal": None,
            "error": None,
            "flags": start["args"],
            **{name: value for name, value in start.items() if name != "args"},
        }
        resumed = first.get("resumed", [])
        return {
            "xpid": xpid,
            **start,
            "date_start": first.get("date_start", now),
            "date_end": None,
            "resumed": resumed if resume_step is None else [*resumed, now],
            "successful": False,
            "starts": [*old.get("starts", []), entry],
        }

    def _write_meta(self, reserve: int = 0) -> None:
        """Args: reserve: bytes to fill up with spaces, which JSON allows."""
        text = json.dumps(self._meta, indent=2, default=str)
        data = f"{text}{' ' * reserve}\n".encode()
        try:
            with atomic_write(self._meta_path) as file:
                file.write(data)
        except OSError:
            # A full disk has no room for a second file, but the blocks that meta.json
            # owns can still be written, and it must say how the run ended.
            if not self._meta_path.exists():
                raise
            if len(data) > self._meta_path.stat().st_blocks * 512:
                raise
            with self._meta_path.open("r+b") as file:
                file.write(data)
                file.truncate()


def has_content(path: pathlib.Path) -> bool:
    """Whether there is a file that is not empty."""
    return path.exists() and path.stat().st_size > 0


def read_meta(folder: pathlib.Path) -> dict[str, Any]:
    """What the meta.json of a run says; {} if there is none, or none to be read."""
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(meta, dict) or not isinstance(meta.get("starts", []), list):
            raise ValueError(f"it holds {str(meta)[:80]!r}")
        return meta
    except FileNotFoundError:
        return {}
    except ValueError as error:
        log.warning("%s is damaged and begun anew: %s", path, error)
        return {}


class _OutLog(logging.FileHandler):
    """A log file that says once, not at every line, that it cannot be written."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            if sys.stderr:
                sys.stderr.write(
                    f"Cannot write {self.baseFilename}: {sys.exc_info()[1]}\n"
                )


def _attach(path: pathlib.Path) -> logging.Handler:
    handler = _OutLog(path, encoding="utf-8")
    handler.setFormatter(
        logging.Formatter(
            "[%(asctime)s %(levelname)s %(process)d %(name)s:%(lineno)d] %(message)s"
        )
    )
    logging.getLogger().addHandler(handler)
    return handler


def _detach(handler: logging.Handler) -> None:
    logging.getLogger().removeHandler(handler)
    with contextlib.suppress(OSError):  # Said already, by handleError.
        handler.close()


def _lock_folder(folder: pathlib.Path) -> int:
    """Lock `folder` for this process; closing the returned descriptor unlocks it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RunBusyError(
            error.errno,
            "Another process writes to this run. Wait for it, end it, or choose "
            "another --xpid",
            str(folder),
        ) from error
    except OSError as error:  # Some network file systems have no locks.
        log.warning("Cannot lock %s (%s): start one process only.", folder, error)
    return descriptor


def _link_latest(link: pathlib.Path, target: str) -> None:
    if link.exists() and not link.is_symlink():
        log.warning("%s is not a symbolic link and is left as it is.", link)
        return
    # Runs that start together each need a name of their own for the new link.
    temporary = link.with_name(f".latest.{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.symlink_to(target, target_is_directory=True)
        temporary.replace(link)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        log.warning("Cannot link %s to %s: %s", link, target, error)


def _csv(rows: Iterable[Sequence[str]]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue().encode()


def _read_csv(path: pathlib.Path) -> tuple[list[str], list[list[str]], bool]:
    """The header, the rows, and whether the last line was finished (else left out)."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    # A power cut can leave zeros, which csv refuses before Python 3.11.
    text = data[:end].decode("utf-8", errors="replace").replace("\0", "\ufffd")
    lines = list(csv.reader(io.StringIO(text, newline="")))
    return (lines[0] if lines else []), lines[1:], end == len(data)


def _cell(value: Any) -> str:
    if hasattr(value, "item"):  # NumPy scalars and tensors of one element
        value = value.item()
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return value if isinstance(value, str) else repr(value)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _environment(names: Iterable[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _git_state() -> dict[str, Any] | None:
    """Commit, branch and dirtiness of the checkout that this file is part of, if any.

    None where GitPython or git is missing and where the package is installed.
    """
    try:
        import git
    except ImportError:
        return None
    try:
        with git.Repo(
            pathlib.Path(__file__).parent, search_parent_directories=True
        ) as repo:
            if not repo.git.ls_files("--", __file__):
                return None  # An environment inside somebody else's checkout.
            return {
                "commit": repo.head.commit.hexsha,
                "branch": None if repo.head.is_detached else repo.active_branch.name,
                "dirty": repo.is_dirty(),
            }
    except (git.GitError, ValueError, OSError) as error:
        log.warning("The git state stays unknown: %s", error)
        return None
