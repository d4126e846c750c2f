"""Trains with CleanRL's ppo_atari.py as it is, and writes its games to logs.csv.

    git clone https://github.com/vwxyzjn/cleanrl && git -C cleanrl checkout fe8d8a0
    python3 -m venv peer && peer/bin/pip install torch==2.13.0 gymnasium==0.29.1 \
        ale-py==0.9.1 'opencv-python-headless<5' 'numpy<2' tensorboard tyro
    export CLEANRL=$PWD/cleanrl CLEANRL_PYTHON=$PWD/peer/bin/python OMP_NUM_THREADS=1
    python benchmarks/study.py docs/results/study/cleanrl.txt --out FOLDER --seeds 1 2

It takes --env, --total_steps, --seed, --savedir and --xpid. All else is CleanRL's
default: 8 games in one process. A game counts whole, with its rewards as they are. An
interrupted run begins anew.
"""

import argparse
import collections
import csv
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

# gymnasium 0.29 does not look for the games by itself.
START = (
    "import runpy, sys, ale_py; ale_py.registration.register_v0_v4_envs(); "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
GAME = re.compile(r"global_step=(?P<step>\d+), episodic_return=\[?(?P<ret>[-+.e\d]+)")


def log_games(
    name: str,
    doc: str | None,
    command: Callable[[Path, argparse.Namespace], list[str | Path]],
    game: re.Pattern[str],
) -> int:
    """Runs a peer's script in its clone, and writes the games that it prints.

    Args:
      name: of the environment variables: NAME, the clone, and NAME_PYTHON.
      command: makes the words after the Python from the clone and the flags.
      game: finds "step" and "ret" in a line.

    Returns:
      The script's exit status.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag, kind in ("env", str), ("total_steps", int), ("seed", int), ("xpid", str):
        parser.add_argument(f"--{flag}", type=kind, required=True)
    parser.add_argument("--savedir", type=Path, required=True)
    args = parser.parse_args()
    if not {name, f"{name}_PYTHON"} <= os.environ.keys():
        parser.error(f"set {name} and {name}_PYTHON, see --help")
    clone, folder = Path(os.environ[name]), args.savedir / args.xpid
    folder.mkdir(parents=True, exist_ok=True)
    words = [os.environ[f"{name}_PYTHON"], "-u", *command(clone, args)]
    variables = {**os.environ, "PYTHONPATH": str(clone)}
    last: collections.deque[float] = collections.deque(maxlen=100)
    begin, header = time.time(), ("step", "_time", "mean_game_return_100", "sps")
    with (
        (folder / "logs.csv").open("w", newline="") as file,
        subprocess.Popen(
            words, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        logs = csv.writer(file)
        logs.writerow(header)
        assert process.stdout
        for line in process.stdout:
            if found := game.match(line):
                step, now = int(found["step"]), time.time()
                last.append(float(found["ret"]))
                mean = statistics.fmean(last)
                logs.writerow((step, now, mean, step / (now - begin)))
                file.flush()
    return process.returncode


def ppo(clone: Path, args: argparse.Namespace) -> list[str | Path]:
    return [
        *("-c", START, clone / "cleanrl" / "ppo_atari.py"),
        *("--env-id", args.env, "--no-cuda", "--seed", str(args.seed)),
        *("--total-timesteps", str(args.total_steps)),
    ]


if __name__ == "__main__":
    sys.exit(log_games("CLEANRL", __doc__, ppo, GAME))
