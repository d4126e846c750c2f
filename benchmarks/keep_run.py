"""Copies runs into a folder that is small enough to commit.

    python benchmarks/keep_run.py ~/logs/torchbeast/pong-1 --to docs/results --name pong

Of logs.csv it keeps --rows rows, evenly spread, with the first and the last one, and
those with an evaluation. meta.json, and test.json if it exists, get the default
--savedir.
"""

import argparse
import csv
import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SAVEDIR = "~/logs/torchbeast"


def thin(header: list[str], rows: list[list[str]], most: int) -> list[list[str]]:
    """`most` of the rows, at least 2, evenly spread; and those with an eval_return."""
    most = min(max(most, 2), len(rows))
    places = {round(i * (len(rows) - 1) / max(most - 1, 1)) for i in range(most)}
    if "eval_return" in header:
        column = header.index("eval_return")
        places |= {i for i, row in enumerate(rows) if row[column]}
    return [rows[i] for i in sorted(places)]


def without_paths(nested: Any) -> Any:
    """A copy of meta.json or test.json in which each savedir is the default."""
    if isinstance(nested, dict):
        return {
            k: SAVEDIR if k == "savedir" else without_paths(v)
            for k, v in nested.items()
        }
    if isinstance(nested, list):
        return [without_paths(x) for x in nested]
    return nested


def keep(run: Path, folder: Path, most: int) -> None:
    """Writes logs.csv.gz, meta.json and test.json of a run to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (run / "logs.csv").open(newline="") as file:
        header, *rows = list(csv.reader(file)) or [[]]
    if rows and len(rows[-1]) != len(header):  # an unfinished line
        del rows[-1]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *thin(header, rows, most)])
    # mtime: the same run gives the same bytes.
    data = gzip.compress(text.getvalue().encode(), compresslevel=9, mtime=0)
    (folder / "logs.csv.gz").write_bytes(data)
    for name in ("meta.json", "test.json"):
        if (run / name).exists():
            content = without_paths(json.loads((run / name).read_text()))
            (folder / name).write_text(json.dumps(content, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--to", type=Path, default=Path("docs/results"))
    parser.add_argument("--name", help="of the copy; default: that of the run")
    parser.add_argument("--rows", type=int, default=1000)
    args = parser.parse_args(argv)
    keep(args.run, args.to / (args.name or args.run.name), args.rows)


if __name__ == "__main__":
    main()
