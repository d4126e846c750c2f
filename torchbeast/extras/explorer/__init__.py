"""Rewards that the learner makes itself, see method.py."""

from torchbeast.base.flag import Group, flag


# fmt: off
class Flags(Group):
    title = "exploring"
    explorer: str | None = flag(None,
        "a class that adds rewards for exploring, such as "
        "examples.exploration.rnd:RND", metavar="MODULE:CLASS[JSON]")
# fmt: on
