"""Says whether the agent still learns as well as it did.

    python benchmarks/regression.py                 compare with the stored returns
    python benchmarks/regression.py --store         measure and store them

Trains MinAtar Breakout and CartPole in both variants with their presets, for a part of
the presets' steps, with each of --seeds. A run's return is the mean of its last 100
games. benchmarks/regression.json has the returns of earlier runs. A case fails if the
mean over the seeds is below the band, which begins a tenth below the worst stored seed.

Exit status: 0 all cases are in their bands or above, 1 a case fails or a run failed.
Takes about half an hour with three seeds on 2 cores.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study import Study, StudyError, read_curve, return_at, train
from throughput import describe_machine

STORED = Path(__file__).with_name("regression.json")
CASES = {
    "breakout": ["--preset", "minatar", "--total_steps", "500000"],
    "cartpole": ["--preset", "classic-control", "--total_steps", "200000"],
}
SCRIPTS = {"mono": "monobeast", "poly": "polybeast"}
TOLERANCE = 0.1  # share of the worst stored return


def low_end(stored: Sequence[float]) -> float:
    """The least mean return that passes."""
    return min(stored) - TOLERANCE * abs(min(stored))


def measure(case: str, seeds: Sequence[int], out: Path) -> list[float]:
    """The return of each seed. Raises StudyError if a run fails."""
    variant, game = case.split("-")
    study = Study(SCRIPTS[variant], CASES[game], {case: []})
    return [return_at(read_curve(train(study, case, seed, out)), 1.0) for seed in seeds]


def verdict(case: str, measured: Sequence[float], stored: dict[str, Any]) -> str:
    """Begins with "ok", "FAILED" or, if no runs with these flags are stored, "new"."""
    flags = CASES[case.split("-")[1]]
    if case not in stored or stored[case]["flags"] != flags:
        return "new: there is nothing to compare it with; run with --store"
    low = low_end(stored[case]["returns"])
    word = "ok" if statistics.fmean(measured) >= low else "FAILED"
    return f"{word}: {low:.1f} and more were expected"


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__
    names = [f"{variant}-{game}" for game in CASES for variant in SCRIPTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("build/regression"))
    parser.add_argument("--stored", type=Path, default=STORED, help="the JSON file")
    parser.add_argument("--store", action="store_true", help="replace what is stored")
    args = parser.parse_args(argv)
    try:
        args.out.mkdir(parents=True)
    except FileExistsError:
        parser.error(f"--out {args.out} exists, maybe with runs of another commit")
    stored = json.loads(args.stored.read_text()) if args.stored.exists() else {}
    failed = False
    for case in args.cases:
        try:
            measured = measure(case, args.seeds, args.out)
        except (StudyError, OSError) as error:
            print(f"{case}: FAILED: {error}", flush=True)
            failed = True
            continue
        said = verdict(case, measured, stored)
        failed = failed or (said.startswith("FAILED") and not args.store)
        returns = ", ".join(f"{x:.1f}" for x in measured)
        print(
            f"{case}: {statistics.fmean(measured):.1f} ({returns}); {said}", flush=True
        )
        if args.store:
            stored[case] = {
                "returns": measured,
                "flags": CASES[case.split("-")[1]],
                "machine": describe_machine(),
            }
            args.stored.write_text(json.dumps(stored, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
