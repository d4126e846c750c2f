"""How many cores the kernel keeps busy with processes that work and sleep in turn.

    python benchmarks/idle_cores.py --processes 3 --work_ms 2 --sleep_ms 1
    chrt -r 1 python benchmarks/idle_cores.py --processes 3 --work_ms 2 --sleep_ms 1

Each process computes for --work_ms of its own CPU time, sleeps for --sleep_ms, and so
on. Three that work for 2 ms and sleep for 1 can keep two cores busy all the time, if
whoever is ready moves to a core that idles. Environment servers are such processes,
inference is another: where the kernel leaves cores idle here, PolyBeast has idle cores
too, and more streams than cores help.

With `chrt -r 1` (as root) the real-time class of the kernel does the same, which moves
threads at once; Linux gives that class 95 % of the time by default.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier

START_SECONDS = 60


def work(work_s: float, sleep_s: float, seconds: float, start: Barrier) -> float:
    """A process; returns the seconds of CPU time that it used."""
    start.wait(START_SECONDS)
    end = time.monotonic() + seconds
    used_before = time.thread_time()
    while time.monotonic() < end:
        done = time.thread_time() + work_s
        while time.thread_time() < done:
            pass
        time.sleep(sleep_s)
    return time.thread_time() - used_before


def measure(processes: int, work_ms: float, sleep_ms: float, seconds: float) -> float:
    """Cores used by all processes together."""
    with multiprocessing.Manager() as manager:
        start = manager.Barrier(processes)
        with multiprocessing.Pool(processes) as pool:
            task = (work_ms / 1e3, sleep_ms / 1e3, seconds, start)
            used = pool.starmap(work, [task] * processes, chunksize=1)
    return sum(used) / seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--work_ms", type=float, default=2.0)
    parser.add_argument("--sleep_ms", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=3.0)
    flags = parser.parse_args(arguments)
    for name in ("processes", "work_ms", "sleep_ms", "seconds"):
        if getattr(flags, name) <= 0:
            parser.error(f"--{name} must be above 0, got {getattr(flags, name)}")
    cores = len(os.sched_getaffinity(0))
    share = flags.work_ms / (flags.work_ms + flags.sleep_ms)
    wanted = min(float(cores), flags.processes * share)
    used = measure(flags.processes, flags.work_ms, flags.sleep_ms, flags.seconds)
    print(
        f"{flags.processes} processes that work for {flags.work_ms:g} ms and sleep for "
        f"{flags.sleep_ms:g} ms used {used:.2f} of {cores} cores; with the best order "
        f"{wanted:.2f}."
    )


if __name__ == "__main__":
    main()
