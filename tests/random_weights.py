"""The flags of a command line, and random weights of their model."""

import contextlib

import torch

from torchbeast import monobeast
from torchbeast.envs.environment import Environment
from torchbeast.model import make_model


def make_flags(*words):
    return monobeast.make_flags(words)


def make_weights(flags):
    """With these weights, actions have different probabilities."""
    torch.manual_seed(3)
    with contextlib.closing(Environment(flags, None)) as env:
        spaces = env.observation_space, env.action_space
    model = make_model(flags, *spaces, torch.device("cpu"))
    torch.nn.init.normal_(model.policy.weight, std=0.1)
    return model.state_dict()
