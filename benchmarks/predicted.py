"""What autotune measures in its short trials beside what the run then makes.

    python benchmarks/predicted.py FILE monobeast --preset minatar  # predict
    python benchmarks/predicted.py FILE                             # run, and compare

The first command appends the prediction to FILE, one JSON object per line. The second
runs each of its layouts for 40 s after a warm-up of 8 s, as throughput.py does, and
adds the speed. Between them the predictions can be committed.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from throughput import describe_machine, run_variant

SECONDS = {"warm_up": 8.0, "seconds": 40.0, "window": 2.0}


def predict(file: Path, variant: str, flags: Sequence[str]) -> None:
    command = [sys.executable, "-m", "torchbeast.tools.autotune", variant, *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    *_, words, layout = done.stdout.strip().splitlines()
    speed = float(words.split()[1].replace(",", ""))
    found = {"variant": variant, "flags": [*flags, *layout.split()]}
    found |= {"predicted": speed, "machine": describe_machine()}
    with file.open("a") as lines:
        lines.write(json.dumps({**found, "report": done.stdout.splitlines()}) + "\n")
    print(variant, *flags, f"\n{done.stdout}", flush=True)


def compare(file: Path) -> None:
    args = argparse.Namespace(**SECONDS)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if "run" not in row:
            row["run"] = run_variant(row["variant"], row["flags"], args)
            file.write_text("".join(json.dumps(x) + "\n" for x in rows))
        sps, others = row["run"]["sps"], row["run"]["others"]
        print(
            f"{row['variant']} {' '.join(row['flags'])}: {row['predicted']:,.0f} "
            f"predicted, {sps:,.0f} measured, {sps / row['predicted']:.2f} of it; "
            f"others used {others:.2f} cores",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> None:
    file, *words = sys.argv[1:] if argv is None else argv
    if words:
        predict(Path(file), words[0], words[1:])
    else:
        compare(Path(file))


if __name__ == "__main__":
    main()
