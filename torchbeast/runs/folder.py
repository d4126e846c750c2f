"""The folder of a run, and how files in it are written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import pathlib
from collections.abc import Iterator
from typing import BinaryIO

from torchbeast.base.errors import FlagError, UserError

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
