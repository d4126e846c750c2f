"""Small environments with spaces of every kind: --env environments:GridWorld.

Each has a simple optimal policy with a known return, so tests can also train on them.
"""

import os
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from torchbeast.envs.extra_fields import GAME_OVER


class GridWorld(gym.Env):
    """Walk to the goal; images and vectors nested in a Dict, Discrete actions.

    Reward 1 at the goal, which ends the episode, -0.01 per step before; truncated after
    LIMIT steps. The info has the distance to the goal, in steps.
    """

    HEIGHT, WIDTH = 8, 9
    LIMIT = 30
    MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))

    shape = (HEIGHT, WIDTH, 2)
    high = np.array([HEIGHT - 1, WIDTH - 1], np.float32)
    place = spaces.Dict(
        {"position": spaces.Box(np.zeros_like(high), high), "moved": spaces.Discrete(2)}
    )
    observation_space = spaces.Dict(
        {"map": spaces.Box(0, 255, shape, np.uint8), "self": place}
    )
    action_space = spaces.Discrete(len(MOVES))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        size = self.HEIGHT * self.WIDTH
        start, goal = self.np_random.choice(size, 2, replace=False)
        self.position = np.array(divmod(int(start), self.WIDTH))
        self.goal = np.array(divmod(int(goal), self.WIDTH))
        self.steps = 0
        return self._observation(moved=False), {"distance": self._distance()}

    def step(self, action):
        before = self.position
        limits = (self.HEIGHT - 1, self.WIDTH - 1)
        self.position = np.clip(before + self.MOVES[action], 0, limits)
        self.steps += 1
        distance = self._distance()
        observation = self._observation(bool((self.position != before).any()))
        reward, late = 1.0 if distance == 0 else -0.01, self.steps >= self.LIMIT
        return observation, reward, distance == 0, late, {"distance": distance}

    def _distance(self):
        return int(np.abs(self.position - self.goal).sum())

    def _observation(self, moved):
        board = np.zeros((self.HEIGHT, self.WIDTH, 2), np.uint8)
        board[(*self.position, 0)] = 255
        board[(*self.goal, 1)] = 255
        position = self.position.astype(np.float32)
        return {"map": board, "self": {"position": position, "moved": int(moved)}}


