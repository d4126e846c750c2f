"""Measures TorchBeast beside other frameworks, in turn, and prints a Markdown table.

    python benchmarks/compare_peers.py cartpole --python sb3=PEER/bin/python
    python benchmarks/compare_peers.py pong --only monobeast sb3 --python sb3=PYTHON

peers/README.md says how to install the peers, and what the cases are. One without
--python is left out. All run on the CPU. Needs Linux, and a machine on which nothing
else runs.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cpu_time import measure, process_tree
from throughput import describe_machine, proportional_set_size, start_run

from torchbeast.runs.files import read_meta
from torchbeast.tools.trial import Trial, TrialError

PEERS = Path(__file__).resolve().parent / "peers"
OURS = ("monobeast", "polybeast")
LONG = "--unroll_length 80 --batch_size 8"
# A line is a system: one of OURS with its flags, or a script run_NAME.py and its case.
CASES = {
    "cartpole": """
        monobeast --preset classic-control
        monobeast --preset classic-control --num_actors 1 --envs_per_actor 16
        sb3 cartpole
        sample_factory cartpole
        cleanrl cartpole
    """,
    "minatar": """
        monobeast --preset minatar
        monobeast --preset minatar --precision fp32
        sb3 minatar
    """,
    "pong": f"""
        monobeast
        polybeast
        monobeast {LONG}
        monobeast {LONG} --precision fp32
        sb3 pong
        sb3 pong_processes
        sample_factory pong
    """,
}


def start(system: str, python: Mapping[str, str], folder: Path) -> Trial:
    name, *argv = system.split()
    if name in OURS:
        return start_run(name, [*argv, "--disable_checkpoint"], folder)
    command = [python[name], str(PEERS / f"run_{name}.py"), *argv]
    command += ["--savedir", str(folder), "--xpid", "run"]
    return Trial(command, folder, os.environ)


def run_once(system: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measures one run. Raises TrialError if it fails or hangs."""
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        with start(system, args.python, Path(name)) as run:
            run.wait_for_update()
            run.sleep(args.warm_up)
            found = measure(run, args.seconds)
            memory = proportional_set_size(list(process_tree(run.process.pid)))
        versions = read_meta(Path(name) / "run").get("versions")
    cores = sum(found.cores.values())
    return {
        "sps": found.sps,
        "cpu": 1e3 * cores / found.sps,
        "cores": cores,
        "memory": memory,
        "versions": versions,
    }


def table(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Medians of each system's runs, in Markdown."""
    lines = ["| system | SPS (lowest to highest) | CPU ms per step | cores | PSS MiB |"]
    lines += ["|---|---|---|---|---|"]
    for system, found in results.items():
        sps, cpu, cores, memory = (
            [run[key] for run in found] for key in ("sps", "cpu", "cores", "memory")
        )
        lines.append(
            f"| {system} | {statistics.median(sps):,.0f} ({min(sps):,.0f} to "
            f"{max(sps):,.0f}) | {statistics.median(cpu):.3f} | "
            f"{statistics.median(cores):.2f} | {statistics.median(memory):,.0f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("case", choices=CASES)
    add("--python", nargs="+", default=[], metavar="NAME=PATH", help="the peers'")
    add("--only", nargs="+", help="programs to run, such as monobeast or sb3")
    add("--repeat", type=int, default=3, help="rounds; each runs all systems in turn")
    add("--seconds", type=float, default=30.0, help="to measure per run")
    add("--warm_up", type=float, default=10.0, help="seconds after the first update")
    add("--json", type=Path, help="write the values of all runs to this file")
    args = parser.parse_args(argv)
    args.python = {
        name: path for name, _, path in (x.partition("=") for x in args.python)
    }
    known = args.only or (*OURS, *args.python)
    peers = sorted(file.stem[4:] for file in PEERS.glob("run_*.py"))
    for name in {*args.python, *known}:
        if name not in (*OURS, *peers):
            parser.error(f"{name} is none of {', '.join((*OURS, *peers))}")
        if name in peers and not args.python.get(name):
            parser.error(f"{name} needs --python {name}=PATH")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    systems = [line.strip() for line in CASES[args.case].strip().splitlines()]
    systems = [line for line in systems if line.split()[0] in known]
    machine = describe_machine()
    print(", ".join(f"{k} {v}" for k, v in machine.items() if v is not None))
    results: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    for _ in range(args.repeat):
        for system in systems:
            try:
                found = run_once(system, args)
            except TrialError as error:
                print(error)
                return 1
            results[system].append(found)
            print(f"{system}: {json.dumps(found)}", flush=True)
            if args.json:  # what is measured stays if a later run fails
                report = {"machine": machine, "case": args.case, "runs": results}
                args.json.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nMedians of {args.repeat}:\n\n{table(results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
