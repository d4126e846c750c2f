"""A wrapper that brings environments out of step with each other."""

from typing import Any

import gymnasium as gym
import numpy as np


class Staggered(gym.Wrapper):
    """Truncates the first episode at a random step, the last of which is `limit`.

    As long as nobody finds the goal, all episodes end at the time limit. So all
    environments of an actor are at the same step of their episodes, and a batch has,
    for example, only beginnings: what the agent learns from it, it forgets with the
    next. It makes no difference if episodes end at different steps anyway.

    Tests and evaluations reset an environment once before its first game, so their
    games are whole; those on servers (--server_addresses) are not.

    A resumed run is staggered anew, and so it can't go on with its games in progress.
    """

    def __init__(self, env: gym.Env, limit: int) -> None:
        super().__init__(env)
        self.limit = limit
        self.left: int | None = None  # steps until the cut; negative: none comes

    def reset(self, *, seed: int | None = None, **options: Any) -> Any:
        if self.left is None:
            self.left = int(np.random.default_rng(seed).integers(1, self.limit + 1))
        else:
            self.left = -1
        return super().reset(seed=seed, **options)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        assert self.left is not None, "reset() comes first"
        self.left -= 1
        return observation, reward, terminated, truncated or self.left == 0, info
