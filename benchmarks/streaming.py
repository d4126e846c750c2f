"""Trains with streaming-drl's stream AC for MinAtar as it is; logs its games.

    git clone https://github.com/mohmdelsayed/streaming-drl
    git -C streaming-drl checkout 407dca7
    python3 -m venv peer && peer/bin/pip install torch==2.13.0 gymnasium==0.29.1 \
        MinAtar==1.0.15 'numpy<2'
    export STREAMING=$PWD/streaming-drl STREAMING_PYTHON=$PWD/peer/bin/python
    export OMP_NUM_THREADS=1
    python benchmarks/study.py docs/results/study/streaming.txt --out FOLDER --seeds 1 2

It takes --env, --total_steps, --seed, --savedir and --xpid. All else is the script's
default: one game, one step per update, no replay. An interrupted run begins anew.
"""

import argparse
import re
import sys
from pathlib import Path

from cleanrl import log_games

GAME = re.compile(r"Episodic Return: (?P<ret>[-+.e\d]+), Time Step (?P<step>\d+)")


def stream_ac(clone: Path, args: argparse.Namespace) -> list[str | Path]:
    return [
        *(clone / "stream_ac_discrete_minatar.py", "--debug", "--env_name", args.env),
        *("--seed", str(args.seed), "--total_steps", str(args.total_steps)),
    ]


if __name__ == "__main__":
    sys.exit(log_games("STREAMING", __doc__, stream_ac, GAME))
