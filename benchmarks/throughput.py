"""Measures how fast MonoBeast and PolyBeast train here, and the bound for this machine.

    python benchmarks/throughput.py
    python benchmarks/throughput.py --repeat 3 --json result.json
    python benchmarks/throughput.py --model deep -- --num_actors 2 --envs_per_actor 16
    python benchmarks/throughput.py --variants monobeast polybeast --repeat 3

Every repetition does this for each precision in turn:

1. It times the parts of an environment step, each alone on one core: stepping, acting,
   learning. The bound is the SPS of all cores if they did only this work:
   cores / (environment + acting + learning). A GPU learns beside the cores, so with a
   GPU the bound is the lower of cores / (environment + acting) and 1 / learning.
2. It runs each of --variants (`python -m torchbeast.monobeast` or polybeast), with the
   same flags, for a fixed time after a warm-up. It ends the run with SIGINT and reads
   from logs.csv how many environment steps the run learned from.

SPS means environment steps learned from per second. It is computed for windows of
--window seconds, from the times in logs.csv. Median and quartiles are over these
windows. Memory is the proportional set size (PSS) of the run and all its descendants,
sampled from /proc/PID/smaps_rollup: memory shared by n processes counts 1/n in each.
Needs Linux.

Other work on the machine makes all figures wrong. The line "others" shows how many
cores other processes used during the run.
"""

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu_time import machine_busy, process_tree

from torchbeast import monobeast
from torchbeast.base import devices
from torchbeast.base.hardware import keep_freed_memory
from torchbeast.base.nested import flatten, map_nested
from torchbeast.core.acting import prepare_to_act
from torchbeast.core.buffers import create_buffers
from torchbeast.envs.environment import Environment
from torchbeast.extras.code import machine
from torchbeast.flags import Flags
from torchbeast.learner import Learner, learn
from torchbeast.model import make_model
from torchbeast.runs import flagset
from torchbeast.tools.trial import (
    END_SECONDS,
    Trial,
    read_ticks,
)

ROOT = Path(__file__).resolve().parent.parent
CHUNK_SECONDS = 0.1
MEMORY_SECONDS = 1.0  # between two samples


# --- The parts, each alone on one core ------------------------------------------------


def pin() -> None:
    """Confines this process and its future threads to one core."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    keep_freed_memory(torch.device("cpu"))  # as MonoBeast does


def milliseconds(
    call: Callable[[], Any],
    steps: int,
    seconds: float,
    average: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Milliseconds per environment step of a call that does `steps` of them.

    The result is the average over chunks of many calls. The median leaves out outside
    disturbances. If rare calls cost far more than others, only the mean is right.
    """
    call()
    chunks: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end or not chunks:
        calls = 0
        while time.perf_counter() - start < CHUNK_SECONDS:
            call()
            calls += 1
        chunks.append((time.perf_counter() - start) / calls)
    return 1e3 * average(chunks) / steps


def random_actions(env: Environment, num_envs: int) -> np.ndarray:
    return np.stack([env.action_space.sample() for _ in range(num_envs)])


def time_environment(flags: Flags, seconds: float) -> float:
    """One actor's environments under random actions, ms per environment step."""
    E = flags.envs_per_actor
    env = Environment(flags, E)
    env.action_space.seed(0)
    actions = itertools.cycle([random_actions(env, E) for _ in range(100)])
    env.initial()
    # The mean, because resets are rare and expensive.
    mean = statistics.fmean
    result = milliseconds(lambda: env.step(next(actions)), E, seconds, mean)
    env.close()
    return result


@torch.inference_mode()
def time_acting(flags: Flags, seconds: float) -> float:
    """One forward pass for one actor's environments, ms per environment step."""
    E = flags.envs_per_actor
    env = Environment(flags, E)
    model = make_model(
        flags, env.observation_space, env.action_space, torch.device("cpu")
    )
    prepare_to_act(model, flags.compile)
    rows = map_nested(lambda x: torch.from_numpy(x).unsqueeze(0), env.initial())
    state = model.initial_state(E)
    result = milliseconds(lambda: model(rows, state), E, seconds)
    env.close()
    return result


def time_learning(flags: Flags, seconds: float) -> dict[str, float]:
    """One update from a batch, and gathering the batch, in ms per environment step.

    The batch comes from an environment under random actions.
    """
    T, B = flags.unroll_length, flags.batch_size
    env = Environment(flags, B)
    learner = Learner(flags, env)
    rows = create_buffers(learner.row_spec, (2 * B, T + 1))
    row = env.initial()
    for t in range(T + 1):
        for name, field in row.items():
            for buffer, x in zip(flatten(rows[name]), flatten(field), strict=True):
                buffer[:B, t] = buffer[B:, t] = torch.from_numpy(x)  # two sets of slots
        row = env.step(random_actions(env, B))
    env.close()
    initial_state = tuple(
        x.movedim(1, 0).repeat(2, 1, 1).cpu() for x in learner.model.initial_state(B)
    )
    buffers = {"rows": rows, "initial_state": initial_state}

    # Two sets of slots in turn, so that the gathered slots are not in the cache.
    slots = itertools.cycle([list(range(B)), list(range(B, 2 * B))])

    def gather() -> Any:
        return monobeast.get_batch(buffers, next(slots), learner.device)

    batch, state = gather()
    return {
        "gathering": milliseconds(gather, T * B, seconds / 2),
        "learning": milliseconds(
            lambda: learn(learner, batch, state).finish(), T * B, seconds
        ),
    }


