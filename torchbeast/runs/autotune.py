"""--autotune: finds the fastest layout for a run on this machine, within a minute.

    service times   from short runs of the very script, with the run's flags: CPU
                    seconds of a call of an actor or server, of an inference batch, of a
                    step in the learner; while all parts work at once, so with what they
                    cost each other
    limits          of a layout: what each part could do if it alone were the limit, the
                    asymptotic bounds of a closed network
    search          tries two layouts, then the one with the highest predicted speed

It changes how many environments act at once, and not what is learned from a batch.
benchmarks/scale.py uses the same limits for machines that are not there.
"""

from __future__ import annotations

import json
import logging
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchbeast.base import ranks
from torchbeast.base.errors import FlagError
from torchbeast.procs import processes
from torchbeast.runs import flagset, trial
from torchbeast.runs.flagset import Flags
from torchbeast.runs.prof import format_shares

log = logging.getLogger(__name__)

WARM_UP_SECONDS, SECONDS = 3.0, 8.0  # of a trial, after its first update
# Policy lag grows with the environments: at most as many per rollout of a batch as in
# PolyBeast's default, unless the flags have more.
MOST_ENVS_PER_ROLLOUT = 8
SAME = 0.97  # of the highest speed: then fewer environments are better
ALL_BUSY = 0.9  # of the cores; below it, an environment that uses none is waiting
LIMITS = {
    "cores": "the {cores} cores are always busy",
    "learner": "the learner, which computes one batch at a time",
    "inference": "inference",
    "actors": "the actors or streams, which wait for their environments and actions",
    "turns": "--sync, with which actors and learner take turns",
}


# --- The model ------------------------------------------------------------------------


class Layout(NamedTuple):
    """Attributes: actors are streams in PolyBeast."""

    num_actors: int
    envs_per_actor: int

    @property
    def num_envs(self) -> int:
        return self.num_actors * self.envs_per_actor

    def __str__(self) -> str:
        A, E = self
        return f"--num_actors {A} --envs_per_actor {E}"


class Line(NamedTuple):
    """Seconds of a call for n environments: call + step * n."""

    call: float
    step: float

    def __call__(self, n: float) -> float:
        return self.call + self.step * n


class Costs(NamedTuple):
    """Service times in CPU seconds.

    Attributes:
      env: a call of an actor, acting included, or of a server.
      pause: seconds of it in which the environments use no core.
      infer: a batch of PolyBeast's inference.
      learn: a step in all threads of the learner; learn_wall: in its own one.
      rest: a step in what else the learner's process does, such as the streams.
    """

    env: Line
    pause: Line
    infer: Line
    learn: float
    learn_wall: float
    rest: float


def limits(
    costs: Costs,
    layout: Layout,
    cores: float,
    *,
    env_cores: float | None = None,
    num_inference_threads: int = 1,
    in_turns: bool = False,
) -> tuple[dict[str, float], float]:
    """Steps per second that each part allows, and the mean inference batch.

    The speed is at most the lowest of them, and near it if work never waits for a free
    part. An inference batch has what arrives during the one before, and at least one
    stream; so its size and the speed determine each other.

    Args:
      env_cores: of the environments' machines; None: they share the learner's.
      in_turns: with --sync actors and learner take turns, and a batch is one stream.
    """
    E = layout.envs_per_actor
    env, infers = costs.env(E), costs.infer(1) > 0
    n = float(E if in_turns else layout.num_envs)
    found: dict[str, float] = {}
    for _ in range(100):
        infer = costs.infer(n)
        own = infer / n + costs.learn + costs.rest
        found = {"learner": 1 / costs.learn_wall, "cores": cores / (own + env / E)}
        if env_cores is not None:
            found |= {"cores": cores / own, "environments": env_cores / (env / E)}
        cycle = env + costs.pause(E)
        if infers:
            found["inference"] = num_inference_threads * n / infer
            speed = min(found.values())
            busy = min(1.0, speed / found["inference"])
            cycle += infer * (1 + busy / 2)  # on average half of a batch is before it
        found["actors"] = layout.num_envs / cycle
        speed = min(found.values())
        arrived = speed * infer / num_inference_threads
        best = n if in_turns else min(max(arrived, E), layout.num_envs)
        if not infers or abs(best - n) < 1e-3 * n:
            break
        n = best
    if in_turns:
        acting = min(found["actors"], cores / (env / E + infer / n + costs.rest))
        found = {"turns": 1 / (1 / acting + costs.learn_wall)}
    return found, n


# --- Service times --------------------------------------------------------------------


class Tried(NamedTuple):
    """A layout, what its run did, its mean inference batch, shares of time by name."""

    layout: Layout
    measured: trial.Measured
    batch: float
    shares: dict[str, float]


