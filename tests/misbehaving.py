"""Environments that don't do what they declare: --env misbehaving:RewardInAList.

Fine is the correct one.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Fine(gymnasium.Env):
    """Episodes of 9 steps; a vector, an image and two numbers."""

    observation_space: spaces.Space = spaces.Dict(
        {
            "vector": spaces.Box(-1.0, 1.0, (3,), np.float32),
            "image": spaces.Box(0, 200, (8, 9, 2), np.uint8),
            "numbers": spaces.Tuple(
                [spaces.Discrete(4, start=-1), spaces.Box(0.0, np.inf, ())]
            ),
        }
    )
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: int) -> Any:
        self.steps += 1
        return self.observe(), 0.5, False, self.steps == 9, {}

    def observe(self) -> Any:
        return {
            "vector": np.zeros(3),  # float64 may become float32
            "image": np.full((8, 9, 2), 200, np.uint16),  # and this may become uint8
            "numbers": (np.int64(-1), 7.0),
        }


class Only(Fine):
    """Observes a vector only."""

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)

    def observe(self) -> Any:
        return np.zeros(3, np.float32)


# --- What ends a run ---


class TooLarge(Fine):
    def observe(self) -> Any:
        return {**super().observe(), "image": np.full((8, 9, 2), 300, np.uint16)}


class WrongShape(Fine):
    def observe(self) -> Any:
        return {**super().observe(), "image": np.zeros((8, 9, 3), np.uint8)}


class WrongDtype(Fine):
    def observe(self) -> Any:
        return {**super().observe(), "image": np.zeros((8, 9, 2))}


class WrongKeys(Fine):
    def observe(self) -> Any:
        return {"vector": np.zeros(3), "picture": 0}


class NoDict(Fine):
    def observe(self) -> Any:
        return np.zeros(3)


class TooFewNumbers(Fine):
    def observe(self) -> Any:
        return {**super().observe(), "numbers": (0,)}


class NoSuchNumber(Fine):
    def observe(self) -> Any:
        return {**super().observe(), "numbers": (3, 0.0)}


class Ragged(Only):
    def observe(self) -> Any:
        return [np.zeros(3), 0.0]


class WrongInStep(Fine):
    """Correct in reset(), wrong in step()."""

    def step(self, action: int) -> Any:
        _, *rest = super().step(action)
        return (np.zeros(3), *rest)


class Many(Only):
    """Returns arrays like EnvPool: a leading dimension for 4 environments."""

    def observe(self) -> Any:
        return np.zeros((4, 3), np.float32)


class RewardInAList(Fine):
    def step(self, action: int) -> Any:
        observation, _, *rest = super().step(action)
        return (observation, np.array([0.5]), *rest)


class RewardNone(Fine):
    def step(self, action: int) -> Any:
        observation, _, *rest = super().step(action)
        return (observation, None, *rest)


class TerminatedInAList(Fine):
    def step(self, action: int) -> Any:
        observation, reward, _, *rest = super().step(action)
        return (observation, reward, [False], *rest)


class ThreeValues(Fine):
    def step(self, action: int) -> Any:
        return super().step(action)[:3]


class SixValues(Fine):
    def step(self, action: int) -> Any:
        return (*super().step(action), "more")


class FourValues(Fine):
    """The old API in step(), the new one in reset()."""

    def step(self, action: int) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, info


class ThreeFromReset(Only):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return (*super().reset(seed=seed, options=options), "more")


class InfoIsNone(Only):
    def step(self, action: int) -> Any:
        return (*super().step(action)[:4], None)


class NoOptions(Only):
    def reset(self, seed: int | None = None) -> Any:
        return super().reset(seed=seed)


class NeedsArguments(Only):
    def __init__(self, size: int, level: str = "easy") -> None:
        self.size = size


class NoSpaces(gymnasium.Env):
    """Has reset() and step(), but no spaces."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(3), {}

    def step(self, action: int) -> Any:
        return np.zeros(3), 0.0, False, False, {}


def several() -> Any:
    return gymnasium.make_vec("CartPole-v1", num_envs=3)


def nothing() -> None:
    return None


AN_OBJECT = Only()


# --- What is suspect ---


class FarOut(Fine):
    """Observations far outside their bounds, and not finite, from step 3 on."""

    def observe(self) -> Any:
        observation = super().observe()
        if self.steps >= 3:
            observation["vector"] = np.array([0.0, -187.5, 0.0])
            observation["image"] = np.full((8, 9, 2), 255, np.uint8)  # not far
            observation["numbers"] = (0, -2.0)
        return observation


class NotFinite(Fine):
    def observe(self) -> Any:
        observation = super().observe()
        observation["vector"] = np.array([0.0, 0.0, np.nan])
        return observation


class Integers(Fine):
    def observe(self) -> Any:
        return {**super().observe(), "vector": np.array([0, 1, -1])}


class TerminatedNone(Fine):
    def step(self, action: int) -> Any:
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, None, truncated, info


class InfiniteReward(Fine):
    """In the last step of each episode, where few checks would see it."""

    def step(self, action: int) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, np.inf if truncated else reward, terminated, truncated, info


class LateFarOut(Fine):
    """Correct for 150 steps, then far outside the bounds."""

    total = 0

    def observe(self) -> Any:
        self.total += 1
        observation = super().observe()
        if self.total > 150:
            observation["vector"] = np.full(3, 99.0)
        return observation


class Suspect(FarOut, Integers, TerminatedNone, InfiniteReward):
    """All of these."""
