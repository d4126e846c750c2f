"""User errors, and how an error becomes a log message and an exit status."""

from __future__ import annotations

import logging
import signal
import traceback

log = logging.getLogger(__name__)


class UserError(Exception):
    """An error that the user can fix: only its message is logged, no traceback."""


class FlagError(UserError, ValueError):
    """A flag has a value that is not allowed."""


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
