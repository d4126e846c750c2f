"""Rewards that the learner makes itself, see method.py."""

from typing import Any

from torchbeast.base.flag import Group, flag


# fmt: off
class Flags(Group):
    title = "exploring"
    explorer: str | None = flag(None,
        "a class that adds rewards for exploring, such as "
        "examples.exploration.rnd:RND", metavar="MODULE:CLASS[JSON]")
# fmt: on


def resolve(flags: Any) -> None:
    """Raises FlagError if --explorer names no Method."""
    if flags.explorer:
        from torchbeast.extras.explorer.method import find_method

        find_method(flags.explorer)