def fit(points: Iterable[tuple[float, float]]) -> Line:
    """The line through (n, seconds) with the least squares, without negative parts."""
    n, seconds = np.array(sorted(points)).T
    step, call = np.polyfit(n, seconds, 1) if n[0] < n[-1] else (-1.0, 0.0)
    if call < 0 or step < 0:
        call, step = 0.0, float(n @ seconds / (n @ n))
    return Line(float(call), float(step))


def costs_of(tries: list[Tried], cores: float) -> Costs:
    def mean(find: Callable[[trial.Measured], float]) -> float:
        return statistics.fmean(find(t.measured) / t.measured.sps for t in tries)

    def pause(t: Tried) -> float:
        """Seconds per call in which an actor neither waits for others nor computes."""
        used, A = t.measured.cores, t.layout.num_actors
        share = t.shares.get("environments", 1 - t.shares.get("wait", 0.0))
        idle = share * A - used["environments"]  # of the actors, at each moment
        busy = sum(used.values()) > ALL_BUSY * cores
        return (
            0.0 if busy else max(0.0, idle) * t.layout.envs_per_actor / t.measured.sps
        )

    def per_call(part: str, t: Tried, n: float) -> tuple[float, float]:
        return n, t.measured.cores[part] / t.measured.sps * n

    return Costs(
        fit(per_call("environments", t, t.layout.envs_per_actor) for t in tries),
        fit((t.layout.envs_per_actor, pause(t)) for t in tries),
        fit(per_call("inference", t, t.batch) for t in tries),
        mean(lambda x: x.cores["learner"]),
        mean(lambda x: x.learner_busy),
        mean(lambda x: x.cores["rest"]),
    )


def shares(output: str) -> dict[str, float]:
    """Shares of the actors' or streams' time, from the last lines of a run's log."""
    found = re.findall(r"(?:Actors|Streams' time): (.*?)\.(?: |$)", output, re.M)
    pairs = re.findall(r"([\w' ]+?) (\d+) %", found[-1]) if found else []
    return {name.strip(): int(percent) / 100 for name, percent in pairs}


