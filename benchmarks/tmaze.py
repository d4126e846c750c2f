"""A T-maze (Bakker 2001): the first observation says where to turn at the end.

    PYTHONPATH=benchmarks python -m torchbeast.monobeast --env tmaze:TMaze \
        --env_kwargs '{"length": 8}' --preset classic-control --use_lstm
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

FORWARD, LEFT, RIGHT = range(3)


class TMaze(gym.Env):
    """A corridor of `length` steps and a junction at its end.

    The observation [4] is one of: turn left, turn right (only in the first step),
    corridor, junction. In the corridor FORWARD is a step and all else costs 0.1. At the
    junction the right turn gives 1, the wrong one -1, and FORWARD costs 0.1. An episode
    has at most three times the steps that it needs.
    """

    def __init__(self, length: int = 8) -> None:
        self.length = length
        self.observation_space = spaces.Box(0.0, 1.0, (4,))
        self.action_space = spaces.Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.turn = int(self.np_random.integers(LEFT, RIGHT + 1))
        self.place = self.steps = 0
        return self._show(self.turn - LEFT), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        over, reward = False, -0.1
        if self.place == self.length and action != FORWARD:
            over, reward = True, 1.0 if action == self.turn else -1.0
        elif self.place < self.length and action == FORWARD:
            self.place, reward = self.place + 1, 0.0
        truncated = not over and self.steps >= 3 * (self.length + 1)
        return self._show(2 + (self.place == self.length)), reward, over, truncated, {}

    @staticmethod
    def _show(what: int) -> np.ndarray:
        return np.eye(4, dtype=np.float32)[what]
