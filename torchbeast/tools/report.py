"""Print a table of runs, or of groups of runs: aligned, or Markdown into a pipe.

    python -m torchbeast.report RUN [RUN ...]
    python -m torchbeast.report --group RUN [RUN ...]
    python -m torchbeast.report --method NAME RUN [RUN ...] --method ... --scores FILE

A RUN is a name in savedir, or a folder with logs.csv (or logs.csv.gz) and meta.json.
The row of a group has the interquartile mean of its tests and returns with its 95 %
interval, and the largest fall of all. With --scores, a method has a row over all tasks.
"""

import argparse
import datetime
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torchbeast.base.errors import FlagError, using
from torchbeast.tools import groups, protocol
from torchbeast.tools.saved_runs import SavedRun, read_runs

COLUMNS = {"step", "_time", "games", "mean_game_return_100"}
References = dict[str, tuple[float, float]]  # per task, what counts as 0 and as 1


def table_row(run: SavedRun) -> dict[str, str]:
    """What the table says about a run."""
    args, machine = run.meta.get("args", {}), run.meta.get("hardware")
    git, changes = run.meta.get("git") or {}, run.meta.get("preset_changes", {})
    preset = [args.get("preset") or "", *(f"--{k} {x}" for k, x in changes.items())]
    games, mean = run.last("games") or 0, run.last("mean_game_return_100")
    few = f" ({games:.0f} games)" if 0 < games < 100 else ""
    seconds = run.wall_clock()
    seconds = seconds[np.isfinite(seconds)]
    clock = datetime.timedelta(seconds=round(seconds[-1])) if len(seconds) else ""
    hardware = ["unknown"]
    if machine:
        hardware = [f"{machine['cpus']} × {machine['cpu']}", *machine["gpus"]]
    return {
        "run": run.name,
        "protocol": protocol.describe(run.protocol()),
        "preset": " ".join(preset).strip(),
        "seed": str(args.get("seed", "")),
        "commit": git.get("commit", "")[:7] + " + changes" * bool(git.get("dirty")),
        "steps": f"{run.last('step') or 0:,.0f}",
        "test, mean ± std": _test(run) if run.test else "",
        "return, last 100 games": "" if mean is None else f"{mean:.2f}{few}",
        "largest fall": _percent([run.largest_fall()]),
        "wall-clock": str(clock),
        "hardware": ", ".join(hardware),
    }


def _differences(run: SavedRun) -> list[str]:
    """In what the result of --mode test differs from the run."""
    step, rules = run.test.get("step"), protocol.find_protocol(run.test.get("flags"))
    found = [] if step in (None, run.last("step")) else [f"at step {step:,}"]
    if rules not in (None, run.protocol()):
        found.append(f"other protocol: {protocol.describe(rules)}")
    return [f"**{x}**" for x in found]


def _test(run: SavedRun) -> str:
    test = run.test
    notes = [f"{test['num_games']} games", test["policy"], *_differences(run)]
    return f"{test['mean']:.2f} ± {test['std']:.2f} ({', '.join(notes)})"


def _percent(falls: Sequence[float]) -> str:
    known = [x for x in falls if not np.isnan(x)]
    return f"{max(known):.0%}" if known else ""


def group_rows(
    name: str,
    runs: Sequence[SavedRun],
    steps: Sequence[int],
    references: References,
    tuned_on: Sequence[int] = (),
) -> list[dict[str, str]]:
    """A row per task of a group, and one over all tasks if there are references.

    Raises FlagError if these runs can't be compared.
    """
    tasks: dict[str, list[SavedRun]] = {}
    begun = [x for x in runs if x.last("mean_game_return_100") is not None]
    kept = [x for x in begun if x.meta.get("args", {}).get("seed") not in tuned_on]
    if not kept:
        raise FlagError(f"{name} has no return yet, or all seeds are of --tuned_on")
    for run in kept:
        tasks.setdefault((run.protocol() or {}).get("env", "unknown"), []).append(run)
    groups.check_protocols({f"{name}, {task}": runs for task, runs in tasks.items()})
    found = {task: _group_row({task: tasks[task]}, steps) for task in tasks}
    if references and len(tasks) > 1:
        if missing := tasks.keys() - references.keys():
            raise FlagError(f"--scores has no {min(missing)!r}")
        what = f"all {len(tasks)}, normalised"
        found[what] = _group_row(tasks, steps, references)
    tuned, new = len(begun) - len(kept), len(runs) - len(begun)
    out = f" ({tuned} of tuning left out)" * (tuned > 0)
    out += f" ({new} without a return left out)" * (new > 0)
    return [
        {"group": name, "task": task, **row, "runs": row["runs"] + out}
        for task, row in found.items()
    ]


