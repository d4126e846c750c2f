"""The runs that a sweep's command line asks for: seeds, and values of flags."""

import argparse
import itertools
import re
from collections.abc import Iterator, Sequence

# Flags that can't be in a grid.
OWN = {"seed", "xpid", "savedir", "mode"}
MOST = 1_000_000  # seeds, runs at a time, minutes, and so on


def split_values(text: str) -> list[str]:
    """The values of --grid NAME=VALUE,VALUE...

    A comma in {...}, [...] or "..." separates no values.
    """
    values, depth, quoted = [""], 0, False
    for letter in text:
        quoted ^= letter == '"'
        if not quoted:
            depth += (letter in "{[") - (letter in "}]")
        if letter == "," and not depth and not quoted:
            values.append("")
        else:
            values[-1] += letter
    return [x[1:-1] if re.fullmatch('"[^"]*"', x) else x for x in values]


def grid(axes: Sequence[tuple[str, str]]) -> Iterator[tuple[str, dict[str, str]]]:
    """All combinations of --grid NAME=VALUE,VALUE...: a label and the values."""
    names = [name for name, _ in axes]
    for values in itertools.product(*(split_values(text) for _, text in axes)):
        parts = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
        label = "-".join(re.sub(r"[^\w.=+-]+", "_", part) for part in parts)
        yield label, dict(zip(names, values, strict=True))


def seed_list(text: str) -> list[int]:
    """1-3,7 → [1, 2, 3, 7]."""
    seeds: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        first, last = int(low), int(high or low)
        if not 0 <= last - first < MOST:
            why = f"{part!r} has no seed, or more than {MOST:,}: write LOW-HIGH"
            raise argparse.ArgumentTypeError(why)
        seeds += range(first, last + 1)
    return list(dict.fromkeys(seeds))


def setting(text: str) -> tuple[str, str]:
    """learning_rate=VALUES → (learning_rate, VALUES)."""
    name, _, values = text.partition("=")
    name = name.lstrip("-")
    if not name or not values:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form FLAG=VALUES")
    if name in OWN:
        raise argparse.ArgumentTypeError(f"{name} can't be varied like this")
    return name, values


def positive(text: str) -> int:
    if not 1 <= (number := int(text)) <= MOST:
        raise argparse.ArgumentTypeError(f"{text} is not from 1 to {MOST:,}")
    return number
