"""Stacks of frames in a replay: each frame is stored once.

The observation of most Atari agents is a stack of the last K frames, so two that follow
each other share K - 1. Which spaces hold stacks, the environment says (FrameStack in
envs/values.py). An observation that shares no frame with the one before is stored
whole.
"""

import math
from collections.abc import Callable

import numpy as np

# Makes an array from its shape and dtype.
Create = Callable[[tuple[int, ...], np.dtype], np.ndarray]


class Slots:
    """The numbers 0 to size - 1, to take and to give back.

    Numbers that were given back are taken first, so that little memory is touched.

    Attributes:
      num_free: how many can be taken.
    """

    def __init__(self, size: int, create: Create) -> None:
        self._free = create((size,), np.dtype(np.int64))  # a stack
        self.keep([])

    def take(self, n: int) -> np.ndarray:
        assert n <= self.num_free, (n, self.num_free)
        self.num_free -= n
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


class Plain:
    """Values of one field, by slot. Its methods are those of FrameStacks."""

    num_free = math.inf

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def find_new(self, values: np.ndarray, before: int | None) -> np.ndarray:
        return np.zeros(0, bool)

    def write(
        self, slots: np.ndarray, values: np.ndarray, new: np.ndarray, before: int | None
    ) -> None:
        self.array[slots] = values

    def free(self, slots: np.ndarray) -> None:
        pass

    def arrays(self) -> list[np.ndarray]:
        return [self.array]

    def read(self, slots: np.ndarray) -> np.ndarray:
        return self.array[slots]


class FrameStacks:
    """Observations that are stacks of K frames, by slot.

    Args:
      shape: of an observation, [K, ...].
      dtype: of an observation.
      capacity: number of observations.
      room: number of frames. An observation needs one, if it continues the one before
        it, else up to K.
      create: makes the arrays.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        capacity: int,
        room: int,
        create: Create,
    ) -> None:
        self._frames = create((room, *shape[1:]), dtype)
        self._numbers = create((capacity, shape[0]), np.dtype(np.int32))
        self.slots = Slots(room, create)

    def find_new(self, stacks: np.ndarray, before: int | None) -> np.ndarray:
        """Which frames have to be stored: [n, K] bool, for stacks [n, K, ...].

        Args:
          before: the slot of the observation before the first one, if there is any.
        """
        new = np.ones(stacks.shape[:2], bool)
        last = None if before is None else self._frames[self._numbers[before]]
        for i, frames in enumerate(stacks):
            if last is not None and np.array_equal(frames[:-1], last[1:]):
                new[i, :-1] = False
            else:  # at the start of an episode frames are repeated
                pixels = tuple(range(1, frames.ndim))
                new[i, 1:] = (frames[1:] != frames[:-1]).any(pixels)
            last = frames
        return new

    def write(
        self, slots: np.ndarray, stacks: np.ndarray, new: np.ndarray, before: int | None
    ) -> None:
        """Stores what find_new found."""
        taken = self.slots.take(int(new.sum()))
        self._frames[taken] = stacks[new]
        numbers = None if before is None else self._numbers[before]
        for slot, is_new in zip(slots, new, strict=True):
            if is_new[0]:  # a frame that repeats the one before has its number
                numbers = taken[is_new.cumsum() - 1]
            else:
                assert numbers is not None
                numbers = np.append(numbers[1:], taken[0])
            self._numbers[slot] = numbers
            taken = taken[is_new.sum() :]

    @property
    def num_free(self) -> int:
        return self.slots.num_free

    def frames(self, slots: np.ndarray) -> np.ndarray:
        """The slots of the frames of whole episodes, which share no frame."""
        return np.unique(self._numbers[slots])

    def free(self, slots: np.ndarray) -> None:
        self.slots.give_back(self.frames(slots))

    def arrays(self) -> list[np.ndarray]:
        return [self._frames, self._numbers]

    def read(self, slots: np.ndarray) -> np.ndarray:
        """The observations [..., K, ...] in slots [...]."""
        return self._frames[self._numbers[slots]]
