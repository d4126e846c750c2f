"""What surrounds the main function of a script: logging, signals, the exit status."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from torchbeast.core import errors, processes


def open_missing_streams() -> None:
    """Opens closed standard streams to /dev/null, also for child processes.

    Else the next file that is opened, such as a checkpoint, would take the place of
    stderr, and C code would write its messages into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            os.set_inheritable(opened, True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                stream = open(os.devnull, mode)  # noqa: SIM115 # as long as the process
                setattr(sys, name, stream)


class Outcome:
    """How a script ends: its exit status."""

    status = 0


@contextlib.contextmanager
def reported() -> Iterator[Outcome]:
    """Surrounds the main function of a script.

    Sets up logging. Logs the exception that ends the body, and sets the exit status.
    """
    open_missing_streams()
    logging.basicConfig(
        level=logging.INFO, format="[%(levelname)s %(asctime)s %(name)s] %(message)s"
    )
    outcome = Outcome()
    with processes.raise_on_stop_signals():
        try:
            yield outcome
        except (Exception, KeyboardInterrupt) as error:
            outcome.status = errors.report(error)
