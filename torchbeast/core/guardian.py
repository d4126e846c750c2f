"""A small process that ends what another one has left behind; see processes.Guardian.

    python -I -S guardian.py SECONDS

Reads lines from its standard input: "+123" to guard process 123 and its process group,
"-123" to guard it no more. The end of the input means that its parent has died, however
it died. The guarded processes then have SECONDS to end by themselves and are killed.

Plain Python without imports of this package, so that it takes little time and memory.
"""

import contextlib
import os
import signal
import sys
import time


def exists(pid: int) -> bool:
    """Whether there is a process of this number, or one of its group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(pid, 0)
            return True
    return False


def main() -> None:
    os.setpgid(0, 0)  # what kills the parent's group must not reach this process
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guarded: set[int] = set()
    for line in sys.stdin:
        pid = int(line)
        if pid > 0:
            guarded.add(pid)
        else:
            guarded.discard(-pid)
    deadline = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < deadline and any(exists(pid) for pid in guarded):
        time.sleep(0.05)
    for pid in guarded:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):  # it has ended, or leads no group yet
                kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
