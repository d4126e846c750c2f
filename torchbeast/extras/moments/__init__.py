"""Observations and rewards that the model normalizes by running moments: running.py."""

from typing import Any

from torchbeast.base.errors import FlagError
from torchbeast.base.flag import Group, flag


# fmt: off
class Flags(Group):
    title = "normalization"
    normalize_observations: bool = flag(False,
        "scale numbers by running mean and deviation; their MLPs then have tanh")
    normalize_rewards: bool = flag(False,
        "divide rewards by the deviation of their discounted sum, and don't clip")
# fmt: on


def resolve(flags: Any) -> None:
    if flags.encoder and flags.normalize_observations:
        raise FlagError("--normalize_observations has no effect with --encoder")
