"""What limits the speed of a layout: the asymptotic bounds of a closed network.

Each part (cores, learner, inference, actors) gets the steps per second that it would
allow if it alone were the limit. The service times come from runs, see scale.py.
"""

import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from cpu_time import Measured

from torchbeast.tools.autotune import Layout

ALL_BUSY = 0.9  # of the cores; else who uses none does not wait for one


class Line(NamedTuple):
    """Seconds of a call for n environments."""

    per_call: float
    per_env: float

    def __call__(self, n: float) -> float:
        return self.per_call + self.per_env * n


class Costs(NamedTuple):
    """Service times in seconds, of CPU time but for `pause`."""

    env: Line  # a call of an actor, acting included, or of a server
    pause: float  # a step's time in which neither a core nor another part is needed
    infer: Line  # a batch of PolyBeast's inference
    learn: float  # a step in all threads of the learner
    learn_alone: float  # a step in its own thread
    rest: float  # a step in what else the learner's process does, such as the streams


def fit(points: Iterable[tuple[float, float]]) -> Line:
    """The line through (n, seconds) with the least squares, without negative parts."""
    n, seconds = np.array(sorted(points)).T
    if n[0] < n[-1]:
        per_env, per_call = np.polyfit(n, seconds, 1)
        if min(per_env, per_call) >= 0:
            return Line(float(per_call), float(per_env))
    return Line(0.0, float(n @ seconds / (n @ n)))


def costs_of(tries: list[tuple[Layout, Measured]]) -> Costs:
    def mean(find: Callable[[Layout, Measured], float]) -> float:
        return statistics.fmean(find(x, run) / run.sps for x, run in tries)

    def pause(layout: Layout, run: Measured) -> float:
        """The number of actors that pause, on average."""
        acting = run.shares.get("environments", 1 - run.shares.get("wait", 0.0))
        pausing = acting * layout.num_actors - run.cores["environments"]
        used = sum(run.cores.values())
        return max(0.0, pausing) if used < ALL_BUSY * run.free_cores else 0.0

    def line(part: str, size: Callable[[Layout, Measured], float]) -> Line:
        used = [(size(x, run), run.cores[part] / run.sps) for x, run in tries]
        return fit((n, n * seconds) for n, seconds in used)

    return Costs(
        line("environments", lambda x, run: x.envs_per_actor),
        mean(pause),
        line("inference", lambda x, run: run.batch or x.envs_per_actor),
        mean(lambda x, run: run.cores["learner"]),
        mean(lambda x, run: run.learner_busy),
        mean(lambda x, run: run.cores["rest"]),
    )


def limits(
    costs: Costs,
    layout: Layout,
    cores: float,
    *,
    env_cores: float | None = None,
    num_inference_threads: int = 1,
    in_turns: bool = False,
) -> dict[str, float]:
    """The steps per second that each part allows. The speed is at most the lowest.

    It is near the lowest if no part often waits for another one. An inference batch has
    what arrives during the one before, and at least one stream. So the size of a batch
    and the speed determine each other.

    Args:
      env_cores: of the environments' machines; None: they share the learner's.
      in_turns: with --sync actors and learner take turns, and a batch is one stream.
    """
    E = layout.envs_per_actor
    n = float(E if in_turns else layout.num_envs)
    env = costs.env(E) / E
    while True:
        infer = costs.infer(n)  # seconds
        own = infer / n + costs.learn + costs.rest
        found = {"learner": 1 / costs.learn_alone, "cores": cores / (own + env)}
        if env_cores is not None:
            found |= {"cores": cores / own, "environments": env_cores / env}
        if infer:
            found["inference"] = num_inference_threads * n / infer
        found["actors"] = layout.num_envs / (E * (env + costs.pause) + infer)
        # While cores are short, a batch takes longer, and more arrive.
        speed = min(x for name, x in found.items() if name != "cores")
        arrived = max(E, speed * infer / num_inference_threads)
        if in_turns or not infer or arrived > 0.999 * n:
            break
        n = arrived
    if in_turns:
        acting = min(found["actors"], cores / (own + env - costs.learn))
        return {"turns": 1 / (1 / acting + costs.learn_alone)}
    return found
