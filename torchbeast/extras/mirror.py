"""--mirror URL: a copy of the run's folder elsewhere, from which it can be resumed.

URL/XPID has the same files, and mirror.json, see Marker. A file gets its name there
when it is whole, and model.tar last: then the rows of its steps are there, too.
"""

import io
import json
import logging
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit

from torchbeast.base.errors import FlagError, using
from torchbeast.base.flag import FREE, Group, flag
from torchbeast.runs.files import atomic_write, now, read_meta, writing

log = logging.getLogger(__name__)

MODEL, MARKER = "model.tar", "mirror.json"
POLL_SECONDS, RETRY_SECONDS = 1.0, 30.0
CLOSE_SECONDS = 60.0  # for the last copy; or twice the longest so far


class Flags(Group):
    mirror: str | None = flag(None, "URL of copies of runs, to resume from", FREE)


class Marker(NamedTuple):
    """What mirror.json says; it is only compared and shown."""

    writer: str | None = None  # a process; None if it has ended
    begun: str | None = None  # date_start of the run's meta.json
    step: int = 0  # that of model.tar


class Place:
    """The folder of a run at a URL. Raises what its file system raises."""

    def __init__(self, url: str, xpid: str) -> None:
        import fsspec  # comes with torch

        self.fs, root = fsspec.url_to_fs(url)
        self.root = f"{root.rstrip('/')}/{xpid}"

    def marker(self) -> Marker:
        try:
            text = self.fs.cat_file(f"{self.root}/{MARKER}")
        except FileNotFoundError:
            return Marker()
        with using(f"its {MARKER}", "is damaged"):
            return Marker(**json.loads(text))

    def mark(self, marker: Marker) -> None:
        self.upload(MARKER, io.BytesIO(json.dumps(marker._asdict()).encode()))

    def upload(self, name: str, source: BinaryIO) -> None:
        path = f"{self.root}/{name}"
        if "/" in name:
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self.fs.open(f"{path}.part", "wb") as target:
            shutil.copyfileobj(source, target)
        self.fs.mv(f"{path}.part", path)


def is_of_run(name: str) -> bool:
    """Whether a mirror has such a file. It is inside of the folder, and not hidden."""
    parts = name.split("/")
    hidden = any(not part or part.startswith(".") for part in parts)
    # Not console.log: a sweep's run on this machine may write to it now.
    other = name in (MARKER, "console.log") or name.endswith(".part")
    return not (hidden or other or "wandb" in parts)


def attach(run: Any) -> "Mirror | None":
    if run.flags.mirror and run.flags.disable_checkpoint:
        raise FlagError("--mirror has no effect with --disable_checkpoint")
    return Mirror(run.flags.mirror, run.folder) if run.flags.mirror else None


def fetch(flags: Any, folder: Path, step: int | None) -> bool:
    """Fetches the run, if its mirror has a newer checkpoint than its folder."""
    if not (url := flags.mirror):
        return False
    with using(f"--mirror {url}"):
        if urlsplit(url).password:  # meta.json and the log show the URL
            raise FlagError("--mirror has a password: use FSSPEC_CONFIG_DIR")
        place = Place(url, folder.name)
        if Path(place.root).resolve().is_relative_to(folder.resolve()):
            raise FlagError(f"--mirror {url} would be in the run's folder, {folder}")
        found = (x[len(place.root) + 1 :] for x in place.fs.find(place.root))
        names = sorted(filter(is_of_run, found), key=lambda name: name == MODEL)
        marker = place.marker()
        if MODEL not in names:
            return False
        begun = read_meta(folder).get("date_start")
        if begun and marker.begun and marker.begun != begun:
            raise FlagError(
                f"--mirror {url} has another run named {folder.name}, which began at "
                f"{marker.begun!r:.60}, not {begun}: choose another --xpid or --mirror"
            )
        if step is not None and step >= marker.step:
            log.info("The mirror is at step %d, this folder at %d.", marker.step, step)
            return False
        log.info("Fetching %d files from the mirror %s.", len(names), url)
        for name in names:
            path = folder / name
            with place.fs.open(f"{place.root}/{name}") as source, writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(path) as target:
                    shutil.copyfileobj(source, target)
    return True


class Mirror:
    """Copies in a thread. Of two processes that do, the one that began last goes on."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.failures, self.copied_at = 0, 0.0  # the time of the last complete copy
        self._writer = f"process {os.getpid()} of {socket.gethostname()} since {now()}"
        self._copied: dict[str, tuple[int, ...]] = {}  # states of files
        self._longest = 0.0  # seconds of a complete copy
        self._log_at = 0.0  # time of the next log line about failures
        self._news, self._closing = threading.Event(), threading.Event()
        with using(f"--mirror {url}"):
            self._place = place = Place(url, folder.name)
            if not place.fs.exists(place.root):
                place.fs.mkdir(place.root, create_parents=False)  # may be mistyped
            marker = place.marker()
            place.mark(marker._replace(writer=self._writer))
        if marker.writer:
            log.warning("The mirror was not closed by its %.200r.", marker.writer)
        self._news.set()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def saved(self, path: Path, step: int) -> None:
        self._news.set()

    def numbers(self) -> dict[str, float]:
        at = self.copied_at
        return {"mirror_failures": self.failures, "mirror_copied_timestamp_seconds": at}

    def close(self, status: int) -> None:
        self._closing.set()
        self._news.set()
        self._thread.join(max(CLOSE_SECONDS, 2 * self._longest))
        if missing := ", ".join(sorted(self._changed())):
            log.error("The mirror %s lacks the newest %s.", self.url, missing)

    def _work(self) -> None:
        is_over = False
        while not is_over:
            self._news.wait()
            self._news.clear()
            try:
                is_over = self._copy(self._closing.is_set())
            except Exception as error:  # of many types
                self.failures += 1
                self._news.set()
                if time.monotonic() >= self._log_at:
                    self._log_at = time.monotonic() + 600.0
                    log.warning("--mirror %s: a copy failed: %r", self.url, error)
                time.sleep(POLL_SECONDS)
            self._closing.wait(RETRY_SECONDS)

    def _copy(self, is_last: bool) -> bool:
        """Copies what has changed. Returns whether this was the last copy."""
        import torch

        began, marker = time.monotonic(), self._place.marker()
        if marker == Marker():
            self._copied = {}  # somebody has emptied it
        elif marker.writer != self._writer:
            self.failures += 1
            log.error("No more copies: %.200r writes to the mirror.", marker.writer)
            return True
        changed, step = self._changed(), marker.step
        if MODEL in changed:
            # Read before the logs are copied, so that they have its rows.
            model = io.BytesIO((self.folder / MODEL).read_bytes())
            saved = torch.load(model, map_location="meta", weights_only=True)
            step = saved["stats"]["step"]
            model.seek(0)
        for name in sorted(changed, key=lambda name: name == MODEL):
            with model if name == MODEL else (self.folder / name).open("rb") as file:
                self._place.upload(name, file)
            self._copied[name] = changed[name]
        begun = read_meta(self.folder).get("date_start")
        self._place.mark(Marker(None if is_last else self._writer, begun, step))
        self.copied_at = time.time()
        self._longest = max(self._longest, time.monotonic() - began)
        return is_last

    def _changed(self) -> dict[str, tuple[int, ...]]:
        """The files that were written since they were copied, and their states."""
        found = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if is_of_run(name) and path.is_file() and not path.is_symlink():
                status = path.stat()
                found[name] = status.st_ino, status.st_size, status.st_mtime_ns
        return {k: x for k, x in found.items() if x != self._copied.get(k)}
