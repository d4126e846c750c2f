"""Replay of whole episodes, for LASER.

Schmitt, Hessel and Simonyan, "Off-Policy Actor-Critic with Shared Experience Replay",
2019. https://arxiv.org/abs/1909.11583

    batch [T + 1, B] -> Replay.add: joins rollouts to episodes; the oldest make room
                        Replay.read: n unrolls [T + 1, n] of episodes
    batch [T + 1, B + n] <- Mixer: online and replayed columns, with recurrent states

A step of an episode has two parts. What the agent saw and did is from row t of a
rollout, its result from row t + 1, where the next episode may begin. Each is stored
once, with one slot number per step.

A reader replays one episode after the other, without a gap, as an environment plays
them. Each unroll continues where the reader's previous one ended. All episodes are
equally probable, and so are all steps, because an episode is played to its end,
unless it is removed before.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from typing import Any

import numpy as np
import torch

from torchbeast.base.errors import FlagError
from torchbeast.base.nested import Nested, flatten, map_nested
from torchbeast.core import rollout
from torchbeast.core.rollout import RESULTS, State
from torchbeast.extras.replay.frames import Create, FrameStacks, Plain, Slots

SPARE_FRAMES = 1 / 32  # of the capacity, for the stacks that begin episodes
LONGEST_SHARE = 1 / 4  # of the capacity; a longer episode is cut
OPEN_SHARE = 1 / 2  # of the capacity; if open ones fill more, the longest are cut


class ReplayError(FlagError):
    """The replay can't be made with these flags on this machine."""


@dataclasses.dataclass(eq=False)
class Episode:
    """Some steps of one environment, in order.

    Attributes:
      slots: what they occupy, an array per piece; one array if complete, none if
        removed.
      is_cut: the end is not that of the episode, or its value is not known.
      stored_at: the learner's step when the episode last grew.
      touched: number of steps that the replay had got when the episode last grew.
      last_row: if it goes on, the digest of the row that its next rollout begins with.
    """

    slots: list[np.ndarray] = dataclasses.field(default_factory=list)
    length: int = 0
    is_cut: bool = False
    stored_at: int = 0
    touched: int = 0
    last_row: bytes = b""


@dataclasses.dataclass
class Reader:
    """Where an unroll begins.

    Attributes:
      episode, position: the episode and the step of row 0; no episode at first.
      state: the recurrent state before row 0, [layers, 1, ...]; () at first.
    """

    episode: Episode | None = None
    position: int = 0
    state: State = ()


