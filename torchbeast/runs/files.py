"""The folder of a run: its lock, meta.json, logs.csv, out.log, the link `latest`."""

from __future__ import annotations

import contextlib
import csv
import datetime
import errno
import fcntl
import gzip
import importlib.metadata
import io
import json
import logging
import math
import os
import pathlib
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from torchbeast.base.errors import FileError, FlagError, UserError, using
from torchbeast.base.hardware import hardware
from torchbeast.core.columns import join_columns
from torchbeast.tools.protocol import describe, find_protocol

log = logging.getLogger(__name__)


class RunBusyError(UserError, BlockingIOError):
    """Another process writes to the run."""


class RunFileError(UserError, OSError):
    """A file or folder of a run can't be written; the message names it."""


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Turns an OSError into a RunFileError.

    Args:
      path: for the message, if the OSError does not name a file.
    """
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
    """Yields a binary file whose content replaces `path` in one step.

    The bytes go to a temporary file in the same folder. It is renamed to `path` only
    after they have reached the disk. So a reader finds the old file or the new one,
    never a part, even after a crash or on a full disk.

    One writer at a time: the temporary file always has the same name, so that a killed
    process leaves at most one behind.
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
    sync_folder(path.parent)


def sync_folder(folder: pathlib.Path) -> None:
    """Makes renames in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems of networks and virtual machines have no such call.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def check_name(xpid: str, savedir: str, flag: str = "--xpid") -> None:
    """Raises FlagError if xpid is no plain name for a folder in savedir."""
    if xpid in ("", ".", "..", "latest") or "/" in xpid or "\0" in savedir + xpid:
        raise FlagError(
            f"{flag} names a folder in {savedir!r}, so it must be one plain name "
            f'without "/" and other than "latest", got {xpid!r}'
        )


class RunFolder:
    """The folder savedir/xpid, locked for this process.

    It is created if it does not exist. `close` removes it if it is empty.

    Args:
      savedir: the folder of all runs; `~` is expanded.
      xpid: the name of the run, one path component.

    Raises:
      FlagError: xpid is not a plain name.
      RunBusyError: another process has locked the folder.
      RunFileError: the folder can't be created.
    """

    def __init__(self, savedir: str, xpid: str) -> None:
        check_name(xpid, savedir)
        self.path = pathlib.Path(os.path.abspath(os.path.expanduser(savedir)), xpid)
        with writing(self.path):
            while True:
                with contextlib.suppress(FileExistsError):
                    self.path.mkdir(parents=True)
                self._descriptor = _lock_folder(self.path)
                # Another process may have removed the folder just before the lock.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(self._descriptor), self.path.stat()):
                        return
                os.close(self._descriptor)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it is not empty
            self.path.rmdir()
        os.close(self._descriptor)


def _lock_folder(folder: pathlib.Path) -> int:
    """Locks `folder` for this process; closing the returned descriptor unlocks it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RunBusyError(
            error.errno,
            "Another process writes to this run. Wait for it, end it, or choose "
            "another --xpid (for a sweep: --name)",
            str(folder),
        ) from error
    except OSError as error:  # some network file systems have no locks
        log.warning(
            "Cannot lock %s (%s). Start only one process for this run.", folder, error
        )
    return descriptor


# --- logs.csv

# Columns about an evaluation of the weights of `eval_step`, see evaluator.py.
EVAL_COLUMNS = ("eval_step", "eval_return", "eval_length")


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
          row: plain numbers, see core/columns.py: spread.

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


# --- meta.json

GIT_SECONDS = 10.0  # time limit for each of git's answers

