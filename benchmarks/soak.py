"""Trains with PolyBeast for a long time and kills its environment servers in turn.

    python benchmarks/soak.py --seconds 3600 --kill_every 60 --csv soak.csv -- \
        --preset minatar --num_servers 4

    python benchmarks/soak.py --tcp="--preset minatar" -- \
        --preset minatar --num_actors 4

Starts `python -m torchbeast.polybeast` with the flags after `--`. With --tcp it starts
the learner with these, and four servers: two at unix sockets and two at TCP. Every
--kill_every seconds it kills one of the servers with SIGKILL. It ends the run with
SIGINT. Then it prints exit status, number of updates, longest pause between two
updates, reconnects, dropped steps, returns, and the growth of memory. The CSV file has
a line every --sample_every seconds. Needs Linux.

Memory is the proportional set size of the whole process tree. Its growth is the slope
of a straight line through the samples of the last three quarters of the run. Samples
while a server is missing don't count.
"""

import argparse
import contextlib
import csv
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from cpu_time import process_tree, read_stat
from throughput import describe_machine, proportional_set_size, start_run

from torchbeast.runs.files import read_rows
from torchbeast.tools.trial import (
    END_SECONDS,
    START_SECONDS,
    Trial,
)

COLUMNS = (
    *("seconds", "servers", "memory_mib", "learner_mib"),
    *("step", "return", "reconnects", "dropped_steps"),
)


# As torchbeast.polybeast's, the servers' parents are children of the learner, "$@".
START_MIXED = """
python={python} flags="{flags} --num_servers 2"
"$python" -m torchbeast.polybeast_env $flags --pipes_basename {unix} &
"$python" -m torchbeast.polybeast_env $flags --bind {tcp} &
exec "$@"
"""


def begin(args: argparse.Namespace, folder: Path) -> Trial:
    if args.tcp is None:
        return start_run("polybeast", args.flags, folder)
    unix, port = f"unix:{folder}/server", 20000 + os.getpid() % 10000
    tcp = f"127.0.0.1:{port}"
    python, place = shlex.quote(sys.executable), shlex.quote(unix)
    script = START_MIXED.format(python=python, flags=args.tcp, unix=place, tcp=tcp)
    addresses = f"{unix}.0,{unix}.1,{tcp}-{port + 1}"
    flags = [*args.flags, "--server_addresses", addresses]
    return start_run("polybeast_learner", flags, folder, ["sh", "-c", script, "sh"])


def server_pids(learner: int) -> list[int]:
    """The server processes: children of the learner's children that run Python."""
    pids = []
    for pid in process_tree(learner):
        try:
            parent = read_stat(Path(f"/proc/{pid}/stat"))[0]
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            above = Path(f"/proc/{parent}/stat")
            grandparent = read_stat(above)[0] if parent > 1 else 0
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended
        if grandparent == learner and b"spawn_main" in command:
            pids.append(pid)
    return sorted(pids)


