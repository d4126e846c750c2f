"""Nested dicts, tuples and lists. Importing this module does not load torch."""

from collections.abc import Callable, Iterator
from typing import Any

# A leaf, or dicts, tuples and lists of them.
Nested = Any


def map_nested(f: Callable, nested: Nested, *others: Nested) -> Nested:
    """Applies f to the leaves of nested structures of the same shape."""
    if isinstance(nested, dict):
        return {k: map_nested(f, v, *(o[k] for o in others)) for k, v in nested.items()}
    if isinstance(nested, tuple | list):
        rest = zip(*others, strict=True) if others else ((),) * len(nested)
        kind = type(nested)
        return kind(map_nested(f, v, *o) for v, o in zip(nested, rest, strict=True))
    return f(nested, *others)


def flatten(nested: Nested) -> list:
    """The leaves of a nested structure, in order."""
    leaves: list = []
    map_nested(leaves.append, nested)
    return leaves


def with_places(nested: Nested, place: str) -> Iterator[tuple[str, Any]]:
    """The leaves in order, each with its place, such as place['x'][0]."""
    if isinstance(nested, dict | tuple | list):
        items = nested.items() if isinstance(nested, dict) else enumerate(nested)
        for key, part in items:
            yield from with_places(part, f"{place}[{key!r}]")
    else:
        yield place, nested