class Replay:
    """Stores episodes and replays them. Not thread-safe.

    Args:
      spec: the fields of a row, see acting.row_spec.
      capacity: number of steps.
      unroll_length: T.
      create: makes the arrays that hold the steps.
      seed: of the choice of episodes.

    Attributes:
      size: number of steps in complete episodes.
      was_full: whether an episode had to make room.
    """

    def __init__(
        self,
        spec: dict[str, Nested],
        capacity: int,
        unroll_length: int,
        create: Create,
        seed: int,
    ) -> None:
        self.capacity, self.unroll_length = capacity, unroll_length
        self.size = 0
        self.num_added = 0
        self.num_lost = 0  # steps whose episode was not complete
        self.was_full = False
        self._stores = map_nested(lambda x: self._make_store(x, create), spec)
        self._slots = Slots(capacity, create)
        self._complete: collections.deque[Episode] = collections.deque()  # oldest first
        self._open: list[Episode] = []  # unfinished; the one that grew first is first
        self._readers: collections.deque[Reader] = collections.deque()
        self._rng = np.random.default_rng(seed)

    def _make_store(self, spec: rollout.Spec, create: Create) -> Plain | FrameStacks:
        dtype = torch.empty(0, dtype=spec.dtype).numpy().dtype
        if not spec.is_stack:
            return Plain(create((self.capacity, *spec.shape), dtype))
        room = int(self.capacity * (1 + SPARE_FRAMES)) + 64
        return FrameStacks(spec.shape, dtype, self.capacity, room, create)

    @property
    def fields(self) -> list[str]:
        """The fields of a row that are stored."""
        return list(self._stores)

    # --- Storing

    def add(self, rows: dict[str, Nested], step: int) -> None:
        """Adds rollouts [T + 1, B, ...], NumPy.

        The rollouts of an environment come in order, but no field says which one they
        are from: row 0 of a rollout is the last row of the one before.

        Args:
          step: the learner's, for the column replay_age.

        Raises:
          ReplayError: no room for the rollouts.
        """
        T = len(rows["done"]) - 1
        self.num_added += rows["done"][1:].size
        B = rows["done"].shape[1]
        columns = [map_nested(lambda x, b=b: x[:, b], rows) for b in range(B)]
        for column in columns:
            done = column["done"]
            episode = Episode() if done[0] else self._take_open(column)
            begin = 0
            for end in [*(np.flatnonzero(done[1:]) + 1).tolist(), T]:
                if end == begin:
                    break  # an episode ends in row T
                if episode is None:
                    self.num_lost += end - begin
                else:
                    self._append(episode, column, begin, end)
                    episode.stored_at = step
                is_long = episode and episode.length > LONGEST_SHARE * self.capacity
                if done[end] or is_long:
                    if episode:
                        # The value of a truncated episode's last observation is that
                        # of old weights, so its last step does not count.
                        episode.is_cut = not done[end] or bool(column["truncated"][end])
                        self._finish(episode)
                    episode = Episode()
                begin = end
            if episode is not None and not done[T]:
                episode.touched, episode.last_row = self.num_added, digest(column, T)
                self._open.append(episode)

    def _take_open(self, column: dict[str, Nested]) -> Episode | None:
        """The episode that a rollout continues; None if its first rollouts are lost."""
        first_row = digest(column, 0)
        for i, episode in enumerate(self._open):
            if episode.last_row == first_row:
                return self._open.pop(i)
        return None

    def _append(
        self, episode: Episode, column: dict[str, Nested], begin: int, end: int
    ) -> None:
        """Adds the steps from rows begin to end - 1."""
        n = end - begin
        before = int(episode.slots[-1][-1]) if episode.slots else None
        values: list[tuple[Any, np.ndarray]] = []
        for name, stores in self._stores.items():
            first = begin + 1 if name in RESULTS else begin
            part = map_nested(lambda x, i=first: x[i : i + n], column[name])
            map_nested(lambda *pair: values.append(pair), stores, part)
        new = [store.find_new(x, before) for store, x in values]
        while self._slots.num_free < n or any(
            store.num_free < mask.sum()
            for (store, _), mask in zip(values, new, strict=True)
        ):
            self._make_room()
        slots = self._slots.take(n)
        for (store, x), mask in zip(values, new, strict=True):
            store.write(slots, x, mask, before)
        episode.slots.append(slots)
        episode.length += n

    def _finish(self, episode: Episode) -> None:
        episode.slots = [np.concatenate(episode.slots)]
        self._complete.append(episode)
        self.size += episode.length

    def _make_room(self) -> None:
        """Removes the oldest complete or lost episode."""
        self.was_full = True
        if self._open and self.num_added - self._open[0].touched > self.capacity:
            lost = self._open.pop(0)
            self.num_lost += lost.length
            self._free(lost)
            return
        # Episodes without ends would push out all complete ones. If stacks share no
        # frames, frames can run out while most slots are free.
        while self._slots.num_free + self.size < (1 - OPEN_SHARE) * self.capacity or (
            not self._complete and any(x.length for x in self._open)
        ):
            part = max(self._open, key=lambda x: x.length)
            rest = Episode(touched=part.touched, last_row=part.last_row)
            self._open[self._open.index(part)] = rest
            part.is_cut = True
            self._finish(part)
        if not self._complete:
            raise ReplayError(
                f"the replay has {self.capacity:,} steps, too few for these rollouts "
                f"of {self.unroll_length} steps: raise --replay_size"
            )
        oldest = self._complete.popleft()
        self.size -= oldest.length
        self._free(oldest)

    def _free(self, episode: Episode) -> None:
        if episode.slots:
            slots = np.concatenate(episode.slots)
            self._slots.give_back(slots)
            for store in flatten(self._stores):
                store.free(slots)
            episode.slots = []

    # --- Replaying

    def read(self, n: int) -> tuple[dict[str, Nested], list[Reader]]:
        """Reads n unrolls [T + 1, n, ...], NumPy. At least one episode is complete.

        The field `valid` is False at the last step of an episode that was
        truncated or cut.

        Returns:
          The rows; and the readers. Put the state before the last row into each.
        """
        while len(self._readers) < n:
            self._readers.append(Reader())
        readers = [self._readers[i] for i in range(n)]
        self._readers.rotate(-n)
        plans = [self._plan(reader) for reader in readers]
        fronts, results, begins, mask = (
            np.stack(x, axis=1) for x in zip(*plans, strict=True)
        )
        rows = {}
        for name, stores in self._stores.items():
            slots = results if name in RESULTS else fronts
            rows[name] = map_nested(lambda store, at=slots: store.read(at), stores)
            if name in RESULTS:
                map_nested(lambda x: x.__setitem__(results < 0, 0), rows[name])
        rows["done"] = begins
        rows["valid"] = mask
        return rows, readers

    def _plan(self, reader: Reader) -> tuple[np.ndarray, ...]:
        """The next rows [T + 1] of a reader, which then points at the last of them.

        Returns:
          Slots of the steps from the rows; slots of the steps to the rows, or -1; which
          rows begin an episode; which steps count.
        """
        num_rows = self.unroll_length + 1
        fronts, results = np.empty((2, num_rows), np.int64)
        begins, mask = np.zeros(num_rows, bool), np.ones(num_rows, bool)
        episode = reader.episode
        if episode is None or not episode.slots:
            episode, reader.position, reader.state = self._choose(), 0, ()
        position, last, t = reader.position, -1, 0
        while True:
            (slots,) = episode.slots
            n = min(num_rows - t, len(slots) - position)
            fronts[t : t + n] = slots[position : position + n]
            results[t] = last if position == 0 else slots[position - 1]
            results[t + 1 : t + n] = fronts[t : t + n - 1]
            begins[t] = position == 0
            t, position = t + n, position + n
            if t == num_rows:
                break
            mask[t - 1] = not episode.is_cut
            episode, position, last = self._choose(), 0, slots[-1]
        reader.episode, reader.position = episode, position - 1
        return fronts, results, begins, mask

    def _choose(self) -> Episode:
        """A complete episode; all are equally probable."""
        return self._complete[int(self._rng.integers(len(self._complete)))]

    # --- Saving

    def arrays(self) -> list[np.ndarray]:
        """The arrays that hold the steps, always in the same order."""
        return [array for store in flatten(self._stores) for array in store.arrays()]

    def index(self) -> list[dict[str, Any]]:
        """Which steps each complete episode has, in plain values; see restore."""
        return [
            {
                "slots": episode.slots[0].tolist(),
                "is_cut": episode.is_cut,
                "stored_at": episode.stored_at,
            }
            for episode in self._complete
        ]

    def restore(self, index: list[dict[str, Any]]) -> None:
        """Takes over the episodes of an index. The arrays must have their steps."""
        assert self.num_added == self.size == 0, "the replay is in use"
        for saved in index:
            episode = Episode([np.array(saved["slots"], np.int64)])
            episode.length = len(saved["slots"])
            episode.is_cut, episode.stored_at = saved["is_cut"], saved["stored_at"]
            self._finish(episode)
        taken = [x.slots[0] for x in self._complete]
        self._slots.keep(taken)
        for store in flatten(self._stores):
            if isinstance(store, FrameStacks):
                store.slots.keep([store.frames(slots) for slots in taken])


def digest(column: dict[str, Nested], t: int) -> bytes:
    """Of row t with all its fields."""
    found = hashlib.blake2b(digest_size=16)
    map_nested(lambda x: found.update(x[t].tobytes()), column)
    return found.digest()
