"""Stacks of frames in a replay: each frame is stored once.

Two stacks of K frames that follow each other share K - 1. Which spaces hold stacks, the
environment says (FrameStack in envs/values.py). A stack that shares no frame with the
one before is stored whole.
"""

import itertools
from collections.abc import Callable

import numpy as np


class Slots:
    """The numbers of a store's places.

    Args:
      array: int64, as long as the store; its first num_free elements are free slots.
      make_room: called until enough are free.
    """

    def __init__(self, array: np.ndarray, make_room: Callable[[], None]) -> None:
        self._free, self._make_room = array, make_room
        self.keep([])

    def take(self, n: int) -> np.ndarray:
        while self.num_free < n:
            self._make_room()
        self.num_free -= n
        # Those that were given back come first, so that little memory is touched.
        return self._free[self.num_free : self.num_free + n][::-1].copy()

    def give_back(self, slots: np.ndarray) -> None:
        self._free[self.num_free : self.num_free + len(slots)] = slots
        self.num_free += len(slots)

    def keep(self, taken: list[np.ndarray]) -> None:
        """Takes these slots and gives back all others."""
        is_free = np.ones(len(self._free), bool)
        for slots in taken:
            is_free[slots] = False
        self.num_free = 0
        self.give_back(np.flatnonzero(is_free)[::-1])


class FrameStacks:
    """Observations [K, ...] by slot; `numbers` [capacity, K] are of their frames."""

    def __init__(self, frames: np.ndarray, numbers: np.ndarray, slots: Slots) -> None:
        self._frames, self.numbers, self.slots = frames, numbers, slots

    def write(self, slots: np.ndarray, stacks: np.ndarray, before: int | None) -> None:
        """Stores stacks [n, K, ...]; `before` is the slot of the one before, if any."""
        last = None if before is None else self[before]
        numbers = self.numbers[before or 0]
        for slot, stack in zip(slots, stacks, strict=True):
            if last is not None and np.array_equal(stack[:-1], last[1:]):
                numbers = np.append(numbers[1:], self._store(stack[-1:]))
            else:  # at the start of an episode frames are repeated
                same = [np.array_equal(x, y) for x, y in itertools.pairwise(stack)]
                is_new = ~np.array([False, *same])
                numbers = self._store(stack[is_new])[is_new.cumsum() - 1]
            self.numbers[slot], last = numbers, stack

    def _store(self, frames: np.ndarray) -> np.ndarray:
        slots = self.slots.take(len(frames))
        self._frames[slots] = frames
        return slots

    def free(self, slots: np.ndarray) -> None:
        """Gives back the frames of whole episodes, which share none."""
        self.slots.give_back(np.unique(self.numbers[slots]))

    def __getitem__(self, slots: int | np.ndarray) -> np.ndarray:
        return self._frames[self.numbers[slots]]  # [..., K, ...] of slots [...]
