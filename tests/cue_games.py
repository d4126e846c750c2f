"""Games that are learned in seconds, if the agent tells them apart and remembers."""

import gymnasium as gym
import numpy as np
from environments import Recall
from gymnasium import spaces


class Pennies(gym.Env):
    """Take the action that the observation shows; the reward is VALUE if it is right.

    An episode takes LENGTH steps.
    """

    VALUE = 1.0
    LENGTH = 5
    ACTIONS = 4
    WIDTH = 6  # of the observation

    def __init__(self):
        self.observation_space = spaces.Box(0.0, 1.0, (self.WIDTH,))
        self.action_space = spaces.Discrete(self.ACTIONS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._show(), {}

    def step(self, action):
        reward = self.VALUE * (action == self.shown)
        self.steps += 1
        return self._show(), reward, self.steps == self.LENGTH, False, {}

    def _show(self):
        self.shown = int(self.np_random.integers(self.ACTIONS))
        return np.eye(self.ACTIONS, self.WIDTH, dtype=np.float32)[self.shown]


class Gold(Pennies):
    """The observation is smaller; the actions that it shows are the same."""

    VALUE = 1000.0
    WIDTH = 4


class Repeat(Recall):
    """Recall with a reward of 1 for the right digit in every step.

    The digit is shown in the first observation only. So the return without a memory is
    2 at best, and 4 with one.
    """

    def step(self, action):
        observation, _, over, truncated, info = super().step(action)
        return observation, float(action == self.digit), over, truncated, info
