"""An environment whose steps cost nothing: what is left is the cost of TorchBeast.

    PYTHONPATH=benchmarks python benchmarks/throughput.py --part_seconds 0 \
        --variants monobeast polybeast -- --env free_env:FreeEnv
"""

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class FreeEnv(gym.Env):
    """The same observation [4] in each step; every hundredth ends an episode."""

    observation_space = spaces.Box(0.0, 1.0, (4,))
    action_space = spaces.Discrete(2)

    def observe(self) -> np.ndarray:
        return np.zeros(4, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.observe(), 1.0, self.steps % 100 == 0, False, {}


class WaitingEnv(FreeEnv):
    """Frames as large as Atari's, and steps that sleep: another machine computes them.

    Args:
      seconds: of a step.
    """

    observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = spaces.Discrete(6)

    def __init__(self, seconds: float = 0.001) -> None:
        self.seconds = seconds
        self.frame = self.observation_space.sample()

    def observe(self) -> np.ndarray:
        return self.frame.copy()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds)
        return super().step(action)
