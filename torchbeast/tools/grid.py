"""The runs that a sweep's command line asks for: seeds, and values of flags."""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterator, Sequence

from torchbeast.base.errors import FlagError, using

# Flags that can't be in a grid.
OWN = {"seed", "xpid", "savedir", "mode"}
MOST_RUNS = 10_000  # of a sweep: each is checked before the first starts
MOST = 1_000_000  # of each other number


def split_values(text: str) -> list[str]:
    """The values of --grid NAME=VALUE,VALUE...

    A comma in JSON, also after MODULE:CLASS, or in a quoted text separates no values.

    Raises:
      FlagError: a value begins as JSON does, but is none.
    """
    values, place = [], 0
    while place <= len(text):
        end = (text + ",").index(",", place)
        value = text[place:end]
        begin = place + len(re.split(r"[^\w.:]", value)[0])
        if text.startswith("{", begin) or value.startswith(("[", '"')):
            with using(f"--grid: the value {text[place:][:80]}", "is not JSON"):
                content, end = json.JSONDecoder().raw_decode(text, begin)
            value = content if isinstance(content, str) else text[place:end]
        if text[end : end + 1] not in ("", ","):
            raise FlagError(f"--grid: no comma after the value {value[:80]}")
        values.append(value)
        place = end + 1
    return values


def grid(axes: Sequence[tuple[str, str]]) -> Iterator[tuple[str, dict[str, str]]]:
    """All combinations of --grid NAME=VALUE,VALUE...: a label and the values."""
    names = [name for name, _ in axes]
    for values in itertools.product(*(split_values(text) for _, text in axes)):
        parts = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
        label = "-".join(re.sub(r"[^\w.=+-]+", "_", part) for part in parts)
        yield label, dict(zip(names, values, strict=True))


def seed_list(text: str) -> list[int]:
    """1-3,7 → [1, 2, 3, 7]."""
    seeds: dict[int, None] = {}
    for part in text.split(","):
        low, _, high = part.partition("-")
        first, last = int(low), int(high or low)
        if last < first:
            raise argparse.ArgumentTypeError(f"{part!r} has no seed: write LOW-HIGH")
        if len(seeds) + last - first >= MOST_RUNS:
            raise argparse.ArgumentTypeError(
                f"{text[:80]!r} has more than {MOST_RUNS:,} seeds, and a sweep can't "
                "have more runs"
            )
        seeds |= dict.fromkeys(range(first, last + 1))
    return list(seeds)


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
        raise argparse.ArgumentTypeError(f"{text[:80]} is not from 1 to {MOST:,}")
    return number
