"""--autotune: finds the fastest layout for a run on this machine, in about a minute.

    service times   from short runs of the very script, with the run's flags: CPU
                    seconds of a call of an actor or server, of an inference batch, of a
                    step in the learner; while all parts share the cores and caches
    limits          of each layout, from these times, see limits.py
    search          tries three layouts, and then the best by these limits

It changes how many environments act at once, and not what is learned from a batch.
"""

import json
import logging
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchbeast.base.errors import FlagError
from torchbeast.flags import Flags
from torchbeast.procs import processes
from torchbeast.runs import start
from torchbeast.runs.prof import format_shares
from torchbeast.tools.limits import Costs, Layout, Line, limits
from torchbeast.tools.trial import Measured, Trial

log = logging.getLogger(__name__)

SECONDS, WARM_UP = 7.0, 0.4  # seconds of a trial to measure; before that, a share
# Policy lag grows with the environments: at most as many per rollout of a batch as in
# PolyBeast's default, unless the flags have more.
MOST_ENVS_PER_ROLLOUT = 8
SAME = 0.97  # of the highest speed: then fewer environments are better
ALL_BUSY = 0.9  # of the cores; else who uses none does not wait for one


# --- Service times --------------------------------------------------------------------


class Tried(NamedTuple):
    """A layout, what its run did, its mean inference batch, shares of its actors' time.

    The shares are named as in the last line of a run's log.
    """

    layout: Layout
    measured: Measured
    batch: float
    shares: dict[str, float]


def fit(points: Iterable[tuple[float, float]]) -> Line:
    """The line through (n, seconds) with the least squares, without negative parts."""
    n, seconds = np.array(sorted(points)).T
    if n[0] < n[-1]:
        per_env, per_call = np.polyfit(n, seconds, 1)
        if min(per_env, per_call) >= 0:
            return Line(float(per_call), float(per_env))
    return Line(0.0, float(n @ seconds / (n @ n)))


def costs_of(tries: list[Tried]) -> Costs:
    def mean(find: Callable[[Tried], float]) -> float:
        return statistics.fmean(find(t) / t.measured.sps for t in tries)

    def pause(t: Tried) -> float:
        """The number of actors that pause, on average."""
        acting = t.shares.get("environments", 1 - t.shares.get("wait", 0.0))
        pausing = acting * t.layout.num_actors - t.measured.cores["environments"]
        used = sum(t.measured.cores.values())
        return max(0.0, pausing) if used < ALL_BUSY * t.measured.free_cores else 0.0

    def line(part: str, size: Callable[[Tried], float]) -> Line:
        used = [(size(t), t.measured.cores[part] / t.measured.sps) for t in tries]
        return fit((n, n * seconds) for n, seconds in used)

    return Costs(
        line("environments", lambda t: t.layout.envs_per_actor),
        mean(pause),
        line("inference", lambda t: t.batch),
        mean(lambda t: t.measured.cores["learner"]),
        mean(lambda t: t.measured.learner_busy),
        mean(lambda t: t.measured.cores["rest"]),
    )


def try_layout(script: str, flags: Flags, seconds: float = SECONDS) -> Tried:
    """Measures a run of a script with these flags, which leaves nothing behind.

    Raises:
      TrialError: the run failed or hung.
    """
    others: dict[str, Any] = {"replay_file": None, "init_from": None, "autotune": False}
    others |= {"suppress_logs": False, "total_steps": 10**15, **start.LEARNING_ONLY}
    others["learn_start"] = 0  # a trial is short
    with tempfile.TemporaryDirectory(prefix="torchbeast-autotune-") as name:
        file = Path(name, "flags.json")
        file.write_text(json.dumps({"args": flags.as_dict() | others}))
        command = [sys.executable, "-m", f"torchbeast.{script}"]
        command += ["--config", str(file), "--trust_checkpoint_env"]
        layout = Layout(flags.num_actors, flags.envs_per_actor)
        return try_command(command, layout, file.parent, seconds)


def try_command(
    command: Sequence[str], layout: Layout, folder: Path, seconds: float
) -> Tried:
    """Measures a run that a command starts, see try_layout."""
    command = [*command, "--savedir", str(folder), "--xpid", "run"]
    with Trial(command, folder, os.environ) as run:
        run.wait_for_update()
        run.sleep(WARM_UP * seconds)
        measured = run.measure(seconds)
    output = run.output()
    batches = re.findall(r"Mean inference batch ([\d.]+)", output)
    times = re.findall(r"(?:Actors|Streams' time): (.*?)\.(?: |$)", output, re.M)
    shares = re.findall(r"([\w' ]+?) (\d+) %", times[-1]) if times else []
    return Tried(
        *(layout, measured, float(batches[-1]) if batches else layout.envs_per_actor),
        {name.strip(): int(percent) / 100 for name, percent in shares},
    )


# --- The search -----------------------------------------------------------------------


