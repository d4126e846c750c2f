"""Stacks of frames in a replay: each frame is stored once.

The observation of most Atari agents is a stack of the last K frames, so two that follow
each other share K - 1. `FrameStacks` compares them, and assumes nothing: an observation
that shares no frame with the one before is stored whole.
"""

from collections.abc import Callable

import numpy as np

# Makes an array from its shape and dtype.
Create = Callable[[tuple[int, ...], np.dtype], np.ndarray]


class Slots:
    """The numbers 0 to size - 1, to take and to give back.

    Numbers that were given back are taken first, so that little memory is touched.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._next = 0  # this and greater numbers were never taken
        self._returned = np.empty(size, np.int64)  # a stack
        self._num_returned = 0

    @property
    def num_free(self) -> int:
        return self._num_returned + self._size - self._next

    def take(self, n: int) -> np.ndarray:
        assert n <= self.num_free, (n, self.num_free)
        again = min(n, self._num_returned)
        self._num_returned -= again
        returned = self._returned[self._num_returned : self._num_returned + again]
        new = np.arange(self._next, self._next + n - again)
        self._next += n - again
        return np.concatenate([returned[::-1], new])

    def give_back(self, slots: np.ndarray) -> None:
        self._returned[self._num_returned : self._num_returned + len(slots)] = slots
        self._num_returned += len(slots)

    def keep(self, taken: list[np.ndarray]) -> None:
        """Takes these slots and gives back all others."""
        everything = np.concatenate([np.empty(0, np.int64), *taken])
        self._next = int(everything.max(initial=-1)) + 1
        self._num_returned = 0
        self.give_back(np.setdiff1d(np.arange(self._next), everything))


def stack_size(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """The number K of frames in an image [K, H, W] or [H, W, K], or 1.

    Three channels of bytes count as the colours of one frame.
    """
    if len(shape) != 3 or dtype != np.uint8:
        return 1
    channels = min(shape[0], shape[-1])
    return 1 if channels == 3 else channels


class Plain:
    """Values of one field, by slot."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def read(self, slots: np.ndarray) -> np.ndarray:
        return self.array[slots]

    def arrays(self) -> list[np.ndarray]:
        return [self.array]


class FrameStacks:
    """Observations that are stacks of K frames, by slot.

    Args:
      shape: of an observation, [K, H, W] or [H, W, K].
      capacity: number of observations.
      room: number of frames. An observation needs one, if it continues the one before
        it, else up to K.
      create: makes the arrays.
    """

    def __init__(
        self, shape: tuple[int, ...], capacity: int, room: int, create: Create
    ) -> None:
        self._axis = 0 if shape[0] < shape[-1] else 2
        height_width = tuple(n for i, n in enumerate(shape) if i != self._axis)
        self._frames = create((room, *height_width), np.dtype(np.uint8))
        numbers_shape = (capacity, shape[self._axis])
        self._numbers = create(numbers_shape, np.dtype(np.int32))
        self.slots = Slots(room)

    def continued(self, x: np.ndarray) -> np.ndarray:
        """Which rows of x [T + 1, B, *shape] continue the row before: [T, B] bool."""
        frames = np.moveaxis(x, self._axis + 2, 2)  # [T + 1, B, K, H, W]
        return (frames[1:, :, :-1] == frames[:-1, :, 1:]).all((2, 3, 4))

    def changed(self, x: np.ndarray) -> np.ndarray:
        """Which rows of x [T + 1, B, *shape] are not as the one before: [T, B]."""
        return (x[1:] != x[:-1]).any((2, 3, 4))

    def find_new(self, stacks: np.ndarray, before: int | None) -> np.ndarray:
        """Which frames have to be stored: [n, K] bool, for stacks [n, *shape].

        Args:
          before: the slot of the observation before the first one, if there is any.
        """
        x = np.moveaxis(stacks, self._axis + 1, 1)  # [n, K, H, W]
        new = np.ones(x.shape[:2], bool)
        last = None if before is None else self._frames[self._numbers[before]]
        for i, frames in enumerate(x):
            if last is not None and np.array_equal(frames[:-1], last[1:]):
                new[i, :-1] = False
            else:  # at the start of an episode frames are repeated
                new[i, 1:] = [
                    not np.array_equal(*pair)
                    for pair in zip(frames[1:], frames[:-1], strict=True)
                ]
            last = frames
        return new

    def write(
        self, slots: np.ndarray, stacks: np.ndarray, new: np.ndarray, before: int | None
    ) -> np.ndarray:
        """Stores what find_new found. Returns the slots that the frames have taken."""
        x = np.moveaxis(stacks, self._axis + 1, 1)
        taken = self.slots.take(int(new.sum()))
        self._frames[taken] = x[new]
        numbers = None if before is None else self._numbers[before]
        unused = iter(taken)
        for slot, is_new in zip(slots, new, strict=True):
            if is_new[0]:
                numbers = np.empty_like(self._numbers[slot])
                for k, frame_is_new in enumerate(is_new):
                    numbers[k] = next(unused) if frame_is_new else numbers[k - 1]
            else:
                assert numbers is not None
                numbers = np.append(numbers[1:], next(unused))
            self._numbers[slot] = numbers
        return taken

    def arrays(self) -> list[np.ndarray]:
        return [self._frames, self._numbers]

    def read(self, slots: np.ndarray) -> np.ndarray:
        """The observations [..., *shape] in slots [...]."""
        x = self._frames[self._numbers[slots]]  # [..., K, H, W]
        return np.moveaxis(x, slots.ndim, slots.ndim + self._axis)
