"""CartPole, all copies in one NumPy computation: --env vector_games:CartPole.

PYTHONPATH=benchmarks python -m torchbeast.monobeast --env vector_games:CartPole
"""

from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode


class CartPole(CartPoleVectorEnv):
    """Gymnasium's, with resets in the step that ends an episode."""

    metadata = CartPoleVectorEnv.metadata | {"autoreset_mode": AutoresetMode.SAME_STEP}

    def step(self, action: np.ndarray) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if (done := self.prev_done).any():
            info = {"final_obs": observation.copy()}
            fresh = self.np_random.uniform(self.low, self.high, (4, done.sum()))
            self.state[:, done] = fresh
            observation[done] = fresh.T
            self.steps[done] = 0
            self.prev_done = np.zeros_like(done)
        return observation, reward, terminated, truncated, info
