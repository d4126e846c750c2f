"""--mirror URL: a copy of the run's folder elsewhere, from which it can be resumed.

URL/XPID has the same files, and mirror.json, see Marker. A file gets its name there
when it is whole, and model.tar last: then the rows of its steps are there, too.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit

from torchbeast.base.errors import FlagError, using
from torchbeast.base.flag import FREE, Group, flag
from torchbeast.base.seldom import Seldom
from torchbeast.runs.files import atomic_write, now, read_meta, writing

log = logging.getLogger(__name__)

MODEL, MARKER = "model.tar", "mirror.json"
PIECE = 2**20  # bytes
POLL_SECONDS, RETRY_SECONDS = 1.0, 30.0
CLOSE_SECONDS = 60.0  # for the last copy
COMPLETE_SECONDS = 3600.0  # for a copy of a finished run
REPEAT_SECONDS = 600.0  # between log lines about failures


class Flags(Group):
    mirror: str | None = flag(
        *(None, "copy the run's folder to URL/XPID after each checkpoint; resume from"),
        *(FREE,),
        metavar="URL",
    )


class Marker(NamedTuple):
    """What mirror.json says; it is only compared and shown.

    Attributes:
      writer: the process that writes to the mirror; None if it has ended.
      begun: date_start of the run's meta.json.
      step: that of model.tar.
    """

    writer: str | None = None
    begun: str | None = None
    step: int = 0


class Place:
    """The folder of a run at a URL. Raises what its file system raises."""

    def __init__(self, url: str, xpid: str) -> None:
        import fsspec  # comes with torch

        self.fs, root = fsspec.url_to_fs(url)
        self.root = f"{root.rstrip('/')}/{xpid}"
        self.renames = type(self.fs).mv is not fsspec.AbstractFileSystem.mv

    def names(self) -> list[str]:
        """The run's files, model.tar last."""
        names = (x[len(self.root) + 1 :] for x in self.fs.find(self.root))
        return sorted(filter(is_of_run, names), key=lambda name: name == MODEL)

    def marker(self) -> Marker:
        try:
            text = self.fs.cat_file(f"{self.root}/{MARKER}")
        except FileNotFoundError:
            return Marker()
        with using(f"its {MARKER}", "is damaged"):
            marker = Marker(**json.loads(text))
            return marker._replace(step=int(marker.step))

    def mark(self, marker: Marker) -> None:
        self.upload(MARKER, io.BytesIO(json.dumps(marker._asdict()).encode()))
        self.name(MARKER)

    def upload(self, name: str, source: BinaryIO) -> None:
        """Writes a file that `name` gives its name."""
        path = f"{self.root}/{name}.part"
        if "/" in name:
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self.fs.open(path, "wb") as target:
            shutil.copyfileobj(source, target, PIECE)

    def name(self, name: str) -> None:
        path = f"{self.root}/{name}"
        if self.renames:
            self.fs.mv(f"{path}.part", path)
        else:  # in an object store a copy appears at once
            self.fs.cp_file(f"{path}.part", path)
            self.fs.rm_file(f"{path}.part")

    def download(self, name: str, path: Path) -> None:
        with self.fs.open(f"{self.root}/{name}", "rb") as source, writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as target:
                shutil.copyfileobj(source, target, PIECE)


def is_of_run(name: str) -> bool:
    """Whether a mirror has such a file. It is inside of the folder, and not hidden."""
    parts = name.split("/")
    hidden = any(not part or part.startswith(".") for part in parts)
    # Not console.log: a sweep's run on this machine may write to it now.
    other = name in (MARKER, "console.log") or name.endswith(".part")
    return not (hidden or other or "wandb" in parts)


def attach(run: Any) -> Mirror | None:
    if not (url := run.flags.mirror):
        return None
    if run.flags.disable_checkpoint:
        raise FlagError("--mirror has no effect with --disable_checkpoint")
    is_over = run.learner.step >= run.flags.total_steps  # a copy is all that is left
    return Mirror(url, run.folder, COMPLETE_SECONDS if is_over else CLOSE_SECONDS)


def left(flags: Any, folder: Path, step: int) -> str | None:
    if not flags.mirror:
        return None
    with using(f"--mirror {flags.mirror}"):
        marker = Place(flags.mirror, folder.name).marker()
    return "the copy to the mirror" if marker.writer or marker.step < step else None


def fetch(flags: Any, folder: Path, step: int | None) -> bool:
    """Fetches the run, if its mirror has a newer checkpoint than its folder.

    Args:
      folder: of the run, locked.
      step: that of its checkpoint; None without one.

    Returns:
      Whether there is another model.tar now.

    Raises:
      FlagError: the mirror can't be read, or has another run of this name.
      RunFileError: the folder can't be written.
    """
    if not (url := flags.mirror):
        return False
    with using(f"--mirror {url}"):
        if urlsplit(url).password:  # meta.json and the log show the URL
            raise FlagError(
                "--mirror has a password, which belongs into FSSPEC_CONFIG_DIR"
            )
        place = Place(url, folder.name)
        is_here = "file" in place.fs.protocol
        if is_here and Path(place.root).resolve().is_relative_to(folder.resolve()):
            raise FlagError(f"--mirror {url} would be in the run's folder, {folder}")
        names, marker = place.names(), place.marker()
        if MODEL not in names:
            return False
        begun = read_meta(folder).get("date_start")
        if begun and marker.begun and marker.begun != begun:
            raise FlagError(
                f"--mirror {url} has another run named {folder.name}: it began at "
                f"{marker.begun!r:.60}, and that in {folder} at {begun}. Choose "
                "another --xpid or --mirror, or remove one of the two"
            )
        if step is not None and step >= marker.step:
            log.info("The mirror is at step %d, this folder at %d.", marker.step, step)
            return False
        log.info("Fetching %d files from the mirror %s.", len(names), url)
        for name in names:
            place.download(name, folder / name)
    return True