def try_layout(
    script: str, flags: Flags, layout: Layout, warm_up: float, seconds: float
) -> Tried:
    """Measures a run of the script with these flags, which leaves nothing behind.

    Raises:
      TrialError: the run failed or hung.
    """
    with tempfile.TemporaryDirectory(prefix="torchbeast-autotune-") as name:
        folder = Path(name)
        values = flags.as_dict() | {"replay_file": None, "init_from": None}
        values |= {
            "total_steps": 10**15,
            "eval_interval": 0,
            "disable_checkpoint": True,
        }
        values |= {"tensorboard": False, "wandb": None, "write_profiler_trace": False}
        values |= {"suppress_logs": False, "autotune": False}
        values["learn_start"] = min(flags.learn_start, flags.replay_size // 8)
        (folder / "flags.json").write_text(json.dumps({"args": values}))
        command = [sys.executable, "-m", f"torchbeast.{script}"]
        command += ["--config", str(folder / "flags.json"), "--trust_checkpoint_env"]
        command += ["--savedir", name, "--xpid", "run"]
        with trial.Trial(command, folder, os.environ) as run:
            run.wait_for_update()
            run.sleep(warm_up)
            measured = run.measure(seconds)
        output = run.output()
    batches = re.findall(r"Mean inference batch ([\d.]+)", output)
    batch = float(batches[-1]) if batches else 0.0
    return Tried(layout, measured, batch or layout.envs_per_actor, shares(output))


# --- The search -----------------------------------------------------------------------


def layouts(resolve: Callable[[Layout | None], Flags], cores: int) -> dict[Layout, Any]:
    """The layouts to choose from with their resolved flags; the run's own is first.

    Typed flags stay, and so does what `resolve` refuses.
    """
    flags = resolve(None)
    own = Layout(flags.num_actors, flags.envs_per_actor)
    most = max(own.num_envs, MOST_ENVS_PER_ROLLOUT * flags.batch_size)
    numbers = sorted({own.num_actors, 1, max(1, cores // 2), cores, 2 * cores})
    sizes = sorted({own.envs_per_actor, *(2**i for i in range(8))})
    found = {own: flags}
    for layout in (Layout(A, E) for A in numbers for E in sizes):
        B, E = flags.batch_size, layout.envs_per_actor
        changed = {k for k, x in layout._asdict().items() if x != getattr(own, k)}
        if layout.num_envs <= most and max(B, E) % min(B, E) == 0:
            try:
                found.setdefault(layout, resolve(layout))
            except FlagError:
                continue
        if changed & flags.typed:
            found.pop(layout, None)
    return found


def choose(speeds: dict[Layout, float]) -> Layout:
    """The fastest layout, or one that is as fast with fewer environments."""
    same = [x for x, speed in speeds.items() if speed >= SAME * max(speeds.values())]
    return min(same, key=lambda x: (x.num_envs, x.num_actors))


def search(
    choices: dict[Layout, Flags],
    cores: int,
    try_out: Callable[[Layout], Tried],
) -> tuple[list[Tried], dict[Layout, float], dict[Layout, dict[str, float]]]:
    """Tries some layouts: the run's own, a larger one, the best by the model.

    Returns:
      What was tried; the speed of all layouts, measured or predicted; their limits.
    """
    own, *others = choices
    busy = min(2 * cores, max(A for A, _ in choices))
    larger = max(others or [own], key=lambda x: (min(x.num_actors, busy), x.num_envs))
    tries: list[Tried] = []
    speeds: dict[Layout, float] = {}
    for layout in (own, larger, None):
        tries.append(try_out(layout or choose(speeds)))
        costs, known = costs_of(tries, cores), {}
        for tried in {t.layout for t in tries}:
            found = [t.measured.sps for t in tries if t.layout == tried]
            known[tried] = statistics.fmean(found)
        allowed = {
            x: limits(
                *(costs, x, cores),
                num_inference_threads=vars(flags).get("num_inference_threads", 1),
                in_turns=flags.sync,
            )[0]
            for x, flags in choices.items()
        }
        # What the limits leave out, such as cores that idle at times.
        share = statistics.fmean(known[x] / min(allowed[x].values()) for x in known)
        speeds = {x: share * min(found.values()) for x, found in allowed.items()}
        speeds |= known
    return tries, speeds, allowed


def report(
    tries: list[Tried],
    speeds: dict[Layout, float],
    allowed: dict[Layout, dict[str, float]],
    cores: int,
) -> str:
    """What to print: the flags are the last line."""
    tried = {t.layout: t for t in tries}
    best = choose({x: speeds[x] for x in tried})
    ranking = sorted(speeds, key=lambda x: speeds[x], reverse=True)
    lines = ["steps per second   layout"]
    for layout in dict.fromkeys([best, *tried, *ranking[:3]]):
        how = "tried" if layout in tried else "predicted from the others"
        lines.append(f"{speeds[layout]:16,.0f}   {layout}, {how}")
    limit = min(allowed[best], key=lambda name: allowed[best][name])
    words = LIMITS[limit].format(cores=cores)
    lines.append(
        f"Bottleneck: {words}. Each part alone would allow, in steps per second:"
    )
    ordered = sorted(allowed[best].items(), key=lambda item: item[1])
    lines.append("  " + ", ".join(f"{name} {x:,.0f}" for name, x in ordered))
    used, sps = tried[best].measured.cores, tried[best].measured.sps
    parts = [f"{name} {1e3 * x / sps:.3f}" for name, x in used.items() if x]
    lines.append(f"  CPU ms per step: {', '.join(parts)}")
    lines.append(f"  time of actors or streams: {format_shares(tried[best].shares)}")
    lines.append(f"Predicted: {speeds[best]:,.0f} steps per second, with these flags:")
    return "\n".join([*lines, str(best)])


def main(
    typed: flagset.Typed,
    resolve_layout: Callable[[Flags], Flags],
    warm_up: float = WARM_UP_SECONDS,
    seconds: float = SECONDS,
) -> int:
    """Prints the best layout for a script. Returns the exit status.

    Raises:
      FlagError: the flags are those of no run, or of one that is not on this machine.
      TrialError: a run failed or hung.
    """

    def resolve(layout: Layout | None) -> Flags:
        flags = flagset.merge(typed)
        for name, value in (layout._asdict() if layout else {}).items():
            setattr(flags, name, value)
        return resolve_layout(flagset.resolve(flags)).freeze()

    flags, cores = resolve(None), processes.num_cpus()
    for wrong, why in (
        (flags.mode != "train", f"has no effect with --mode {flags.mode}"),
        (flags.launcher != "processes", f"can't try --launcher {flags.launcher}"),
        (ranks.size() > 1, "tries one learner: start it without torchrun"),
        (not Path("/proc/self/task").exists(), "needs Linux"),
    ):
        if wrong:
            raise FlagError(f"--autotune {why}")
    script = "monobeast" if "num_buffers" in typed.declared else "polybeast"
    choices = layouts(resolve, cores)
    log.info("Trying %d of %d layouts, a quarter of a minute each.", *(3, len(choices)))

    def try_out(layout: Layout) -> Tried:
        tried = try_layout(script, choices[layout], layout, warm_up, seconds)
        log.info("%s: %.0f steps per second", layout, tried.measured.sps)
        return tried

    sys.stdout.write(report(*search(choices, cores, try_out), cores) + "\n")
    return 0
