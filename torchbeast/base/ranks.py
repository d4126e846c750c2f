"""The learners of a run: one alone, or several, which are called ranks.

torchrun starts several; extras/ranks then has the same methods. All ranks call them in
the same order, for example ranks.total(x). This module does not load torch.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Alone:
    """One learner. Rank 0 writes the run's files."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        """The number of ranks."""
        return 1

    def local_gpu(self, count: int) -> int | None:
        """The GPU of this rank, of `count` in this machine; None: it may use any."""
        return None

    def total(self, x: Any) -> Any:
        """The sum of a tensor over all ranks, without a gradient."""
        return x.detach()

    def totals(self, row: dict[str, Any]) -> dict[str, Any]:
        """The sums of a row of tensors over all ranks, without gradients."""
        return {name: x.detach() for name, x in row.items()}

    def add_gradients(self, parameters: Iterable[Any]) -> None:
        """Replaces all gradients by their sums over all ranks."""

    def joined(self, x: Any, dim: int) -> Any:
        """The tensors of all ranks, of one shape, as one, in their order."""
        return x

    def joined_list(self, items: list[Any]) -> list[Any]:
        """The lists of all ranks as one, in their order."""
        return items

    def highest(self, number: int) -> int:
        """The highest of the ranks' numbers."""
        return number

    def of_first(self, make: Callable[[], Any]) -> Any:
        """What make() returns in rank 0."""
        return make()

    begun = of_first  # for a context manager of a Start, which all ranks enter

    def copy_first(self, tensors: Iterable[Any]) -> None:
        """Overwrites the tensors with those of rank 0."""


learners: Any = Alone()


def __getattr__(name: str) -> Any:
    return getattr(learners, name)


@contextlib.contextmanager
def together(flags: Any) -> Iterator[None]:
    """Inside, this process is one of the ranks that torchrun has started, if it has."""
    global learners
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    from torchbeast.extras.ranks import several  # optional

    with several.joined(flags) as learners:
        try:
            yield
        finally:
            learners = Alone()