def last_row(path: Path) -> dict[str, str]:
    """The newest complete row, read from the end because the file grows long."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        names = file.readline().decode().rstrip("\n").split(",")
        file.seek(max(file.tell(), path.stat().st_size - 16384))
        lines = file.read().decode().rpartition("\n")[0].splitlines()
    if not lines:
        return {}
    return dict(zip(names, next(csv.reader(lines[-1:])), strict=False))


def growth(seconds: np.ndarray, memory: np.ndarray) -> float:
    """MiB per hour: least squares over the last three quarters."""
    late = seconds >= seconds[-1] / 4
    return float(np.polyfit(seconds[late] / 3600, memory[late], 1)[0])


def soak(args: argparse.Namespace, trial: Trial) -> int:
    run, logs = trial.process, trial.logs
    kills, samples = 0, []
    try:
        deadline = time.monotonic() + START_SECONDS
        while not last_row(logs) and run.poll() is None:
            if time.monotonic() > deadline:
                print(f"No update within {START_SECONDS:g} s.")
                return 1
            time.sleep(0.5)
        servers = server_pids(run.pid)
        count = len(servers)
        start = next_sample = time.monotonic()
        next_kill = start + args.kill_every
        with args.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            while run.poll() is None and time.monotonic() < start + args.seconds:
                now = time.monotonic()
                if now >= next_kill:
                    servers = server_pids(run.pid)
                    if servers:
                        os.kill(servers[kills % len(servers)], signal.SIGKILL)
                        kills += 1
                    next_kill += args.kill_every
                if now >= next_sample:
                    row, tree = last_row(logs), list(process_tree(run.pid))
                    samples.append(
                        [
                            round(now - start, 1),
                            len(server_pids(run.pid)),
                            round(proportional_set_size(tree), 1),
                            round(proportional_set_size([run.pid]), 1),
                            row.get("step"),
                            row.get("mean_game_return_100"),
                            row.get("reconnects"),
                            row.get("dropped_steps"),
                        ]
                    )
                    writer.writerow(samples[-1])
                    file.flush()
                    next_sample += args.sample_every
                time.sleep(0.5)
        ended_early = run.poll() is not None
        if not ended_early:
            run.send_signal(signal.SIGINT)
        try:
            run.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"The run did not end within {END_SECONDS:g} s after SIGINT.")
            return 1
    finally:
        with contextlib.suppress(ProcessLookupError):  # servers may be left
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()

    rows = list(read_rows(logs.parent))
    if len(rows) < 2 or not any(s[1] == count for s in samples):
        print("The run ended before there was something to measure. Its last lines:")
        print(*trial.output().splitlines()[-20:], sep="\n")
        return 1
    times = np.array([float(row["_time"]) for row in rows])
    whole = np.array([s[:4] for s in samples if s[1] == count], float)
    returns = [float(s[5]) for s in samples if s[5]]
    quarter = max(1, len(returns) // 4)
    print(f"Exit status {run.returncode}{', ended early' if ended_early else ''}")
    print(f"Seconds {samples[-1][0]:.0f}, servers {count}, killed {kills} times")
    print(f"Updates {len(rows)}, steps {rows[-1]['step']}")
    print(f"Longest pause between updates {np.diff(times).max():.1f} s")
    last = rows[-1]
    print(f"Reconnects {last['reconnects']}, dropped steps {last['dropped_steps']}")
    print(
        "Mean return of the last 100 games, by quarter: "
        + ", ".join(
            f"{np.mean(returns[i * quarter : (i + 1) * quarter]):.1f}" for i in range(4)
        )
    )
    for column, name in ((2, "all processes"), (3, "learner")):
        memory = whole[:, column]
        print(
            f"Memory of {name}: first {memory[0]:.0f} MiB, last {memory[-1]:.0f}, "
            f"most {memory.max():.0f}; growth {growth(whole[:, 0], memory):+.1f} MiB/h"
        )
    lines = trial.output().splitlines()
    errors = [line for line in lines if "[ERROR " in line]
    print("Errors and last lines:", *errors, *lines[-4:], sep="\n")
    expected = 128 + signal.SIGINT
    return 0 if run.returncode == expected and not ended_early else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Trains for a long time while environment servers are killed.",
        usage="%(prog)s [options] [-- PolyBeast's flags]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=float, default=3600.0, help="counted from the first update")
    add("--kill_every", type=float, default=60.0, help="seconds between kills")
    add("--sample_every", type=float, default=10.0, help="seconds between samples")
    add("--csv", type=Path, default=Path("soak.csv"), help="file of the samples")
    add("--tcp", metavar="FLAGS", help="servers at unix sockets and TCP; their flags")
    add("flags", nargs="*", help="flags of PolyBeast, with --tcp of its learner")
    args = parser.parse_args(argv)
    print(", ".join(f"{k} {v}" for k, v in describe_machine().items() if v is not None))
    print("PolyBeast's flags:", *args.flags, flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        begin(args, Path(folder)) as trial,
    ):
        return soak(args, trial)


if __name__ == "__main__":
    sys.exit(main())
