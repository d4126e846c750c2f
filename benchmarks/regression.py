"""Says whether the agent still learns as well as it did.

    python benchmarks/regression.py                 compare with the stored scores
    python benchmarks/regression.py --store --seeds 11 12 13 14 15 16 17 18
    python benchmarks/regression.py --broken bootstrap     see broken.py; must fail

Trains each case with each of --seeds, two runs at once, and compares their scores with
those of benchmarks/regression.json. A case fails if its scores are lower than the
stored ones by a permutation test, at the level of ALPHA: of all ways to choose which
scores are the new ones, at most this share has a mean that is as low. So a sound agent
fails in one of 50 cases; take other seeds then. With four new and eight stored scores
there are 495 ways.

The score is the mean over the run's steps of the return (mean of the last 100 games).
It varies less from seed to seed than the return at the end, and falls if the agent
learns later or less.

Until scores are stored, each case is "new".

Exit status: 0 all cases pass, 1 a case fails or a run failed. Needs the extra minatar
and `gymnasium[mujoco]`.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from broken import FAULTS
from study import Study, StudyError, read_curve, train
from throughput import describe_machine

STORED = Path(__file__).with_name("regression.json")
MUJOCO = ["--preset", "mujoco", "--total_steps", "300000"]
SMALL_BATCHES = ["--batch_size", "8", "--updates_per_batch", "16", "--minibatches", "4"]
# Tasks whose scores differ little from seed to seed.
CASES = {
    "cartpole": ["--preset", "classic-control", "--total_steps", "200000"],
    "half_cheetah": [*MUJOCO, "--env", "HalfCheetah-v5", *SMALL_BATCHES],
    "freeway": [
        *("--preset", "minatar", "--env", "MinAtar/Freeway-v1"),
        *("--total_steps", "500000"),
    ],
}
SCRIPTS = {"mono": "monobeast", "poly": "polybeast"}
ALPHA = 0.02


def score(curve: Sequence[dict[str, float]]) -> float:
    """The mean of the return over the steps, by the trapezoidal rule."""
    steps = [row["step"] for row in curve]
    returns = [row["mean_game_return_100"] for row in curve]
    return float(np.trapezoid(returns, steps)) / (steps[-1] - steps[0])


def p_value(new: Sequence[float], stored: Sequence[float]) -> float:
    """The share of all choices of as many scores whose mean is at most the new one."""
    scores = [*new, *stored]
    most = sum(new) + 1e-9 * abs(sum(new))
    sums = [sum(chosen) for chosen in itertools.combinations(scores, len(new))]
    return sum(x <= most for x in sums) / len(sums)


def measure(
    case: str, seeds: Sequence[int], out: Path, broken: str | None = None
) -> list[float]:
    """The score of each seed. Raises StudyError if a run fails."""
    variant, game = case.split("-")
    script = "broken.py" if broken else SCRIPTS[variant]
    study = Study(script, [*filter(None, [broken]), *CASES[game]], {case: []})
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda seed: train(study, case, seed, out), seeds))
    return [score(read_curve(folder)) for folder in folders]


def verdict(case: str, measured: Sequence[float], stored: dict[str, Any]) -> str:
    """Begins with "ok", "FAILED" or, if no runs with these flags are stored, "new"."""
    flags = CASES[case.split("-")[1]]
    if case not in stored or stored[case]["flags"] != flags:
        return "new: there is nothing to compare it with; run with --store"
    before = stored[case]["scores"]
    p = p_value(measured, before)
    word = "FAILED" if p <= ALPHA else "ok"
    mean = statistics.fmean(before)
    return f"{word}: p = {p:.3f} against {mean:.1f} of {len(before)} stored seeds"


def main(argv: Sequence[str] | None = None) -> int:
    names = [f"{variant}-{game}" for game in CASES for variant in SCRIPTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path("build/regression"))
    parser.add_argument("--stored", type=Path, default=STORED, help="the JSON file")
    parser.add_argument("--store", action="store_true", help="replace what is stored")
    parser.add_argument(
        "--broken", choices=FAULTS, help="break MonoBeast: only its cases run"
    )
    args = parser.parse_args(argv)
    try:
        args.out.mkdir(parents=True)
    except FileExistsError:
        parser.error(f"--out {args.out} exists, maybe with runs of another commit")
    if args.broken:
        if args.store:
            parser.error("--store with --broken would store a broken agent's scores")
        args.cases = [case for case in args.cases if case.startswith("mono-")]
    stored = json.loads(args.stored.read_text()) if args.stored.exists() else {}
    failed = False
    for case in args.cases:
        try:
            measured = measure(case, args.seeds, args.out, args.broken)
        except (StudyError, OSError) as error:
            print(f"{case}: FAILED: {error}", flush=True)
            failed = True
            continue
        said = verdict(case, measured, stored)
        failed = failed or not (said.startswith("ok") or args.store)
        scores = ", ".join(f"{x:.1f}" for x in measured)
        print(
            f"{case}: {statistics.fmean(measured):.1f} ({scores}); {said}", flush=True
        )
        if args.store:
            stored[case] = {
                "scores": measured,
                "seeds": args.seeds,
                "flags": CASES[case.split("-")[1]],
                "machine": describe_machine(),
            }
            args.stored.write_text(json.dumps(stored, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
