"""Trains with several settings and seeds and compares what they reach.

    python benchmarks/study.py docs/results/study/breakout.txt --out FOLDER --seeds 1 2

The first line of a study file has the flags of all runs, with the script in front (of
torchbeast, or NAME.py of this folder). Each other line is one setting: a name, a colon
and its flags. # begins a comment.

    monobeast --preset minatar --total_steps 2000000
    preset:
    adam: --optimizer adam --learning_rate 0.001

The runs come one after the other: all settings with the first seed, then the next seed.
FOLDER gets the runs, `curves/NAME-SEED.csv` (100 points of each) and `table.md`: the
return (mean of the last 100 games) at a quarter, a half and all of the steps, and the
largest fall of each seed's return below its highest so far.

Started again with the same --out, an unfinished run goes on, and one whose curve is
there counts as finished, also if its folder is gone. So a study can go on elsewhere
with its curves only. If you change the flags of a setting, remove its curves.
"""

import argparse
import csv
import dataclasses
import itertools
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torchbeast.tools.saved_runs import read_run

POINTS = 100  # of a curve
STOP_SECONDS = 120  # for a run to save
COLUMNS = ("step", "_time", "mean_game_return_100", "entropy", "sps", "largest_fall")


class StudyError(Exception):
    """The study file can't be used, or a run failed."""


@dataclasses.dataclass
class Study:
    """A study file: the script, the flags of all runs, and those of each setting."""

    script: str
    flags: list[str]
    settings: dict[str, list[str]]


def read_study(path: Path) -> Study:
    """Raises StudyError if a line is not as the module's text says."""
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    lines = [line for line in lines if line]
    if len(lines) < 2:
        raise StudyError(f"{path} needs a line of flags and one setting at least")
    script, *flags = shlex.split(lines[0])
    settings = {}
    for line in lines[1:]:
        name, colon, own_flags = line.partition(":")
        if not colon or not name.replace("-", "").replace("_", "").isalnum():
            raise StudyError(f"{path}: expected 'NAME: FLAGS', got {line!r}")
        if name in settings:
            raise StudyError(f"{path}: the setting {name} occurs twice")
        settings[name] = shlex.split(own_flags)
    return Study(script, flags, settings)


def train(study: Study, name: str, seed: int, savedir: Path) -> Path:
    """Trains one run to its end and returns its folder. Raises StudyError."""
    xpid = f"{name}-{seed}"
    words = ["-m", f"torchbeast.{study.script}"]
    if study.script.endswith(".py"):  # such as lagged.py
        words = [str(Path(__file__).with_name(study.script))]
    command = [
        *(sys.executable, *words),
        *(*study.flags, *study.settings[name]),
        *("--seed", str(seed), "--savedir", str(savedir), "--xpid", xpid),
    ]
    print(shlex.join(command[1:]), flush=True)
    with (savedir / f"{xpid}.out").open("a") as console:
        run = subprocess.Popen(command, stdout=console, stderr=console)
    try:
        status = run.wait()
    except BaseException:  # of a stop signal: the run saves, which takes a while
        run.terminate()
        try:
            run.wait(STOP_SECONDS)
        finally:
            run.kill()  # unless it has ended
        raise
    if status:
        raise StudyError(f"{xpid} ended with status {status}: {savedir}/{xpid}.out")
    return savedir / xpid


def read_curve(folder: Path) -> list[dict[str, float]]:
    """POINTS rows of logs.csv, evenly spread, of updates after the first game.

    `largest_fall` is that of the whole run.
    """
    with (folder / "logs.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["mean_game_return_100"]]
    if not rows:
        raise StudyError(f"no game ended in {folder}: raise --total_steps")
    last = len(rows) - 1
    places = sorted({round(i * last / (POINTS - 1)) for i in range(POINTS)})
    fall = {"largest_fall": str(read_run(folder).largest_fall())}
    return [as_numbers({**rows[i], **fall}) for i in places]


def as_numbers(row: dict[str, str]) -> dict[str, float]:
    return {name: float(row.get(name) or "nan") for name in COLUMNS}


def kept_curve(path: Path, flags: Sequence[str]) -> list[dict[str, float]] | None:
    """What write_curve wrote; None: there is none. Raises StudyError if it is short."""
    if not path.exists():
        return None
    with path.open() as file:
        curve = [as_numbers(row) for row in csv.DictReader(file)]
    given = [x for flag, x in itertools.pairwise(flags) if flag == "--total_steps"]
    step = curve[-1]["step"] if curve else 0
    if given and step < int(given[-1]):  # the last one counts
        raise StudyError(f"{path} ends at step {step:.0f}, not {given[-1]}: remove it")
    return curve


def return_at(curve: list[dict[str, float]], share: float) -> float:
    """The return at a share of the run's steps."""
    step = share * curve[-1]["step"]
    return min(curve, key=lambda row: abs(row["step"] - step))["mean_game_return_100"]


def table(study: Study, curves: dict[str, dict[int, list[dict[str, float]]]]) -> str:
    """A Markdown table, a line per setting: means over seeds, and values per seed."""
    lines = [
        f"`{study.script} {shlex.join(study.flags)}` and:",
        "",
        "| setting | flags | at 1/4 | at 1/2 | at the end | seeds | largest falls "
        "| entropy | SPS |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, by_seed in curves.items():
        runs = list(by_seed.values())
        ends = [return_at(curve, 1.0) for curve in runs]
        cells = [
            name,
            f"`{shlex.join(study.settings[name])}`" if study.settings[name] else "",
            *(
                f"{statistics.fmean(return_at(curve, share) for curve in runs):.2f}"
                for share in (0.25, 0.5, 1.0)
            ),
            ", ".join(f"{x:.2f}" for x in ends),
            ", ".join(f"{curve[-1]['largest_fall']:.0%}" for curve in runs),
            f"{statistics.fmean(curve[-1]['entropy'] for curve in runs):.2f}",
            f"{statistics.median(row['sps'] for c in runs for row in c[1:] or c):,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_curve(path: Path, curve: list[dict[str, float]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(curve)


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path, help="the study file")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    args = parser.parse_args(argv)
    try:
        study = read_study(args.study)
        (args.out / "curves").mkdir(parents=True, exist_ok=True)
        curves: dict[str, dict[int, list[dict[str, float]]]] = {}
        for seed in args.seeds:
            for name in study.settings:
                file = args.out / "curves" / f"{name}-{seed}.csv"
                flags = [*study.flags, *study.settings[name]]
                curve = kept_curve(file, flags)
                if curve is None:
                    curve = read_curve(train(study, name, seed, args.out))
                    write_curve(file, curve)
                curves.setdefault(name, {})[seed] = curve
                (args.out / "table.md").write_text(table(study, curves))
    except (StudyError, ValueError, OSError) as error:
        print(f"study.py: {error}", file=sys.stderr)
        return 1
    print(table(study, curves))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