def time_parts(flags: Flags, seconds: float) -> dict[str, float]:
    """Milliseconds per environment step of every part, and the bound in SPS."""
    with concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), initializer=pin
    ) as pool:
        environment = pool.submit(time_environment, flags, seconds)
        acting = pool.submit(time_acting, flags, seconds)
        learning = pool.submit(time_learning, flags, seconds)
        parts = {"environment": environment.result(), "acting": acting.result()}
        parts |= learning.result()
    cores = len(os.sched_getaffinity(0))
    on_cores = parts["environment"] + parts["acting"]
    if devices.learner_device(flags).type != "cpu":
        bound = min(cores / on_cores, 1 / parts["learning"])
    else:
        bound = cores / (on_cores + parts["learning"])
    return {**parts, "bound": 1e3 * bound}


# --- Figures from /proc ---------------------------------------------------------------


def proportional_set_size(pids: Sequence[int]) -> float:
    """Sum in MiB; memory that n processes share counts 1/n in each."""
    total = 0
    for pid in pids:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
        total += int(found[1]) if found else 0
    return total / 1024


# --- A run ----------------------------------------------------------------------------


def windows_sps(
    ticks: np.ndarray, start: float, end: float, seconds: float
) -> np.ndarray:
    """SPS of the windows of `seconds` seconds that fit between start and end.

    The steps at the edge of a window are interpolated between the two updates around
    it. So an update of many steps doesn't make the windows jump.
    """
    edges = np.arange(start, end + 1e-6, seconds)
    steps = np.interp(edges, ticks[:, 0], ticks[:, 1])
    return np.diff(steps) / seconds


def start_run(
    variant: str, argv: Sequence[str], folder: Path, before: Sequence[str] = ()
) -> Trial:
    """Starts an endless run: the command `before`, followed by it."""
    command = [*before, sys.executable, "-m", f"torchbeast.{variant}", *argv]
    if variant == "polybeast":
        command += ["--pipes_basename", f"unix:{folder}/server"]
    command += ["--savedir", str(folder), "--xpid", "run"]
    command += ["--total_steps", str(10**12)]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return Trial(command, folder, environment)