def _group_row(
    tasks: dict[str, list[SavedRun]],
    steps: Sequence[int],
    references: References | None = None,
) -> dict[str, str]:
    runs = [run for members in tasks.values() for run in members]
    ends = sorted({run.last("step") or 0 for run in runs})

    def summary(score: Callable[[SavedRun], float]) -> str:
        scores = []
        for task, members in tasks.items():
            zero, one = references[task] if references else (0.0, 1.0)
            returns = np.array([score(run) for run in members])
            scores.append((returns - zero) / (one - zero))
        mean = groups.interquartile_mean(np.concatenate(scores))
        low, high = groups.iqm_interval(scores)
        # Single runs say nothing about the spread.
        spread = f" [{low:.2f}, {high:.2f}]" if len(runs) > len(tasks) else ""
        return f"{mean:.2f}{spread}"

    # Tests count if each run has one, of its last step, and all by the same policy.
    policies = {run.test.get("policy") for run in runs}
    are_alike = len(policies) == 1 and not any(map(_differences, runs))
    counts = [str(len(members)) for members in tasks.values()]  # of tasks: weights
    total = str(len(runs)) if len(set(counts)) == 1 else " + ".join(counts)
    row = {"runs": total, "steps": f"{ends[0]:,.0f}"}
    if len(ends) > 1:
        row["steps"] += f" to {ends[-1]:,.0f}"
    row["IQM of tests [95 %]"] = ""
    if are_alike and None not in policies:
        row["IQM of tests [95 %]"] = summary(lambda run: run.test["mean"])
    for step in steps:
        at_step = functools.partial(SavedRun.score, step=step)
        row[f"IQM at {step:,} [95 %]"] = summary(at_step)
    row["IQM at the end [95 %]"] = summary(SavedRun.score)
    row["largest fall"] = _percent([run.largest_fall() for run in runs])
    return row


def read_references(path: pathlib.Path) -> References:
    """Reads --scores: a JSON object with two returns per task, or atari."""
    if str(path) == "atari":  # random, human with no-ops: Wang et al. 2016, 1511.06581
        path = pathlib.Path(__file__).with_name("atari.json")
    example = '{"MinAtar/Breakout-v1": [0, 20]}'
    with using(path, f"must have two returns per task, such as {example}"):
        found = json.loads(path.read_text(encoding="utf-8"))
        references = {task: (float(a), float(b)) for task, (a, b) in found.items()}
        if any(not np.isfinite(a - b) or a == b for a, b in references.values()):
            raise ValueError("two finite numbers that differ are allowed")
        return references


def filled(rows: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """The columns that are not empty in all rows."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {name: cells for name, cells in columns.items() if any(cells)}


def aligned(rows: Sequence[dict[str, str]]) -> str:
    """For a terminal: what all rows share, long cells, then a table of the rest."""
    lines, table = [], []
    for name, cells in filled(rows).items():
        width = max(map(len, [name, *cells]))
        if len(set(cells)) == 1:
            lines.append(f"{name}: {cells[0]}")
        elif width > 60:  # such as protocols: a line each
            lines += [f"{next(iter(row.values()))}: {row[name]}" for row in rows]
        else:
            table.append([x.ljust(width) for x in [name, *cells]])
    return "\n".join([*lines, *map("  ".join, zip(*table, strict=True))])


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """For a page."""
    columns = filled(rows)
    cells = [[row[name].replace("|", "\\|") for name in columns] for row in rows]
    lines = [[*columns], ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m torchbeast.report",
        description="Print a table of runs; into a pipe or a file, in Markdown.",
    )
    add = parser.add_argument
    add("xpids", nargs="*", metavar="RUN", help="a name, a pattern or a folder")
    add("--savedir", type=pathlib.Path, default="~/logs/torchbeast")
    group_help = "a row per group of runs whose names differ only by a seed at the end"
    add("--group", action="store_true", help=group_help)
    method: dict[str, Any] = {"nargs": "+", "action": "append", "default": []}
    method["help"] = "the same for these runs, with a row per task; may be repeated"
    add("--method", metavar=("NAME", "RUN"), **method)
    at_help = "compare groups after these steps, too"
    add("--at", nargs="+", type=int, default=[], metavar="STEP", help=at_help)
    tuned_help = "seeds on which settings were chosen; groups leave these runs out"
    add("--tuned_on", nargs="+", type=int, default=[], metavar="SEED", help=tuned_help)
    scores_help = "JSON with the returns that count as 0 and as 1, per task, or atari"
    add("--scores", type=pathlib.Path, metavar="FILE", help=scores_help)
    arguments = parser.parse_args(argv)
    if bool(arguments.xpids) == bool(arguments.method):
        parser.error("give either runs, or --method NAME RUN [RUN ...]")
    try:
        savedir, rows = arguments.savedir.expanduser(), []
        runs = read_runs(arguments.xpids, savedir, COLUMNS)
        named = groups.by_name(runs) if arguments.group else {}
        for name, *xpids in arguments.method:
            named.setdefault(name, []).extend(read_runs(xpids, savedir, COLUMNS))
        for run in [] if named else runs:
            with using(f"meta.json or test.json of {run.name}", "is damaged"):
                rows.append(table_row(run))
        references = read_references(arguments.scores) if arguments.scores else {}
        of_groups = arguments.at, references, arguments.tuned_on
        for name, members in named.items():
            with using(f"a meta.json or test.json of {name}", "is damaged"):
                rows += group_rows(name, members, *of_groups)
    except (ValueError, OSError, RuntimeError) as error:  # the last: of ~ without HOME
        parser.exit(2, f"Cannot report: {error}\n")
    print((aligned if sys.stdout.isatty() else markdown)(rows))
