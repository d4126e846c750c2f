"""A wrapper for MiniGrid: pip install minigrid."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation
from minigrid.wrappers import ImgObsWrapper, OneHotPartialObsWrapper


def planes(env: gym.Env) -> gym.Env:
    """The agent's view, with a plane of 0 and 1 per object, colour and state.

    OneHotPartialObsWrapper declares that they go up to 255, and networks would divide
    by that.
    """
    env = ImgObsWrapper(OneHotPartialObsWrapper(env))
    space: Any = spaces.Box(0, 1, env.observation_space.shape, np.uint8)
    return TransformObservation(env, lambda x: x, space)