class Mirror:
    """Copies the folder in a thread, after each checkpoint and at the end.

    What fails is counted, logged and tried again; the run goes on. Of two processes
    that write to one mirror, the one that has started last goes on writing.

    Args:
      seconds: for the last copy; or twice the longest so far, if it is more.

    Attributes:
      failures: so far.
      copied_at: the Unix time of the last complete copy; 0 before the first.

    Raises:
      FlagError: the mirror can't be written.
    """

    def __init__(self, url: str, folder: Path, seconds: float = CLOSE_SECONDS) -> None:
        self.url, self.folder, self.seconds = url, folder, seconds
        self.failures, self.copied_at = 0, 0.0
        host, token = socket.gethostname(), secrets.token_hex(4)
        self._writer = f"process {os.getpid()} of {host} since {now()} ({token})"
        self._copied: dict[str, tuple[int, ...]] = {}  # states of files
        self._longest = 0.0  # seconds of a complete copy
        self._is_new = (folder / MODEL).exists()  # since the last copy
        self._is_due = Seldom(REPEAT_SECONDS)
        self._closing, self._late = threading.Event(), threading.Event()
        with using(f"--mirror {url}"):
            self._place = Place(url, folder.name)
            with contextlib.suppress(FileExistsError):
                # Not what it is in, which may be mistyped.
                self._place.fs.mkdir(self._place.root, create_parents=False)
            marker = self._place.marker()
            self._place.mark(marker._replace(writer=self._writer))
        if marker.writer:
            log.warning(
                "The mirror was last written by %.200r, which has not closed it. If it "
                "still runs, it stops copying now.",
                marker.writer,
            )
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def saved(self, path: Path, step: int) -> None:
        self._is_new = True

    def numbers(self) -> dict[str, float]:
        at = self.copied_at
        return {"mirror_failures": self.failures, "mirror_copied_timestamp_seconds": at}

    def close(self, status: int) -> None:
        """Copies what is left."""
        self._closing.set()
        self._thread.join(max(self.seconds, 2 * self._longest))
        self._late.set()
        if missing := ", ".join(sorted(self._changed())):
            log.error("The mirror %s lacks the newest %s.", self.url, missing)

    def _work(self) -> None:
        due = 0.0
        while not self._late.is_set():
            is_last = self._closing.wait(POLL_SECONDS)
            begun = time.monotonic()
            if not is_last and (not self._is_new or begun < due):
                continue
            self._is_new = False
            try:
                marker = self._place.marker()
                if marker == Marker():
                    self._copied = {}  # somebody has emptied it
                elif marker.writer != self._writer:
                    self.failures += 1
                    log.error(
                        "--mirror %s: %.200r writes there now. This run goes on, but "
                        "copies nothing more. End one of the two.",
                        *(self.url, marker.writer),
                    )
                    return
                self._copy(marker, is_last)
                self.copied_at = time.time()
                self._longest = max(self._longest, time.monotonic() - begun)
                if is_last:
                    return
            except Exception as error:  # of many types
                self.failures += 1
                self._is_new = True
                if self._is_due():
                    log.warning("--mirror %s: a copy failed: %r", self.url, error)
                self._late.wait(POLL_SECONDS)
            due = time.monotonic() + RETRY_SECONDS

    def _copy(self, marker: Marker, is_last: bool) -> None:
        """Copies what has changed."""
        import torch

        with contextlib.ExitStack() as stack:
            changed, step = self._changed(), marker.step
            if MODEL in changed:
                # Opened before the logs are copied, so that they have its rows.
                file = stack.enter_context((self.folder / MODEL).open("rb"))
                changed[MODEL] = state_of(file.fileno())
                # Reads no tensor data.
                saved = torch.load(file, map_location="meta", weights_only=True)
                step = saved["stats"]["step"]
                file.seek(0)
                self._place.upload(MODEL, file)
            for name in sorted(changed, key=lambda name: name == MODEL):
                if name != MODEL:
                    with (self.folder / name).open("rb") as other:
                        self._place.upload(name, other)
                self._place.name(name)
                self._copied[name] = changed[name]
        writer = None if is_last else self._writer
        begun = read_meta(self.folder).get("date_start")
        self._place.mark(Marker(writer, begun, step))

    def _changed(self) -> dict[str, tuple[int, ...]]:
        """The files that were written since they were copied, and their states."""
        found = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if is_of_run(name) and path.is_file() and not path.is_symlink():
                found[name] = state_of(path)
        return {k: x for k, x in found.items() if x != self._copied.get(k)}


def state_of(file: Path | int) -> tuple[int, ...]:
    """Differs if the file was written; empty if there is none."""
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(file)
        return status.st_ino, status.st_size, status.st_mtime_ns
    return ()
