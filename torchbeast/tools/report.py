"""Print a Markdown table of runs, or of groups of runs.

    python -m torchbeast.report RUN [RUN ...]
    python -m torchbeast.report --group RUN [RUN ...]
    python -m torchbeast.report --method NAME RUN [RUN ...] --method ... --scores FILE

A RUN is a name in savedir, or a folder with logs.csv (or logs.csv.gz) and meta.json.

With --group, runs whose names differ only by a seed at the end are one row: the
interquartile mean of their tests and returns with its 95 % interval, and the largest
fall of all. With --method, all runs of a method are one group, with one row per task.
With --scores, which has two reference returns per task (atari: those of a random and of
a human player), there is also a row over all tasks. --tuned_on names the seeds on which
settings were chosen; groups leave these runs out and say so.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torchbeast.base.errors import using
from torchbeast.tools import groups, protocol
from torchbeast.tools.atari_scores import RANDOM_AND_HUMAN
from torchbeast.tools.saved_runs import SavedRun, read_runs


def table_row(run: SavedRun) -> dict[str, str]:
    """What the table says about a run."""
    meta = run.meta
    args: dict[str, Any] = meta.get("args", {})
    starts = [*meta.get("starts", ()), meta]
    rules = run.protocol()
    if rules is not None:
        rules.pop("env")
    each = [start.get("args") or start.get("flags") for start in starts]
    _, own = protocol.split_common(map(protocol.find_protocol, each))
    games, mean = run.last("games"), run.last("mean_game_return_100")
    fall, paused = run.largest_fall(), run.pauses()
    pauses = f", paused {_duration(paused)}" if paused else ""
    return {
        "run": run.name,
        "env": args.get("env") or "",
        "protocol": "**changed during the run**"
        if any(own)
        else protocol.describe(rules) or "as registered",
        "preset": _preset(meta),
        "seed": str(args.get("seed", "")),
        "commit": " → ".join(dict.fromkeys(filter(None, map(_commit, starts)))),
        "steps": f"{run.last('step') or 0:,.0f}",
        "test, mean ± std": _test(run),
        "return, last 100 games": ""
        if mean is None
        else f"{mean:.2f}" + (f" ({games:.0f} games)" if (games or 100) < 100 else ""),
        "largest fall": "" if np.isnan(fall) else f"{fall:.0%}",
        "wall-clock": _duration(run.seconds()) + pauses,
        "hardware": _hardware(meta.get("hardware")),
    }


def _hardware(found: dict[str, Any] | None) -> str:
    """In a few words: "2 × AMD EPYC, NVIDIA H100"; "unknown" if there is nothing."""
    if not found:
        return "unknown"
    return ", ".join([f"{found['cpus']} × {found['cpu']}", *found["gpus"]])


def _test(run: SavedRun) -> str:
    """The result of --mode test, and in what it differs from the run."""
    test = run.test
    if test is None:
        return ""
    notes = [f"{test['num_games']} games", test["policy"]]
    if test["step"] not in (None, run.last("step")):
        notes.append(f"**at step {test['step']:,}**")
    if test["protocol"] and test["protocol"] != run.protocol():
        _, (runs, own) = protocol.split_common([run.protocol() or {}, test["protocol"]])
        other = protocol.describe(own) or f"without {protocol.describe(runs)}"
        notes.append(f"**other protocol: {other}**")
    return f"{test['mean']:.2f} ± {test['std']:.2f} ({', '.join(notes)})"


def _preset(meta: dict[str, Any]) -> str:
    name = meta.get("preset") or meta.get("args", {}).get("preset")
    changes = {k: x for k, x in meta.get("preset_changes", {}).items() if k != "env"}
    return " ".join([name or "", *(f"--{k} {x}" for k, x in changes.items())]).strip()


def _commit(meta: dict[str, Any]) -> str:
    git = meta.get("git") or {}
    return git.get("commit", "")[:7] + (" + changes" if git.get("dirty") else "")


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


Tasks = dict[str, list[SavedRun]]  # the runs of each task


def group_rows(
    name: str,
    runs: Sequence[SavedRun],
    steps: Sequence[int],
    references: dict[str, tuple[float, float]],
    tuned_on: Sequence[int] = (),
) -> list[dict[str, str]]:
    """A row per task of a group, and one over all tasks if there are references.

    Args:
      steps: at which returns are compared, besides the end.
      references: per task the returns that count as 0 and as 1.
      tuned_on: seeds on which settings were chosen; these runs are left out.

    Raises:
      ValueError: a run has no return at one of the steps, runs of one task have
        different protocols, or a task lacks references.
    """
    tasks: Tasks = {}
    kept = [x for x in runs if x.meta.get("args", {}).get("seed") not in tuned_on]
    if not kept:
        raise ValueError(f"all runs of {name} have seeds of --tuned_on")
    for run in kept:
        tasks.setdefault((run.protocol() or {}).get("env", "unknown"), []).append(run)
    groups.check_protocols(
        {f"{name}, {task}": members for task, members in tasks.items()}
    )
    rows = [_group_row(name, task, {task: tasks[task]}, steps) for task in tasks]
    if references and len(tasks) > 1:
        if missing := [task for task in tasks if task not in references]:
            known = ", ".join(references)
            raise ValueError(f"--scores has no {missing[0]!r}; it has: {known}")
        what = f"all {len(tasks)}, normalised"
        rows.append(_group_row(name, what, tasks, steps, references))
    if left_out := len(runs) - len(kept):
        for row in rows:
            row["runs"] += f" ({left_out} of tuning left out)"
    return rows


def _group_row(
    name: str,
    what: str,
    tasks: Tasks,
    steps: Sequence[int],
    references: dict[str, tuple[float, float]] | None = None,
) -> dict[str, str]:
    runs = [run for members in tasks.values() for run in members]
    last_steps = [run.last("step") or 0 for run in runs]
    first, last = (f"{step:,.0f}" for step in (min(last_steps), max(last_steps)))
    row = {"group": name, "task": what, "runs": str(len(runs))}
    row["steps"] = last if first == last else f"{first} to {last}"

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

    policies = {run.test["policy"] for run in runs if run.test}
    are_alike = len(policies) == 1 and all(
        run.test
        and run.test["step"] in (None, run.last("step"))
        and run.test["protocol"] in (None, run.protocol())
        for run in runs
    )
    row["IQM of tests [95 %]"] = (
        summary(lambda run: (run.test or {})["mean"]) if are_alike else ""
    )
    for step in (*steps, None):
        place = "at the end" if step is None else f"at {step:,}"
        row[f"IQM {place} [95 %]"] = summary(
            functools.partial(SavedRun.score, step=step)
        )
    falls = [x for run in runs if not np.isnan(x := run.largest_fall())]
    row["largest fall"] = f"{max(falls):.0%}" if falls else ""
    return row


def read_references(path: pathlib.Path) -> dict[str, tuple[float, float]]:
    """Reads --scores: a JSON object with two returns per task, or atari.

    Raises:
      ValueError: the file has something else.
    """
    if str(path) == "atari":
        return {f"Atari {game}": x for game, x in RANDOM_AND_HUMAN.items()}
    example = '{"MinAtar/Breakout-v1": [0, 20]}'
    with using(path, f"must have two returns per task, such as {example}"):
        found = json.loads(path.read_text(encoding="utf-8"))
        references = {task: (float(a), float(b)) for task, (a, b) in found.items()}
        if any(not np.isfinite(a - b) or a == b for a, b in references.values()):
            raise ValueError("two finite numbers that differ are allowed")
        return references


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """A table; leaves out columns that are empty in all rows."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    cells = [[row[name] for name in names] for row in rows]
    lines = [names, ["---"] * len(names), *cells]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
        for line in lines
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m torchbeast.report",
        description="Print a Markdown table of runs, or of groups of runs.",
    )
    add = parser.add_argument
    runs_help = "name of a run in savedir, or a run's folder"
    add("xpids", nargs="*", metavar="RUN", help=runs_help)
    add("--savedir", type=pathlib.Path, default="~/logs/torchbeast")
    group_help = (
        "a row per group of runs whose names differ only by a seed at the end, with "
        "the interquartile mean of their returns and its 95 %% interval"
    )
    add("--group", action="store_true", help=group_help)
    method: dict[str, Any] = {"nargs": "+", "action": "append", "default": []}
    method["help"] = "the same for these runs, with a row per task; may be repeated"
    add("--method", metavar=("NAME", "RUN"), **method)
    at_help = "compare groups after these steps, too"
    add("--at", nargs="+", type=int, default=[], metavar="STEP", help=at_help)
    scores_help = (
        "JSON with the returns that count as 0 and as 1, per task, or atari (a random "
        "and a human player): gives each method a row over all its tasks"
    )
    tuned_help = "seeds on which settings were chosen; groups leave these runs out"
    add("--tuned_on", nargs="+", type=int, default=[], metavar="SEED", help=tuned_help)
    add("--scores", type=pathlib.Path, metavar="FILE", help=scores_help)
    arguments = parser.parse_args(argv)
    too_short = any(len(words) < 2 for words in arguments.method)
    if too_short or bool(arguments.xpids) == bool(arguments.method):
        parser.error("give either runs, or --method NAME RUN [RUN ...]")
    grouped = arguments.group or arguments.method
    if (arguments.at and not grouped) or (arguments.scores and not arguments.method):
        parser.error("--at needs --group or --method, and --scores needs --method")
    rows: list[dict[str, str]] = []
    try:
        savedir = arguments.savedir.expanduser()
        if not grouped:
            for run in read_runs(arguments.xpids, savedir):
                with using(f"meta.json of {run.name}", "is damaged"):
                    rows.append(table_row(run))
                    markdown(rows)
        else:
            every = read_runs(arguments.xpids, savedir)
            named = groups.by_name(every, lambda run: run.name)
            for name, *xpids in arguments.method:
                named.setdefault(name, []).extend(read_runs(xpids, savedir))
            references = read_references(arguments.scores) if arguments.scores else {}
            rows = [
                row
                for name, runs in named.items()
                for row in group_rows(
                    name, runs, arguments.at, references, arguments.tuned_on
                )
            ]
    except (ValueError, OSError, RuntimeError) as error:  # the last: of ~ without HOME
        parser.exit(2, f"Cannot report: {error}\n")
    print(markdown(rows))
