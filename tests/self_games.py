"""A wrapper of self-play that says who played whom."""

import json
import os
from pathlib import Path

import gymnasium


class Told(gymnasium.Wrapper):
    """Appends a line per game to a file of its process: [opponent, reward]."""

    def __init__(self, env, folder):
        super().__init__(env)
        self.folder = Path(folder)

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            # The first reset() of an environment only finds out about its API.
            line = [int(observation["opponent"]), reward]
            with (self.folder / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        return observation, reward, terminated, truncated, info
