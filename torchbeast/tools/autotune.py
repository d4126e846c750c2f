"""Finds a fast layout for a run on this machine, in about a minute and a half.

    python -m torchbeast.tools.autotune monobeast --preset minatar    # or polybeast

It starts short runs of the very command with other --num_actors and --envs_per_actor.
They change how many environments act at once, and not what is learned from a batch.
"""

import contextlib
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torchbeast.base.errors import FlagError
from torchbeast.base.hardware import num_cpus
from torchbeast.flags import Flags
from torchbeast.runs import flagset, start
from torchbeast.tools import variants
from torchbeast.tools.trial import try_command

log = logging.getLogger(__name__)

SECONDS = 7.0  # of a trial
# Policy lag grows with the environments: at most as many per rollout of a batch as in
# PolyBeast's default, unless the flags have more.
MOST_ENVS_PER_ROLLOUT = 8
SAME = 0.97  # of the highest speed: then fewer environments are better
# A trial leaves nothing behind and learns at once.
OFF = {
    **dict.fromkeys(("eval_interval", "metrics_port", "checkpoint_history"), "=0"),
    **dict.fromkeys(("wandb", "mirror", "init_from", "replay_file"), "="),
}


class Layout(NamedTuple):
    """How many actors, or streams in PolyBeast, with how many environments each."""

    num_actors: int
    envs_per_actor: int

    @property
    def num_envs(self) -> int:
        return self.num_actors * self.envs_per_actor

    def __str__(self) -> str:
        return f"--num_actors {self[0]} --envs_per_actor {self[1]}"


def layouts(resolve: Callable[[Layout | None], Flags], cores: int) -> list[Layout]:
    """At most five: the flags' own, and the largest with an actor per core, or two.

    What the user has typed stays, and what `resolve` refuses is left out.
    """
    flags = resolve(None)
    own, B = Layout(flags.num_actors, flags.envs_per_actor), flags.batch_size
    most = max(own.num_envs, MOST_ENVS_PER_ROLLOUT * B)
    numbers, sizes = [cores, 2 * cores], [2**i for i in range(8)]
    if "num_actors" in flags.typed:
        numbers = [own.num_actors]
    if "envs_per_actor" in flags.typed:
        sizes = [own.envs_per_actor]

    def is_allowed(layout: Layout) -> bool:
        E = layout.envs_per_actor
        # PolyBeast's batches have whole streams.
        if layout.num_envs > most or max(B, E) % min(B, E):
            return False
        with contextlib.suppress(FlagError):
            return bool(resolve(layout))
        return False

    found = [own]
    for number in numbers:
        allowed = [x for x in (Layout(number, E) for E in sizes) if is_allowed(x)]
        found += allowed[-4 // len(numbers) :]
    return list(dict.fromkeys(found))


def choose(speeds: dict[Layout, float]) -> Layout:
    """The fastest layout, or one that is as fast with fewer environments."""
    same = [x for x, speed in speeds.items() if speed >= SAME * max(speeds.values())]
    return min(same, key=lambda x: (x.num_envs, x.num_actors))


def report(speeds: dict[Layout, float]) -> str:
    """What to print. The last line has the flags."""
    fastest_first = sorted(speeds, key=lambda x: -speeds[x])
    rows = [f"{speeds[x]:16,.0f}   {x}" for x in fastest_first]
    why = "As fast as any, with the fewest environments:"
    return "\n".join(["steps per second   layout", *rows, why, str(choose(speeds))])


def trial_words(flags: Flags, layout: Layout) -> list[str]:
    """What a trial's command line has after the user's words; later words win."""
    words = [*str(layout).split(), f"--total_steps={10**15}", "--disable_checkpoint"]
    words += [f"--{name}{off}" for name, off in OFF.items() if name in flags.typed]
    return [*words, *(["--learn_start=0"] if getattr(flags, "replay_ratio", 0) else [])]


def tune(variant: str, words: Sequence[str], seconds: float = SECONDS) -> int:
    """Prints the best layout for a command. Returns the exit status.

    Raises:
      FlagError: the flags are not allowed.
      TrialError: a run failed or hung.
    """
    module = variants.load(variant)
    typed = flagset.read(module.make_parser(), words)

    def resolve(layout: Layout | None) -> Flags:
        flags = flagset.merge(typed)
        for name, value in (layout._asdict() if layout else {}).items():
            setattr(flags, name, value)
        return module.resolve_layout(flagset.resolve(flags)).freeze()

    flags = resolve(None)
    command = [sys.executable, "-m", f"torchbeast.{variant}", *words]
    speeds: dict[Layout, float] = {}
    for layout in layouts(resolve, num_cpus()):
        with tempfile.TemporaryDirectory(prefix="torchbeast-autotune-") as folder:
            whole = [*command, *trial_words(flags, layout)]
            speeds[layout] = try_command(whole, Path(folder), seconds)
        log.info("%s: %.0f steps per second", layout, speeds[layout])
    sys.stdout.write(report(speeds) + "\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in variants.VARIANTS:
        sys.exit("usage: python -m torchbeast.tools.autotune monobeast|polybeast FLAGS")
    return start.guarded(lambda: tune(words[0], words[1:]))


if __name__ == "__main__":
    sys.exit(main())
