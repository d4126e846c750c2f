"""Print a Markdown table of one or several runs.

    python -m torchbeast.report RUN [RUN ...]

A RUN is a name in savedir, or a folder with logs.csv (or logs.csv.gz) and meta.json.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from torchbeast.core import protocol
from torchbeast.core.hardware import describe_hardware
from torchbeast.core.saved_runs import find_run, read_run, read_test


def table_row(folder: pathlib.Path) -> dict[str, str]:
    """What the table says about the run in `folder`."""
    run = read_run(folder)
    meta = run.meta
    args: dict[str, Any] = meta.get("args") or {}
    starts = [*meta.get("starts", ()), meta]
    rules = {k: x for k, x in (run.protocol() or {}).items() if k != "env"}
    # Before the protocol was part of meta.json, it follows from the flags.
    each = [{"args": start.get("flags"), **start} for start in starts]
    _, own = protocol.split_common(protocol.stored_protocol(start) for start in each)
    games, mean = run.last("games"), run.last("mean_game_return_100")
    test = read_test(folder)
    return {
        "run": run.name,
        "env": args.get("env") or "",
        "protocol": "**changed during the run**"
        if any(own)
        else protocol.describe(rules)
        if rules
        else "as registered",
        "preset": _preset(meta),
        "seed": str(args.get("seed", "")),
        "commit": " → ".join(dict.fromkeys(filter(None, map(_commit, starts)))),
        "steps": f"{run.last('step') or 0:,.0f}",
        "return, last 100 games": ""
        if mean is None
        else f"{mean:.2f}" + (f" ({games:.0f} games)" if (games or 100) < 100 else ""),
        "test, mean ± std": ""
        if test is None
        else f"{test['mean']:.2f} ± {test['std']:.2f} "
        f"({test['num_games']} games, {test['policy']})",
        "wall-clock": _duration(run.seconds()),
        "hardware": describe_hardware(meta.get("hardware")),
    }


def _preset(meta: dict[str, Any]) -> str:
    name = meta.get("preset") or (meta.get("args") or {}).get("preset")
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
        description="Print a Markdown table of one or several runs.",
    )
    parser.add_argument(
        "xpids",
        nargs="+",
        metavar="RUN",
        help="name of a run in savedir, or a run's folder",
    )
    parser.add_argument("--savedir", type=pathlib.Path, default="~/logs/torchbeast")
    arguments = parser.parse_args(argv)
    try:
        savedir = arguments.savedir.expanduser()
        folders = [find_run(xpid, savedir) for xpid in arguments.xpids]
        print(markdown([table_row(folder) for folder in dict.fromkeys(folders)]))
    except (ValueError, OSError) as error:
        parser.exit(2, f"Cannot report: {error}\n")


if __name__ == "__main__":
    main()