# meta.json has these environment variables and no others, because others may hold
# passwords and tokens.
ENVIRONMENT_VARIABLES = (
    *("CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES", "KMP_AFFINITY"),
    *("MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "OMP_PROC_BIND"),
    *("OPENBLAS_NUM_THREADS", "PYTHONHASHSEED", "PYTORCH_ALLOC_CONF"),
    "PYTORCH_CUDA_ALLOC_CONF",
)
SLURM_VARIABLES = (
    *("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_STEP_ID"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
    "SLURM_RESTART_COUNT",
)
_OF_THE_NEWEST = ("args", "flags_signature")  # entries that a start lacks
ERROR_LENGTH = 1000  # characters of an error in meta.json; out.log has all of them
PACKAGES = ("torchbeast", "torch", "numpy", "gymnasium", "ale-py", "minatar")


class FileWriter:
    """The files of one run, in the folder savedir/xpid. Thread-safe.

    out.log     the output of the root logger while this object is open, appended
    logs.csv    one row per call of `log`; the first line names the columns
    fields.csv  one line for each set of columns that logs.csv has had; the last counts
    meta.json   flags, preset, protocol, git state, versions, hardware, Slurm ids, dates
                and the end of the newest start; `starts` has the same of every start

    savedir/latest links to the run that was started last. The folder is locked until
    folder is closed, so one process at a time writes to a run.

    Args:
      folder: of the run; the caller closes it.
      args: the flags. Values that JSON lacks are written as str(value).
      resume_step: the step of the checkpoint, if the run is resumed. Rows of logs.csv
        from the first larger step on are cut; if it is None, all rows.
      about: more entries of this start for meta.json, such as the signature of the
        flags and their differences from the preset.

    Raises:
      FileError: logs.csv is damaged.
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
        self.path = folder.path
        with contextlib.ExitStack() as stack, writing(self.path):
            stack.callback(_detach, _attach(self.path / "out.log"))
            self._logs = LogsCsv(self.path, resume_step)
            stack.callback(self._logs.close)
            self._meta = self._start_meta(args, resume_step, about or {})
            write_json(self.path / "meta.json", self._meta)
            _link_latest(self.path.with_name("latest"), self.path.name)
            self._resources = stack.pop_all()

    def log(self, row: Mapping[str, float | None]) -> None:
        """Appends a row, see LogsCsv.write. Raises ColumnError or RunFileError."""
        with self._lock, writing(self._logs.path):
            self._logs.write(row)

    def close(
        self,
        exit_status: int,
        last_step: int | None = None,
        error: str | None = None,
        timings: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes the end of the run to meta.json and closes the files.

        If meta.json can't be written, this logs a warning and does not raise, so that
        it hides no earlier error.

        Args:
          exit_status: 0 finished, 1 failed, 128 + n ended by signal n.
          last_step: the step that the run reached.
          error: what ended it, if it failed.
          timings: shares of the time of each part.
        """
        with self._lock:
            end = {"successful": exit_status == 0, "date_end": now()}
            self._meta |= {**end, "timings": timings or {}}
            by = signal.Signals(exit_status - 128).name if exit_status > 128 else None
            self._meta["starts"][-1] |= end | {
                "last_step": last_step,
                "exit_status": exit_status,
                "signal": by,
                "error": error[:ERROR_LENGTH] if error else error,
            }
            try:
                write_json(self.path / "meta.json", self._meta)
            except OSError as failure:
                log.warning("Cannot write the end of the run to meta.json: %s", failure)
            self._resources.close()

    def _start_meta(
        self,
        args: Mapping[str, Any],
        resume_step: int | None,
        about: Mapping[str, Any],
    ) -> dict[str, Any]:
        old = read_meta(self.path)
        date = now()
        is_new = resume_step is None
        protocol = find_protocol(args)
        start = {
            "args": dict(args),
            "preset": args.get("preset"),
            "protocol": protocol,
            "protocol_text": describe(protocol),
            **provenance(),
            **about,
            "slurm": _environment(SLURM_VARIABLES) or None,
            "env": _environment(ENVIRONMENT_VARIABLES),
        }
        # If this start is killed, its entry stays like this.
        entry = {
            "date_start": date,
            "date_end": None,
            "first_step": resume_step or 0,
            "last_step": None,
            "successful": False,
            "exit_status": None,
            "signal": None,
            "error": None,
            "flags": start["args"],
            **{name: start[name] for name in start if name not in _OF_THE_NEWEST},
        }
        return {
            "xpid": self.path.name,
            **start,
            "date_start": date if is_new else old.get("date_start", date),
            "date_end": None,
            "resumed": [] if is_new else [*old.get("resumed", []), date],
            "successful": False,
            "starts": [*old.get("starts", []), entry],
        }


class _OutLog(logging.FileHandler):
    """A log file that reports only the first failed write."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            if sys.stderr:
                sys.stderr.write(
                    f"Cannot write {self.baseFilename}: {sys.exc_info()[1]}\n"
                )


def _attach(path: pathlib.Path) -> logging.Handler:
    # A text may have bytes that are not UTF-8.
    handler = _OutLog(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(
        logging.Formatter(
            "[%(asctime)s %(levelname)s %(process)d %(name)s:%(lineno)d] %(message)s"
        )
    )
    logging.getLogger().addHandler(handler)
    return handler


def _detach(handler: logging.Handler) -> None:
    logging.getLogger().removeHandler(handler)
    with contextlib.suppress(OSError):  # handleError has reported it
        handler.close()


def _link_latest(link: pathlib.Path, target: str) -> None:
    if link.exists() and not link.is_symlink():
        log.warning("%s is not a symbolic link, so it is not changed.", link)
        return
    # A unique name, because several runs may start at the same time.
    temporary = link.with_name(f".latest.{os.getpid()}")
    try:
        temporary.symlink_to(target, target_is_directory=True)
        temporary.replace(link)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        log.warning("Cannot link %s to %s: %s", link, target, error)


def provenance() -> dict[str, Any]:
    """The code and the machine: git state, versions, hardware."""
    return {"git": _git_state(), "versions": _versions(), "hardware": hardware()}


def _environment(names: Iterable[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def run_git(*words: str, **variables: str) -> bytes:
    """What git prints about the folder of this file.

    Raises:
      OSError, subprocess.SubprocessError: there is no git or no checkout, or it took
        longer than GIT_SECONDS.
    """
    done = subprocess.run(
        ["git", "-C", str(pathlib.Path(__file__).parent), *words],
        check=True,
        capture_output=True,
        timeout=GIT_SECONDS,
        env={**os.environ, "LC_ALL": "C", **variables},  # messages in English
    )
    return done.stdout


def _git_state() -> dict[str, Any] | None:
    """Commit, branch and dirtiness of the checkout that contains this file.

    None if there is no such checkout, or if git is missing.
    """
    try:
        if not run_git("ls-files", "--", __file__):
            return None  # installed inside a checkout of another project
        return {
            "commit": run_git("rev-parse", "HEAD").decode().strip(),
            # None: detached
            "branch": run_git("branch", "--show-current").decode().strip() or None,
            "dirty": bool(run_git("status", "--porcelain", "--untracked-files=no")),
        }
    except subprocess.CalledProcessError as error:
        if b"not a git repository" not in error.stderr:
            why = error.stderr.decode(errors="replace").strip()
            log.warning("Cannot read the git state: %s", why)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("Cannot read the git state: %s", error)
    return None


# --- Reading --------------------------------------------------------------------------

DEEPEST = 100  # levels of meta.json
# The types of what is used of meta.json, and those of a list's items.
OF_FLAGS = ("args", "flags", "preset_changes")
META_TYPES: dict[str, Any] = {
    **dict.fromkeys(OF_FLAGS, dict),
    **dict.fromkeys(("git", "hardware", "protocol"), dict | None),
    **dict.fromkeys(("date_start", "date_end", "preset"), str | None),
    **dict.fromkeys(("first_step", "last_step"), int | None),
}
LIST_TYPES = {"starts": dict, "resumed": str, "flags_left_open": str}


def strict_json(nested: Any) -> Any:
    """Infinity and NaN, which JSON lacks, as "inf", "-inf" and "nan"."""
    if isinstance(nested, dict):
        return {k: strict_json(x) for k, x in nested.items()}
    if isinstance(nested, list | tuple):
        return [strict_json(x) for x in nested]
    is_number = isinstance(nested, float)
    return str(nested) if is_number and not math.isfinite(nested) else nested


def _with_infinities(nested: Any, of_flags: bool = False, depth: int = 0) -> Any:
    """The reverse of strict_json, for the values of flags."""
    if depth > DEEPEST:
        raise ValueError("it is nested too deeply")
    if isinstance(nested, dict):
        return {
            k: _with_infinities(x, of_flags or k in OF_FLAGS, depth + 1)
            for k, x in nested.items()
        }
    if isinstance(nested, list):
        return [_with_infinities(x, of_flags, depth + 1) for x in nested]
    return float(nested) if of_flags and nested in ("inf", "-inf") else nested


def read_meta(folder: pathlib.Path) -> dict[str, Any]:
    """The content of meta.json; {} if the file is missing or damaged.

    Its values have the types in META_TYPES. Those of flags may have any.
    """
    path = folder / "meta.json"
    try:
        meta = _with_infinities(json.loads(path.read_text(encoding="utf-8")))
        if not isinstance(meta, dict):
            raise ValueError(f"it is no object, but {str(meta)[:80]}")
        _check_types(meta)
        for start in meta.get("starts", ()):
            _check_types(start)
        return meta
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is damaged and is ignored: %s", path, error)
        return {}


def _check_types(part: dict[str, Any]) -> None:
    for name, value in part.items():
        fits = isinstance(value, META_TYPES.get(name, object))
        if of := LIST_TYPES.get(name):
            fits = isinstance(value, list) and all(isinstance(x, of) for x in value)
        if not fits:
            raise ValueError(f"{name} is {json.dumps(value)[:80]}")


def complete_meta(folder: pathlib.Path, last_step: int) -> None:
    """Completes meta.json of a run killed after its last work. Raises RunFileError."""
    if not (meta := read_meta(folder)):
        return
    end = {"successful": True, "date_end": now()}
    meta |= end
    if starts := meta.get("starts"):
        starts[-1] |= end | {"last_step": last_step}
    with writing(folder / "meta.json"):
        write_json(folder / "meta.json", meta)


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Replaces a file in one step. Values that JSON lacks become str(value).

    Raises:
      OSError: it can't be written; the file is unchanged.
    """
    text = json.dumps(strict_json(content), indent=2, default=str)
    with atomic_write(path) as file:
        file.write(f"{text}\n".encode())


def now() -> str:
    """The date in UTC, for meta.json and test.json."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
