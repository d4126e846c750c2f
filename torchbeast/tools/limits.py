"""What limits the speed of a layout: the asymptotic bounds of a closed network.

Each part (cores, learner, inference, actors) gets the steps per second that it would
allow if it alone were the limit. The service times come from runs, see autotune.py.
"""

from typing import NamedTuple


class Layout(NamedTuple):
    """How many actors, or streams in PolyBeast, with how many environments each."""

    num_actors: int
    envs_per_actor: int

    @property
    def num_envs(self) -> int:
        return self.num_actors * self.envs_per_actor

    def __str__(self) -> str:
        return f"--num_actors {self[0]} --envs_per_actor {self[1]}"


class Line(NamedTuple):
    """Seconds of a call for n environments."""

    per_call: float
    per_env: float

    def __call__(self, n: float) -> float:
        return self.per_call + self.per_env * n


class Costs(NamedTuple):
    """Service times in seconds, of CPU time but for `pause`.

    Attributes:
      env: a call of an actor, acting included, or of a server.
      pause: a step's time in which neither a core nor another part is needed.
      infer: a batch of PolyBeast's inference.
      learn: a step in all threads of the learner.
      learn_alone: a step in its own thread.
      rest: a step in what else the learner's process does, such as the streams.
    """

    env: Line
    pause: float
    infer: Line
    learn: float
    learn_alone: float
    rest: float


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
    E, n = layout.envs_per_actor, float(layout.num_envs)
    env = costs.env(E) / E
    if in_turns:
        n = E
    while True:
        infer = costs.infer(n)  # seconds
        own = infer / n + costs.learn + costs.rest
        found = {"learner": 1 / costs.learn_alone, "cores": cores / (own + env)}
        if env_cores is not None:
            found |= {"cores": cores / own, "environments": env_cores / env}
        cycle = E * (env + costs.pause)
        if infer:
            found["inference"] = num_inference_threads * n / infer
            cycle += infer
        found["actors"] = layout.num_envs / cycle
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