class Locks(gym.Env):
    """Set every dial as shown; MultiDiscrete observations and actions.

    Reward: the share of the dials set right. An episode takes LENGTH steps.
    """

    DIALS = (3, 2, 4)
    LENGTH = 7

    observation_space = spaces.MultiDiscrete(DIALS)
    action_space = spaces.MultiDiscrete(DIALS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.shown = self.np_random.integers(self.DIALS)
        return self.shown, {}

    def step(self, action):
        assert self.action_space.contains(np.asarray(action)), action
        reward = float(np.mean(action == self.shown))
        self.steps += 1
        self.shown = self.np_random.integers(self.DIALS)
        return self.shown, reward, self.steps >= self.LENGTH, False, {}


class Steering(gym.Env):
    """Steer a point to the origin; continuous actions with different ranges.

    Reward: 1 at the origin, exp(-distance) elsewhere. An episode takes LENGTH steps.
    """

    LENGTH = 9

    observation_space = spaces.Box(-3.0, 3.0, (2,), np.float64)
    low, high = np.array([-1.0, -0.5]), np.array([1.0, 2.0])
    action_space = spaces.Box(low, high, dtype=np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.point = self.np_random.uniform(-1, 1, 2)
        return self.point, {}

    def step(self, action):
        # The caller has to clip actions beyond the bounds.
        low, high = self.action_space.low - 1e-5, self.action_space.high + 1e-5
        assert ((low <= action) & (action <= high)).all(), action
        self.point = np.clip(self.point + action, -3.0, 3.0)
        self.steps += 1
        reward = float(np.exp(-np.linalg.norm(self.point)))
        return self.point, reward, self.steps >= self.LENGTH, False, {}


class Recall(gym.Env):
    """Name the digit that was shown first; a Tuple observation, Discrete from 1.

    The digit is shown in the first observation only, 0 after it; the second part says
    how many steps are left. Reward 1 for the right digit in the last step.
    """

    DIGITS = 3
    LENGTH = 4

    observation_space = spaces.Tuple(
        (spaces.Discrete(DIGITS + 1), spaces.MultiBinary(LENGTH))
    )
    action_space = spaces.Discrete(DIGITS, start=1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.digit = int(self.np_random.integers(1, self.DIGITS + 1))
        return self._observation(self.digit), {}

    def step(self, action):
        assert self.action_space.contains(int(action)), action
        self.steps += 1
        over = self.steps == self.LENGTH
        reward = float(over and action == self.digit)
        return self._observation(0), reward, over, False, {}

    def _observation(self, shown):
        left = np.arange(self.LENGTH) < self.LENGTH - self.steps
        return shown, left.astype(np.int8)


class SeedLog(gym.Env):
    """Writes the seed of each game of which a step is made into a file, SEED_FILE."""

    LENGTH = 3

    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed = seed
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        if self.steps == 0:
            with open(os.environ["SEED_FILE"], "a", encoding="utf-8") as file:
                file.write(f"{self.seed}\n")
        self.steps += 1
        return np.zeros(2, np.float32), 0.0, self.steps == self.LENGTH, False, {}


class Goals(gym.Env):
    """A goal per episode, in the observation and in each info.

    The observation is [goal, steps so far]; episodes take 3 to 6 steps, by their goal.
    Those with an even goal are truncated. What reset() says of "count" is wrong.
    """

    GOALS = 100

    observation_space = spaces.Box(0, GOALS, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal = int(self.np_random.integers(1, self.GOALS))
        self.steps = 0
        return self._observation(), {"goal": self.goal, "count": -1}

    def step(self, action):
        self.steps += 1
        over = self.steps == 3 + self.goal % 4
        info = {"goal": self.goal, "count": self.steps}
        reward = float(action == self.goal % 3)
        even = self.goal % 2 == 0
        return self._observation(), reward, over and not even, over and even, info

    def _observation(self):
        return np.array([self.goal, self.steps], np.float32)


class CombinationLock(gym.Env):
    """Press the right one of two buttons at each of LENGTH places.

    A wrong one ends the episode. Reward 1 for the last right one, which ends it, too.
    So random play opens the lock in one of 2 ** LENGTH episodes.
    """

    LENGTH = 16

    observation_space = spaces.Discrete(LENGTH)
    action_space = spaces.Discrete(2)
    buttons = np.random.default_rng(1).integers(2, size=LENGTH)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return self.place, {}

    def step(self, action):
        right = action == self.buttons[self.place]
        self.place += 1
        over = not right or self.place == self.LENGTH
        return self.place % self.LENGTH, float(over and right), over, False, {}


class Corridor(gym.Env):
    """Press the right one of two buttons at each cell; a grid [1, length, 3] of codes.

    A wrong one leads back to the begin. Reward 1 for the last cell, which ends the
    episode; it is truncated after 2 * length steps.
    """

    FLOOR, END, AGENT = 1, 8, 10  # MiniGrid's objects

    def __init__(self, length=16):
        self.length = length
        self.observation_space = spaces.Box(0, 255, (1, length, 3), np.uint8)
        self.action_space = spaces.Discrete(2)
        self.buttons = np.random.default_rng(1).integers(2, size=length)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.steps = 0
        return self._observation(), {}

    def step(self, action):
        right = action == self.buttons[self.place]
        self.place = self.place + 1 if right else 0
        self.steps += 1
        over, truncated = self.place == self.length - 1, self.steps == 2 * self.length
        return self._observation(), float(over), over, truncated, {}

    def _observation(self):
        grid = np.zeros(self.observation_space.shape, np.uint8)
        grid[0, :, 0] = self.FLOOR
        grid[0, -1, 0] = self.END
        grid[0, self.place, 0] = self.AGENT
        return grid


class Blank(gym.Env):
    """Observations that say nothing; only rewards and lengths differ."""

    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(3)
    observation = np.zeros(2, np.float32)
    steps = 0

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.observation, {}


class Lives(Blank):
    """A game of LIVES episodes of 4 steps each, with 5 points per step.

    No reset may follow another without a step between them.
    """

    LIVES = 3
    is_new = False

    def reset(self, *, seed=None, options=None):
        assert not self.is_new
        self.is_new = True
        if seed is not None:  # a new game, not only a new life
            self.steps = 0
        return self.observation, {}

    def step(self, action):
        self.steps, self.is_new = self.steps + 1, False
        info = {GAME_OVER: self.steps == 4 * self.LIVES}
        return self.observation, 5.0, self.steps % 4 == 0, False, info


class Numbered(Blank):
    """Games of one step, whose return is the environment's number."""

    def __init__(self, env_index):
        self.number = env_index

    def step(self, action):
        return self.observation, float(self.number), True, False, {}


class Digits(Blank):
    """Choose 5 digits of a number in base 3, which is the return of the game."""

    def step(self, action):
        self.steps += 1
        reward = float(action * 3 ** (self.steps - 1))
        return self.observation, reward, self.steps == 5, False, {}


class SlowWhileMarked(gym.Wrapper):
    """For --wrapper: each step takes 20 ms while there is a file SLOW_FILE."""

    def step(self, action):
        if Path(os.environ["SLOW_FILE"]).exists():
            time.sleep(0.02)
        return self.env.step(action)


class SlowInOne(gym.Wrapper):
    """For --wrapper: steps take 100 ms with the first of several learners."""

    def step(self, action):
        if os.environ["RANK"] == "0":
            time.sleep(0.1)
        return self.env.step(action)
