"""Returns and lengths of the episodes and games in progress."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Totals(NamedTuple):
    """Returns and lengths so far, of the episodes and games of E environments.

    The returns are float64, because sums over long games would lose digits in float32.
    """

    episode_return: np.ndarray  # [E] float64
    episode_step: np.ndarray  # [E] int64
    game_return: np.ndarray
    game_step: np.ndarray

    @classmethod
    def zeros(cls, num_envs: int) -> Totals:
        return cls(*(np.zeros(num_envs, dtype) for dtype in (np.float64, np.int64) * 2))

    def add(self, reward: np.ndarray) -> Totals:
        """Counts a step with rewards [E]."""
        return Totals(*(x + y for x, y in zip(self, (reward, 1) * 2, strict=True)))

    def restart(self, done: np.ndarray, game_over: np.ndarray) -> Totals:
        """Begins new episodes where done [E], and new games where game_over [E]."""
        over = (done, done, game_over, game_over)
        return Totals(*(np.where(y, 0, x) for x, y in zip(self, over, strict=True)))

    def as_fields(self) -> dict[str, np.ndarray]:
        """The four fields of a row; returns as float32."""
        dtypes = (np.float32, np.int64) * 2
        stored = (x.astype(dtype) for x, dtype in zip(self, dtypes, strict=True))
        return dict(zip(self._fields, stored, strict=True))
