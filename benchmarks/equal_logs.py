"""Do two source trees learn the same? Compares logs.csv of --sync runs, value by value.

    git worktree add /tmp/before COMMIT
    python benchmarks/equal_logs.py /tmp/before .

Use it when a change must not change what is learned. Each case runs in both trees, with
the Python that runs this script and its libtorchbeast. Columns of time are left out.
"""

import argparse
import csv
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable

COMMON = (
    "--sync --num_actors 2 --batch_size 2 --unroll_length 7 --envs_per_actor 3 "
    "--precision fp32 --torch_threads 1"
)
MINATAR = "--env MinAtar/Breakout-v1"
LASER = (
    "--replay_ratio 1 --replay_size 600 --learn_start 100 --rollouts episode "
    "--use_lstm --disable_checkpoint"
)
MIXED = (
    "--env MountainCar-v0 --use_lstm --normalize_observations --normalize_rewards "
    "--updates_per_batch 2 --minibatches 2 --normalize_advantages"
)
PPO = (
    "--env MinAtar/Seaquest-v1 --clip_ratio 0.2 --trace_decay 0.95 --optimizer adam "
    "--updates_per_batch 2 --use_lstm"
)
CONTINUOUS = (
    "--env Pendulum-v1 --normalize_observations --normalize_rewards "
    "--reward_clipping none"
)
POLYBEAST = "--num_servers 2 --disable_checkpoint"
OF_TIME = {"_time", "sps"}
# Name, module, flags, and the total_steps of each start: more than one is a resume.
CASES = [
    ("mono", "monobeast", MINATAR, [4200]),
    ("mono_resume", "monobeast", f"{MINATAR} --use_lstm", [2100, 4200]),
    ("mono_mixed", "monobeast", MIXED, [4200]),
    ("mono_ppo", "monobeast", PPO, [4200]),
    ("mono_laser", "monobeast", f"{MINATAR} {LASER}", [4200]),
    ("mono_continuous", "monobeast", CONTINUOUS, [4200]),
    ("poly", "polybeast", f"{MINATAR} {POLYBEAST}", [4200]),
    ("poly_mixed", "polybeast", f"{MIXED} {POLYBEAST}", [4200]),
]


def rows_of(file: Iterable[str]) -> list[dict[str, str]]:
    """Rows of logs.csv, without columns of time."""
    rows = csv.DictReader(file)
    return [{k: x for k, x in row.items() if k not in OF_TIME} for row in rows]


def read_rows(savedir: str, xpid: str) -> list[dict[str, str]]:
    with open(pathlib.Path(savedir, xpid, "logs.csv")) as file:
        return rows_of(file)


def run(tree: pathlib.Path, case: tuple, savedir: str) -> list[dict[str, str]]:
    """The rows that a case makes with the code in `tree`."""
    name, module, flags, ends = case
    for steps in ends:
        more = ["--xpid", name, "--savedir", savedir, "--total_steps", str(steps)]
        if module == "polybeast":
            more += ["--pipes_basename", f"unix:{savedir}/pipe"]
        command = [sys.executable, "-m", f"torchbeast.{module}"]
        done = subprocess.run(
            [*command, *COMMON.split(), *flags.split(), *more],
            env={**os.environ, "PYTHONPATH": str(tree.resolve())},
            cwd=savedir,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            sys.exit(f"{tree}: {name} ended with {done.returncode}:\n{done.stderr}")
    return read_rows(savedir, name)


def compare(before: list[dict[str, str]], after: list[dict[str, str]]) -> str:
    if len(before) != len(after):
        return f"DIFFERENT: {len(before)} and {len(after)} rows"
    for row, other in zip(before, after, strict=True):
        for column in row.keys() & other.keys():
            x, y = row[column], other[column]
            if x != y:
                return f"DIFFERENT: {column} at step {row['step']}: {x} and {y}"
    alone = sorted(before[0].keys() ^ after[0].keys())
    more = f"; only one has {', '.join(alone)}" if alone else ""
    both = before[0].keys() & after[0].keys()
    return f"equal: {len(before)} rows, {len(both)} columns{more}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=pathlib.Path)
    parser.add_argument("after", type=pathlib.Path)
    parser.add_argument("--only", nargs="*", help="names of cases")
    args = parser.parse_args()
    status = 0
    for case in CASES:
        if args.only and case[0] not in args.only:
            continue
        logs = []
        for tree in (args.before, args.after):
            with tempfile.TemporaryDirectory() as savedir:
                logs.append(run(tree, case, savedir))
        result = compare(*logs)
        status |= not result.startswith("equal")
        print(f"{case[0]}: {result}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
