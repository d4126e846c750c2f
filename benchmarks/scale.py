"""Predicts PolyBeast's speed with up to 1,000 machines of environments, from times
that it measures here, and checks the model against real server processes.

    python benchmarks/scale.py
    python benchmarks/scale.py --gbits 10 --machine_cores 16 -- --env PongNoFrameskip-v4
    PYTHONPATH=benchmarks python benchmarks/scale.py -- --env free_env:WaitingEnv

1. It measures a learner with one server by TCP, once with few and once with many
   environments: CPU time of a step in the server, of an inference batch, of a step in
   the streams and in the learner. The bytes of a step are those of its arrays.
2. It predicts --processes on this machine (all share its cores), and then runs them.
3. It predicts 1 to 1,000 machines that have one stream per core, beside a learner on a
   machine like this one, and names what limits them.

The model is limits.py. WaitingEnv sleeps instead of computing: so its processes load
this machine as those of others would.
Needs Linux, and a machine on which nothing else runs.
"""

import argparse
import contextlib
import json
import os
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cpu_time import Measured, measure_command
from limits import Costs, costs_of, limits
from throughput import ROOT, describe_machine

from torchbeast.base.nested import flatten
from torchbeast.envs.environment import Environment
from torchbeast.polybeast import env as polybeast_env
from torchbeast.runs import flagset
from torchbeast.tools.autotune import Layout

MACHINES = (1, 2, 4, 10, 30, 100, 300, 1000)
# The servers are children of the learner, "$@", so that a trial sees all processes.
START = """
{python} -m torchbeast.polybeast_env {env} --bind {address} --num_servers {number} &
exec "$@"
"""


def row_bytes(argv: Sequence[str]) -> float:
    """Bytes of a step: what an environment says, and the action."""
    flags = flagset.parse(polybeast_env.make_parser(), argv).freeze()
    with contextlib.closing(Environment(flags, 1)) as env:
        return sum(x.nbytes for x in flatten(env.initial())) + 8


def measure(layout: Layout, args: argparse.Namespace) -> Measured:
    """Measures a run with a server process per stream, by TCP."""
    port = 20000 + os.getpid() % 10000
    envs = f"{shlex.join(args.flags)} --envs_per_actor {layout.envs_per_actor}"
    script = START.format(
        python=shlex.quote(sys.executable),
        env=envs,
        address=f"127.0.0.1:{port}",
        number=layout.num_actors,
    )
    last = port + layout.num_actors - 1
    command = ["sh", "-c", script, "sh", sys.executable]
    command += ["-m", "torchbeast.polybeast_learner", *args.flags, *args.learner]
    command += ["--server_addresses", f"127.0.0.1:{port}-{last}"]
    command += ["--total_steps", str(10**12), "--disable_checkpoint"]
    paths = [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return measure_command(command, args.seconds)


def show(name: str, found: dict[str, float], end: str = "") -> float:
    limit = min(found, key=lambda part: found[part])
    print(f"{name:>28}: {found[limit]:12,.0f} SPS, limit: {limit}{end}", flush=True)
    return found[limit]


def check(
    costs: Costs, cores: float, args: argparse.Namespace
) -> Iterable[dict[str, Any]]:
    """Predicts all --processes, then measures them."""
    layouts = [Layout(number, args.envs) for number in args.processes]
    print("Predicted for processes on this machine:")
    predicted = [show(str(x), limits(costs, x, cores)) for x in layouts]
    print("Measured:")
    for layout, expected in zip(layouts, predicted, strict=True):
        tried = measure(layout, args)
        ratio = tried.sps / expected
        end = f", {ratio:.2f} of the prediction"
        show(str(layout), {"measured": tried.sps}, end)
        yield {"layout": layout, "predicted": expected, "tried": tried}


def predict(
    costs: Costs, cores: float, bytes_per_step: float, args: argparse.Namespace
) -> Iterable[dict[str, Any]]:
    """Machines whose cores run one stream each, beside a learner's machine."""
    network = args.gbits * 1e9 / 8 / bytes_per_step
    print(
        f"Predicted for machines of {args.machine_cores} cores, {args.gbits:g} Gbit/s:"
    )
    for number in MACHINES:
        env_cores = number * args.machine_cores
        layout = Layout(env_cores, args.envs)
        found = limits(costs, layout, cores, env_cores=env_cores)
        yield {"machines": number, "limits": found | {"network": network}}
        show(f"{number:,} machines", found | {"network": network})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] [-- flags of the servers and the learner]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--envs", type=int, default=8, help="environments per stream")
    add("--processes", type=int, nargs="*", default=[1, 2, 4], help="to check with")
    add("--machine_cores", type=int, default=16, help="cores of a machine")
    add("--gbits", type=float, default=10.0, help="bandwidth of the learner's machine")
    add("--seconds", type=float, default=10.0, help="to measure per run")
    add("--learner", default="", help="flags of the learner alone, as one text")
    add("--json", type=Path, help="write all results to this file")
    add("flags", nargs="*", help="flags of the servers and the learner")
    args = parser.parse_args(argv)
    args.learner = args.learner.split()
    machine = describe_machine()
    print(", ".join(f"{k} {v}" for k, v in machine.items() if v is not None))
    few, many = max(1, args.envs // 2), 2 * args.envs
    tries = [(x, measure(x, args)) for x in (Layout(1, few), Layout(1, many))]
    bytes_per_step = row_bytes(args.flags)
    costs = costs_of(tries)
    cores = statistics.fmean(run.free_cores for _, run in tries)
    print(f"Costs in seconds: {costs}\n{bytes_per_step:,.0f} bytes per step")
    print(f"{cores:.2f} cores are free")
    checked = list(check(costs, cores, args))
    predicted = list(predict(costs, cores, bytes_per_step, args))
    if args.json:
        result = {"machine": machine, "flags": args.flags, "costs": costs._asdict()}
        result |= {"tries": tries, "checked": checked, "predicted": predicted}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
