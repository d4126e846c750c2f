"""Makes the kept run docs/results/cartpole-exact again and compares every digit.

    python benchmarks/exact_run.py

It takes half a minute on an idle core. The checksum is that of logs.csv without the
columns of time. With --sync, one thread and fp32 a run follows from its flags, but for
the order in which kernels add numbers up. So PyTorch and MKL are told to use kernels
that every x86-64 CPU has (KERNELS). With another PyTorch or another kind of CPU
digits may differ: then the first updates must agree nearly, and the agent must learn.

--keep writes the kept run anew, after a change that is meant to change digits.
"""

import argparse
import gzip
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import equal_logs
import torch

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "results" / "cartpole-exact"
KERNELS = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}
FLAGS = (
    "--preset classic-control --sync --total_steps 122880 --precision fp32 "
    "--torch_threads 1 --disable_checkpoint"
)
NEARLY = 1e-3  # for another PyTorch or CPU: of each value, in the
FIRST_ROWS = 10  # rows; then other actions follow from other digits

Rows = list[dict[str, str]]


def checksum(rows: Rows, columns: Sequence[str]) -> str:
    """SHA-256 of these columns as CSV, with a header."""
    lines = [",".join(columns), *(",".join(row[x] for x in columns) for row in rows)]
    return hashlib.sha256("".join(f"{x}\n" for x in lines).encode()).hexdigest()


def kind() -> str:
    """What digits depend on beside code and flags."""
    return f"PyTorch {torch.__version__} on {platform.machine()}"


def train(savedir: str, flags: list[str]) -> Rows:
    command = [sys.executable, "-m", "torchbeast.monobeast", *flags]
    done = subprocess.run(
        [*command, "--savedir", savedir, "--xpid", KEPT.name],
        env={**os.environ, "PYTHONPATH": str(ROOT), **KERNELS},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"the run ended with {done.returncode}:\n{done.stderr}")
    return equal_logs.read_rows(savedir, KEPT.name)


def keep(savedir: str, rows: Rows) -> str:
    """Writes the folder of the kept run; returns the checksum."""
    KEPT.mkdir(exist_ok=True)
    logs = Path(savedir, KEPT.name, "logs.csv").read_bytes()
    (KEPT / "logs.csv.gz").write_bytes(gzip.compress(logs, mtime=0))
    meta = json.loads(Path(savedir, KEPT.name, "meta.json").read_text())
    meta["args"]["savedir"] = "~/logs/torchbeast"
    meta |= {"kernels": KERNELS, "digits": kind(), "flags_signature": None}
    meta["sha256"] = checksum(rows, list(rows[0]))
    (KEPT / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return meta["sha256"]


def judge(rows: Rows, kept: Rows, meta: dict) -> tuple[bool, str]:
    """Whether a run is the kept one, and a text. Columns that are newer don't count."""
    found = checksum(rows, list(kept[0]))
    if found == meta["sha256"]:
        return True, f"equal: {len(kept)} rows, {len(kept[0])} columns, sha256 {found}"
    text = f"sha256 {found}, not {meta['sha256']}; {equal_logs.compare(kept, rows)}"
    if kind() == meta["digits"]:
        return False, text
    pairs = [
        (float(old[x] or 0), float(new[x] or 0))
        for old, new in zip(kept[:FIRST_ROWS], rows, strict=False)
        for x in old
    ]
    near = all(abs(x - y) <= NEARLY * max(1.0, abs(x)) for x, y in pairs)
    last = [float(x[-1]["mean_game_return_100"]) for x in (kept, rows)]
    is_right = near and last[1] > last[0] / 2
    how = (
        "agree nearly and the agent learns" if is_right else f"or returns {last} differ"
    )
    text += f". It is of {meta['digits']}, this is {kind()}: the first updates {how}"
    return is_right, text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="write the kept run anew")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as savedir:
        if args.keep:
            print(keep(savedir, train(savedir, FLAGS.split())))
            return 0
        # Not FLAGS: a preset may change.
        rows = train(savedir, ["--config", str(KEPT / "meta.json")])
    with gzip.open(KEPT / "logs.csv.gz", "rt") as file:
        kept = equal_logs.rows_of(file)
    is_right, text = judge(rows, kept, json.loads((KEPT / "meta.json").read_text()))
    print(text)
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
