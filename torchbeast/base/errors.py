"""User errors, and how an error becomes a log message and an exit status."""

from __future__ import annotations

import contextlib
import difflib
import logging
import signal
import traceback
from collections.abc import Iterable, Iterator

log = logging.getLogger(__name__)


class UserError(Exception):
    """An error that the user can fix: only its message is logged, no traceback."""


class FlagError(UserError, ValueError):
    """A flag has a value that is not allowed."""


class FileError(FlagError):
    """A file can't be used; the message names it. Mostly a flag has named it."""


class MissingPackageError(FlagError, ImportError):
    """A required package is missing; the message names it."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint can't be saved or loaded; the message says what to do."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message: the names that are like `name`; "" if none is."""
    close = " or ".join(difflib.get_close_matches(name, names))
    return close and f" Did you mean {close}?"


@contextlib.contextmanager
def using(name: object, problem: str = "") -> Iterator[None]:
    """Turns whatever a damaged file or a library raises into a FileError.

    Args:
      name: what is used, for the message: a file, or a flag with its value.
      problem: what is wrong with it, unless it can't be opened.
    """
    try:
        yield
    except UserError:  # the message is good already
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            raise FileError(f"{name}: {error.strerror}") from error
        # Some messages say little without the type, such as that of a KeyError.
        tells = isinstance(error, ValueError | RecursionError) and str(error)
        why = error if tells else repr(error)
        raise FileError(f"{f'{name} {problem}'.rstrip()}: {why}") from error


@contextlib.contextmanager
def needing(flag: str, package: str) -> Iterator[None]:
    """Turns an ImportError into an error that says what to install."""
    try:
        yield
    except ImportError as error:  # maybe of a package that this one needs
        raise MissingPackageError(
            f"{flag} needs the package {error.name or package}: pip install {package} "
            f"({error})"
        ) from error


def is_user_error(error: BaseException) -> bool:
    # libtorchbeast's errors derive from RuntimeError, because it is plain C++.
    from_native = type(error).__module__ == "libtorchbeast"
    return from_native or isinstance(error, UserError)


def text_of(error: BaseException) -> str:
    """The error for the log of another process; a traceback only if it may help."""
    if is_user_error(error):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error))


def report(error: BaseException) -> int:
    """Logs the error that ended the run. Returns the exit status."""
    if isinstance(error, KeyboardInterrupt):
        number = error.args[0] if error.args else signal.SIGINT
        log.warning("%s: exits without saving.", signal.Signals(number).name)
        return 128 + number
    if is_user_error(error):
        log.error("%s: %s", type(error).__name__, error)
    else:
        log.error("The run failed.", exc_info=error)
    return 1
