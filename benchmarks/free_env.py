"""An environment whose steps cost nothing: what is left is the cost of TorchBeast.

    PYTHONPATH=benchmarks python benchmarks/throughput.py --part_seconds 0 \
        --variants monobeast polybeast -- --env free_env:FreeEnv
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class FreeEnv(gym.Env):
    """The same observation [4] in each step; every hundredth ends an episode."""

    observation_space = spaces.Box(0.0, 1.0, (4,))
    action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.zeros(4, np.float32), 1.0, self.steps % 100 == 0, False, {}
