"""Logging, signals and exit status around the main function of a script."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from torchbeast.core import errors, processes


def configure_logging() -> None:
    logging.basicConfig(
        level=logging.INFO, format="[%(levelname)s %(asctime)s %(name)s] %(message)s"
    )


def print_warnings_only() -> None:
    """For --suppress_logs: out.log still gets all lines."""
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.WARNING)


def open_missing_streams() -> None:
    """Opens closed standard streams as /dev/null, also for child processes.

    Otherwise the next opened file, such as a checkpoint, could get the descriptor of
    stderr, and C code would write its messages into it.
    """
    streams = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
    for number, (name, mode) in enumerate(streams):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            os.set_inheritable(opened, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


class Outcome:
    """The exit status of a script."""

    status = 0


@contextlib.contextmanager
def reported() -> Iterator[Outcome]:
    """Surrounds the main function of a script.

    Configures logging. An exception in the body is logged and sets the exit status.
    """
    open_missing_streams()
    configure_logging()
    outcome = Outcome()
    with processes.raise_on_stop_signals():
        try:
            yield outcome
        except (Exception, KeyboardInterrupt) as error:
            outcome.status = errors.report(error)
