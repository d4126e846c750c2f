"""stdout and stderr that can always be written."""

import contextlib
import io
import os
import select
import sys
from typing import Any


class _Stream(io.FileIO):
    """A standard stream that drops what can't be written: no reader, a full disk."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            while (written := super().write(data)) is None:
                select.select([], [self], [])  # another program made it non-blocking
            return written
        return memoryview(data).nbytes


def keep_open() -> None:
    """Makes writing to stdout and stderr safe: environments may print at any time.

    Closed streams are opened as /dev/null, also for child processes. Otherwise the next
    opened file, such as a checkpoint, could get the descriptor of stderr, and C code
    would write its messages into it. Streams that the caller has replaced are kept.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            os.set_inheritable(opened, True)
        old = getattr(sys, name)
        if old is None and name == "stdin":
            sys.stdin = os.fdopen(number, closefd=False)
        elif name != "stdin" and old is getattr(sys, f"__{name}__"):
            if old is not None:
                with contextlib.suppress(OSError):
                    old.flush()
            stream = io.TextIOWrapper(
                io.BufferedWriter(_Stream(number, "w", closefd=False)),
                encoding=getattr(old, "encoding", "utf-8"),
                errors="backslashreplace",
                line_buffering=getattr(old, "line_buffering", True),
                write_through=getattr(old, "write_through", False),
            )
            setattr(sys, name, stream)
