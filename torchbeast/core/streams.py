"""Standard input, output and error that whoever started this process has closed."""

import contextlib
import os
import sys


def open_missing_streams() -> None:
    """Opens what is closed of the standard streams to /dev/null, also for children.

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
