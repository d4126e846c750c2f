"""Replay of whole episodes (Schmitt, Hessel, Simonyan 2019, arXiv 1909.11583).

    batch [T + 1, B] -> Replay.add: joins rollouts to episodes; the oldest make room
                        Replay.read: n unrolls [T + 1, n] of episodes
    batch [T + 1, B + n] <- Mixer: online and replayed columns, with recurrent states

What the agent saw and did in a step is from row t of a rollout, its result from row
t + 1, where the next episode may begin. Each is stored once, with one slot per step.

A reader replays one episode after the other, without a gap: each unroll continues where
its previous one ended. All episodes are equally probable, and so are all steps, because
an episode is played to its end, unless it is removed before.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchbeast.base.errors import FlagError
from torchbeast.base.nested import Nested, flatten, map_nested
from torchbeast.core import rollout
from torchbeast.core.rollout import RESULTS, State
from torchbeast.extras.replay.frames import FrameStacks, Slots

SPARE_FRAMES = 1 / 32  # of the capacity, for the stacks that begin episodes
LONGEST_SHARE = 1 / 4  # of the capacity; a longer episode is cut
OPEN_SHARE = 1 / 2  # of the capacity; if open ones fill more, the longest are cut


@dataclasses.dataclass(eq=False)
class Episode:
    """Some steps of one environment, in order; none if it was removed."""

    slots: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    is_cut: bool = False  # the end is not that of the episode, or has no value
    stored_at: int = 0  # the learner's step when it last grew
    last_row: bytes = b""  # if it goes on: digest of the row that its rollout ends with

    def __len__(self) -> int:
        return len(self.slots)


@dataclasses.dataclass
class Reader:
    """Where an unroll begins."""

    episode: Episode = dataclasses.field(default_factory=Episode)
    position: int = 0
    state: State = ()  # before row 0, [layers, 1, ...]; () at first


class Replay:
    """Stores episodes, up to `capacity` steps, and replays them. Not thread-safe.

    Args:
      spec: the fields of a row, see acting.row_spec.
      create: makes the arrays that hold the steps, of a shape and a dtype.

    Attributes:
      size: number of steps in complete episodes.
      num_lost: number of steps whose episode was not complete.
      was_full: whether an episode had to make room.
      arrays: all that `create` made.
    """

    def __init__(
        self,
        spec: dict[str, Nested],
        capacity: int,
        unroll_length: int,
        create: Callable[[tuple[int, ...], np.dtype], np.ndarray],
        seed: int,
    ) -> None:
        self.capacity, self.unroll_length = capacity, unroll_length
        self.size = self.num_lost = 0
        self.was_full = False
        self.arrays: list[np.ndarray] = []

        def make(*shape: int, dtype: Any) -> np.ndarray:
            self.arrays.append(create(shape, np.dtype(dtype)))
            return self.arrays[-1]

        def make_store(spec: rollout.Spec) -> np.ndarray | FrameStacks:
            dtype = torch.empty(0, dtype=spec.dtype).numpy().dtype
            if not spec.is_stack:
                return make(capacity, *spec.shape, dtype=dtype)
            room = int(capacity * (1 + SPARE_FRAMES)) + 64
            frames = make(room, *spec.shape[1:], dtype=dtype)
            numbers = make(capacity, spec.shape[0], dtype=np.int32)
            slots = Slots(make(room, dtype=np.int64), self._make_room)
            return FrameStacks(frames, numbers, slots)

        self._stores = map_nested(make_store, spec)
        self._stacks = [x for x in flatten(self._stores) if isinstance(x, FrameStacks)]
        self.fields = list(self._stores)  # of a row
        self._slots = Slots(make(capacity, dtype=np.int64), self._make_room)
        self._open: list[Episode] = []
        self._complete: collections.deque[Episode] = collections.deque()  # oldest first
        self._readers: list[Reader] = []
        self._rng = np.random.default_rng(seed)

    # --- Storing

    def add(self, rows: dict[str, Nested], step: int) -> None:
        """Adds rollouts [T + 1, B, ...], NumPy, at the learner's step.

        The rollouts of an environment come in order, but no field says which one they
        are from: row 0 of a rollout is the last row of the one before.

        Raises:
          FlagError: no room for the rollouts.
        """
        for b in range(rows["done"].shape[1]):
            self._add_rollout(map_nested(lambda x, b=b: x[:, b], rows), step)

    def _add_rollout(self, column: dict[str, Nested], step: int) -> None:
        done, T = column["done"], self.unroll_length
        episode: Episode | None = Episode()
        if not done[0]:  # None if a rollout before is lost
            first = digest(column, 0)
            episode = next((x for x in self._open if x.last_row == first), None)
            self._open = [x for x in self._open if x is not episode]
        begin = 0
        for end in sorted({T, *(np.flatnonzero(done[1:]) + 1).tolist()}):
            if episode is None:
                self.num_lost += end - begin
            else:
                self._append(episode, column, begin, end)
                episode.stored_at = step
            if done[end] or (episode and len(episode) > LONGEST_SHARE * self.capacity):
                if episode:
                    # The value of a truncated episode's last observation is that of
                    # old weights, so its last step does not count.
                    episode.is_cut = not done[end] or bool(column["truncated"][end])
                    self._finish(episode)
                episode = Episode()
            begin = end
        if episode is not None and not done[T]:
            episode.last_row = digest(column, T)
            self._open.append(episode)

    def _append(
        self, episode: Episode, column: dict[str, Nested], begin: int, end: int
    ) -> None:
        """Adds the steps from rows begin to end - 1."""
        slots = self._slots.take(end - begin)
        before = int(episode.slots[-1]) if episode else None

        def write(store: np.ndarray | FrameStacks, values: np.ndarray) -> None:
            if isinstance(store, FrameStacks):
                store.write(slots, values, before)
            else:
                store[slots] = values

        for name, stores in self._stores.items():
            row = int(name in RESULTS)
            steps = slice(begin + row, end + row)
            part = map_nested(lambda x, steps=steps: x[steps], column[name])
            map_nested(write, stores, part)
        episode.slots = np.concatenate([episode.slots, slots])

    def _finish(self, episode: Episode) -> None:
        self._complete.append(episode)
        self.size += len(episode)

    def _make_room(self) -> None:
        """Removes the oldest complete episode."""
        self.was_full = True
        # Episodes without ends would push out all complete ones. If stacks share no
        # frames, frames can run out while most slots are free.
        while self._slots.num_free + self.size < (1 - OPEN_SHARE) * self.capacity or (
            not self._complete and any(self._open)
        ):
            part = max(self._open, key=len)
            self._open[self._open.index(part)] = Episode(last_row=part.last_row)
            part.is_cut = True
            self._finish(part)
        if not self._complete:
            raise FlagError(
                f"--replay_size {self.capacity:,} is too small for these rollouts of "
                f"{self.unroll_length} steps"
            )
        oldest = self._complete.popleft()
        self.size -= len(oldest)
        self._slots.give_back(oldest.slots)
        for store in self._stacks:
            store.free(oldest.slots)
        oldest.slots = oldest.slots[:0]

    # --- Replaying

    def read(self, n: int) -> tuple[dict[str, Nested], list[Reader]]:
        """Reads n unrolls [T + 1, n, ...], NumPy, if at least one episode is complete.

        `valid` is False at the last step of an episode that was truncated or cut.

        Returns:
          The rows; and the readers. Put the state before the last row into each.
        """
        self._readers += [Reader() for _ in range(n - len(self._readers))]
        readers = self._readers[:n]
        self._readers = self._readers[n:] + readers  # in turns
        plans = [self._plan(reader) for reader in readers]
        fronts, results, begins, valid = (
            np.stack(x, axis=1) for x in zip(*plans, strict=True)
        )
        rows = {}
        for name, stores in self._stores.items():
            slots = results if name in RESULTS else fronts
            rows[name] = map_nested(lambda store, at=slots: store[at], stores)
            if name in RESULTS:
                map_nested(lambda x: x.__setitem__(results < 0, 0), rows[name])
        return {**rows, "done": begins, "valid": valid}, readers

    def _plan(self, reader: Reader) -> tuple[np.ndarray, ...]:
        """The next T + 1 rows of a reader, which then points at the last of them.

        Returns four arrays [T + 1]: slots of the steps from the rows, and to them, or
        -1; which rows begin an episode; which steps count.
        """
        num_rows = self.unroll_length + 1
        fronts, results = np.empty((2, num_rows), np.int64)
        begins, valid = np.zeros(num_rows, bool), np.ones(num_rows, bool)
        if not reader.episode:
            reader.episode, reader.position, reader.state = self._choose(), 0, ()
        episode, position, last, t = reader.episode, reader.position, -1, 0
        while True:
            slots = episode.slots
            n = min(num_rows - t, len(slots) - position)
            fronts[t : t + n] = slots[position : position + n]
            results[t] = last if position == 0 else slots[position - 1]
            results[t + 1 : t + n] = fronts[t : t + n - 1]
            begins[t] = position == 0
            t, position = t + n, position + n
            if t == num_rows:
                break
            valid[t - 1] = not episode.is_cut
            episode, position, last = self._choose(), 0, slots[-1]
        reader.episode, reader.position = episode, position - 1
        return fronts, results, begins, valid

    def _choose(self) -> Episode:
        """A complete episode; all are equally probable."""
        return self._complete[int(self._rng.integers(len(self._complete)))]

    # --- Saving

    def index(self) -> list[Any]:
        """Which steps each complete episode has, in plain values; see restore."""
        return [[x.slots.tolist(), x.is_cut, x.stored_at] for x in self._complete]

    def restore(self, index: list[Any]) -> None:
        """Takes over the episodes of an index, whose steps are in the arrays."""
        for slots, is_cut, stored_at in index:
            self._finish(Episode(np.array(slots, np.int64), is_cut, stored_at))
        taken = [x.slots for x in self._complete]
        self._slots.keep(taken)
        for store in self._stacks:
            store.slots.keep([store.numbers[slots] for slots in taken])


def digest(column: dict[str, Nested], t: int) -> bytes:
    """Of row t with all its fields."""
    found = hashlib.blake2b(digest_size=16)
    map_nested(lambda x: found.update(x[t].tobytes()), column)
    return found.digest()