def run_variant(
    variant: str, argv: Sequence[str], args: argparse.Namespace
) -> dict[str, Any]:
    """Runs MonoBeast or PolyBeast and measures it after the warm-up.

    Raises:
      TrialError: the run ended by itself, or did not end after SIGINT; the message ends
        with the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        argv = [*argv, "--disable_checkpoint"]
        with start_run(variant, argv, Path(folder)) as run:
            run.wait_for_update()
            run.sleep(args.warm_up)
            pid = run.process.pid
            cpu_start, busy_start = process_tree(pid), machine_busy()
            start = time.time()
            memory = []
            while (left := start + args.seconds - time.time()) > 0:
                memory.append(proportional_set_size(list(process_tree(pid))))
                time.sleep(max(0.0, min(MEMORY_SECONDS, left)))
            cpu_end, busy_end = process_tree(pid), machine_busy()
            end = time.time()
            run.sleep(0.01)  # raises if the run has ended
            run.process.send_signal(signal.SIGINT)
            status = run.process.wait(END_SECONDS)
            if status != 128 + signal.SIGINT:
                print(run.fail(f"ended with status {status} after SIGINT"))
        ticks = read_ticks(run.logs.parent)
        waited = re.findall(r"(?:Learner: .*Actors|The whole run: ).*", run.output())
    sps = windows_sps(ticks, start, end, args.window)
    low, median, high = np.percentile(sps, [25, 50, 75]).tolist()
    used = {pid: cpu_end[pid] - cpu_start.get(pid, 0.0) for pid in cpu_end}
    steps = (end - start) * sps.mean()
    learner = used[pid]
    return {
        "sps": median,
        "sps_low": low,
        "sps_high": high,
        "learner_cpu": 1e3 * learner / steps,
        "actors_cpu": 1e3 * (sum(used.values()) - learner) / steps,
        "cores_used": sum(used.values()) / (end - start),
        "others": max(0.0, busy_end - busy_start - sum(used.values())) / (end - start),
        "memory": max(memory),
        "waited": waited[-1] if waited else "unknown",
        "status": status,
    }


# --- Report ---------------------------------------------------------------------------

LAYOUT = (
    *("num_actors", "envs_per_actor", "num_buffers"),
    *("num_learner_threads", "torch_threads"),
)
LINES = (
    ("environment", "environment, ms per step", "{:.3f}"),
    ("acting", "acting, ms per step", "{:.3f}"),
    ("learning", "learning, ms per step", "{:.3f}"),
    ("gathering", "(gathering, not in the bound)", "{:.3f}"),
    ("bound", "bound, SPS", "{:,.0f}"),
    ("sps", "SPS", "{:,.0f}"),
    ("sps_low", "  lower quartile", "{:,.0f}"),
    ("sps_high", "  upper quartile", "{:,.0f}"),
    ("share", "  share of the bound, %", "{:.0f}"),
    ("learner_cpu", "learner, CPU ms per step", "{:.3f}"),
    ("actors_cpu", "actors or servers, CPU ms", "{:.3f}"),
    ("cores_used", "cores used", "{:.2f}"),
    ("others", "others, cores used", "{:.2f}"),
    ("memory", "peak memory (PSS), MiB", "{:,.0f}"),
)


def print_table(columns: dict[str, dict[str, Any]]) -> None:
    print(" " * 32 + "".join(f"{name:>16}" for name in columns))
    for key, label, form in LINES:
        cells = [form.format(c[key]) if key in c else "" for c in columns.values()]
        if any(cells):
            print(f"{label:32}" + "".join(f"{cell:>16}" for cell in cells))
    print(flush=True)


def medians(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    keys = [key for key, _, _ in LINES if key in results[0]]
    return {key: statistics.median(r[key] for r in results) for key in keys}


def describe_machine() -> dict[str, Any]:
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = machine()
    return {
        "cpu": found["cpu"],
        "cores": len(os.sched_getaffinity(0)),
        "gpu": found["gpus"] or None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": git.stdout.strip() or "unknown",
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measures the parts of a step, the bound, and whole runs.",
        usage="%(prog)s [options] [-- flags of MonoBeast or PolyBeast]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="shallow", choices=["shallow", "deep"])
    add(
        "--precisions",
        nargs="+",
        default=["fp32", "bf16"],
        choices=["fp32", "bf16"],
        help="precisions to measure in turn",
    )
    add(
        "--variants",
        nargs="+",
        default=["monobeast"],
        choices=["monobeast", "polybeast"],
        help="variants to run in turn",
    )
    add("--repeat", type=int, default=1, help="rounds over precisions and variants")
    add("--seconds", type=float, default=40.0, help="seconds to measure per run")
    add("--warm_up", type=float, default=10.0, help="seconds after the first update")
    add("--window", type=float, default=2.0, help="seconds per window")
    add("--part_seconds", type=float, default=3.0, help="seconds per part; 0: skip")
    add("--json", type=Path, help="write all results to this file")
    add("flags", nargs="*", help="flags of the variants")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.seconds < 2 * args.window:
        parser.error(
            f"--seconds is {args.seconds:g}; it must be at least twice --window "
            f"({args.window:g})"
        )
    common_argv = ["--model", args.model, "--batch_size", "8", "--unroll_length", "80"]
    common_argv += args.flags

    machine = describe_machine()
    print(", ".join(f"{k} {v}" for k, v in machine.items() if v is not None))
    print("Flags:", *common_argv, "\n", flush=True)
    names = [f"{v} {p}" for p in args.precisions for v in args.variants]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for i in range(args.repeat):
        for precision in args.precisions:
            run_argv = [*common_argv, "--precision", precision]
            # PolyBeast gets MonoBeast's layout: the same actors, each with the same
            # environments.
            flags = flagset.parse(monobeast.make_parser(), run_argv)
            flags = monobeast.resolve_layout(flagset.resolve(flags)).freeze()
            layout = {name: getattr(flags, name) for name in LAYOUT}
            for name in ("num_actors", "envs_per_actor"):
                run_argv += [f"--{name}", str(layout[name])]
            parts = time_parts(flags, args.part_seconds) if args.part_seconds else {}
            for variant in args.variants:
                result = parts | run_variant(variant, run_argv, args)
                if parts:
                    result["share"] = 100 * result["sps"] / parts["bound"]
                name = f"{variant} {precision}"
                results[name].append(result)
                print_table({f"{name} {i + 1}": result})
                print(f"Who waited: {result['waited']}\n", flush=True)

    columns = {name: medians(runs) for name, runs in results.items()}
    print("Layout:", ", ".join(f"{value} {name}" for name, value in layout.items()))
    print(f"Medians of {args.repeat}:")
    print_table(columns)
    ratios = {
        f"{name} / {first}": columns[name]["sps"] / columns[first]["sps"]
        for i, first in enumerate(columns)
        for name in list(columns)[i + 1 :]
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f} times the SPS")
    if args.json:
        report = {
            "machine": machine,
            "flags": common_argv,
            "layout": layout,
            "runs": results,
            "medians": columns,
            "ratios": ratios,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