def layouts(
    resolve: Callable[[Layout | None], Flags], cores: int
) -> dict[Layout, Flags]:
    """The layouts to choose from, with all flags of a run. The run's own is first.

    What the user has typed stays, and what `resolve` refuses is left out.
    """
    flags = resolve(None)
    own, B = Layout(flags.num_actors, flags.envs_per_actor), flags.batch_size
    most = max(own.num_envs, MOST_ENVS_PER_ROLLOUT * B)
    numbers = {own.num_actors, 1, max(1, cores // 2), cores, 2 * cores}
    sizes = {own.envs_per_actor, *(2**i for i in range(8))}
    if "num_actors" in flags.typed:
        numbers = {own.num_actors}
    if "envs_per_actor" in flags.typed:
        sizes = {own.envs_per_actor}
    found = {own: flags}
    for layout in (Layout(A, E) for A in sorted(numbers) for E in sorted(sizes)):
        E = layout.envs_per_actor
        # PolyBeast's batches have whole streams.
        if layout.num_envs <= most and max(B, E) % min(B, E) == 0 and layout != own:
            try:
                found[layout] = resolve(layout)
            except FlagError:
                continue
    return found


def choose(speeds: dict[Layout, float]) -> Layout:
    """The fastest layout, or one that is as fast with fewer environments."""
    same = [x for x, speed in speeds.items() if speed >= SAME * max(speeds.values())]
    return min(same, key=lambda x: (x.num_envs, x.num_actors))


def first_layouts(choices: Iterable[Layout], cores: int) -> list[Layout]:
    """The run's own; the largest with as many actors as cores, and twice as many."""
    own, *others = choices
    first = [own]
    for number in (cores, 2 * cores):
        found = [x for x in others if x.num_actors == number]
        first += [max(found, key=lambda x: x.num_envs)] if found else []
    return first


def predict(
    tries: list[Tried], choices: dict[Layout, Flags]
) -> tuple[dict[Layout, float], dict[Layout, dict[str, float]]]:
    """The speed of each layout, measured or else predicted, and its limits."""
    costs = costs_of(tries)
    cores = statistics.fmean(t.measured.free_cores for t in tries)
    allowed = {
        x: limits(
            *(costs, x, cores),
            num_inference_threads=vars(flags).get("num_inference_threads", 1),
            in_turns=flags.sync,
        )
        for x, flags in choices.items()
    }
    measured = {
        x: statistics.fmean(t.measured.sps for t in tries if t.layout == x)
        for x in {t.layout for t in tries}
    }

    def reached(layout: Layout) -> float:
        """The share of the limits that runs reach, if possible with as many actors."""
        alike = [x for x in measured if x.num_actors == layout.num_actors]
        return statistics.fmean(
            measured[x] / min(allowed[x].values()) for x in alike or measured
        )

    speeds = {x: reached(x) * min(found.values()) for x, found in allowed.items()}
    return speeds | measured, allowed


def report(tries: list[Tried], choices: dict[Layout, Flags]) -> str:
    """What to print. The last line has the flags."""
    speeds, allowed = predict(tries, choices)
    tried = {t.layout: t for t in tries}
    best = choose({x: speeds[x] for x in tried})
    lines = ["steps per second   layout"]
    for x in sorted(speeds, key=lambda x: -speeds[x]):
        if x in tried or len(lines) < 5:
            how = "tried" if x in tried else "predicted from the others"
            lines.append(f"{speeds[x]:16,.0f}   {x}, {how}")
    parts = sorted(allowed[best].items(), key=lambda item: item[1])
    lines.append(f"Bottleneck: {parts[0][0]}. Limits of each part:")
    lines.append("  " + ", ".join(f"{name} {x:,.0f}" for name, x in parts))
    measured, shares = tried[best].measured, tried[best].shares
    used = [f"{k} {1e3 * x / measured.sps:.3f}" for k, x in measured.cores.items() if x]
    lines.append(f"  CPU milliseconds per step: {', '.join(used)}")
    lines.append(f"  time of actors or streams: {format_shares(shares)}")
    lines.append(f"  cores that other programs left: {measured.free_cores:.2f}")
    lines.append(f"Predicted are {speeds[best]:,.0f} steps per second, with")
    return "\n".join([*lines, str(best)])


def main(
    typed: start.Typed,
    resolve_layout: Callable[[Flags], Flags],
    seconds: float = SECONDS,
) -> int:
    """Prints the best layout for a script. Returns the exit status.

    Raises:
      FlagError: the flags are those of no run, or of one that is not on this machine.
      TrialError: a run failed or hung.
    """

    def resolve(layout: Layout | None) -> Flags:
        flags = start.merge(typed)
        for name, value in (layout._asdict() if layout else {}).items():
            setattr(flags, name, value)
        return resolve_layout(start.resolve(flags)).freeze()

    flags, cores = resolve(None), processes.num_cpus()
    for wrong, why in (
        (flags.mode != "train", f"has no effect with --mode {flags.mode}"),
        (flags.launcher != "processes", f"can't try --launcher {flags.launcher}"),
        ("TORCHELASTIC_RUN_ID" in os.environ, "can't try several learners of torchrun"),
        (not Path("/proc/self/task").exists(), "needs Linux"),
    ):
        if wrong:
            raise FlagError(f"--autotune {why}")
    script = "monobeast" if "num_buffers" in typed.declared else "polybeast"
    choices = layouts(resolve, cores)

    def attempt(layout: Layout) -> Tried:
        tried = try_layout(script, choices[layout], seconds)
        log.info("%s: %.0f steps per second", layout, tried.measured.sps)
        return tried

    first = first_layouts(choices, cores)
    log.info("Trying %d of %d layouts.", len(first) + 1, len(choices))
    tries = [attempt(layout) for layout in first]
    speeds, _ = predict(tries, choices)
    best = choose(speeds)
    log.info("Predicted: %s: %.0f steps per second", best, speeds[best])
    tries.append(attempt(best))
    sys.stdout.write(report(tries, choices) + "\n")
    return 0
