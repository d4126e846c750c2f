"""A small process that kills the children of a dead process; see children.Guardian.

    python -I -S guardian.py SECONDS SIGNAL

It reads lines from standard input: "+123" guards process 123 and its process group,
"-123" no longer guards it. The end of the input means that the parent has died. Then
the guarded processes get SIGNAL, unless it is 0, and have SECONDS to exit; after that
they are killed.

It imports nothing of this package, so that it needs little time and memory.
"""

import contextlib
import os
import signal
import sys
import time


def exists(pid: int) -> bool:
    """Whether this process exists, or one of its group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(pid, 0)
            return True
    return False


def main() -> None:
    os.setpgid(0, 0)  # a signal to the parent's group must not reach this process
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guarded: set[int] = set()
    for line in sys.stdin:
        pid = int(line)
        if pid > 0:
            guarded.add(pid)
        else:
            guarded.discard(-pid)
    for pid in guarded:
        with contextlib.suppress(OSError):  # it has exited
            os.kill(pid, int(sys.argv[2]))
    deadline = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < deadline and any(exists(pid) for pid in guarded):
        time.sleep(0.05)
    for pid in guarded:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):  # it has exited, or has no group yet
                kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
