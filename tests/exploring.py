"""Methods for --explorer that tests name."""

import torch

from examples.exploration.common import EpisodicCounts
from torchbeast.extras.explorer.method import Explored, ExplorerActor, Method


class Watcher(Method):
    """Rewards nothing; its columns say what the actors have counted."""

    def __init__(self, observation_space, distribution):
        super().__init__()
        self.actor = EpisodicCounts(observation_space, buckets=64)

    def explore(self, rows, valid):
        counts = rows["episodic_count"]
        shown = rows["observation"].float()
        told = {"counts": counts[1:].flatten(), "shown": shown[1:].flatten()}
        return Explored(torch.zeros_like(rows["reward"][1:]), None, None, told)


class Guide(ExplorerActor):
    """Tells the policy the right button of CombinationLock, which it learned."""

    def __init__(self, number):
        super().__init__()
        self.right = torch.nn.Parameter(torch.zeros(number))

    def act(self, rows, state):
        return {"hint": self.right[rows["observation"]].detach()}, state

    def features(self, rows):
        return rows["hint"].reshape(-1, 1)


class Teacher(Method):
    """Learns by its own optimizer that everything is 3; needs a value head."""

    value_head = True

    def __init__(self, observation_space, distribution, discount=0.5):
        super().__init__()
        self.discount = discount
        self.actor = Guide(int(observation_space.n))
        self.actor.register_buffer("mask", torch.full((2,), -torch.inf))

    def make_optimizer(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)

    def explore(self, rows, valid):
        loss = (self.actor.right - 3).square().sum()
        reward = rows["hint"][1:]
        discount = torch.full_like(reward, self.discount)
        return Explored(reward, discount, loss, {"hint": reward.mean()})


class Broken(Method):
    """Its reward is not a number once it has been asked thirty times."""

    def __init__(self, observation_space, distribution):
        super().__init__()
        self.asked = 0

    def explore(self, rows, valid):
        self.asked += 1
        reward = torch.zeros_like(rows["reward"][1:])
        return Explored(reward / (0 if self.asked > 30 else 1), None, None, {})


class Steep(Method):
    """Its loss is 0, and the gradient of its loss is not a number."""

    def __init__(self, observation_space, distribution):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def explore(self, rows, valid):
        reward = torch.zeros_like(rows["reward"][1:])
        return Explored(reward, None, self.weight.square().sqrt(), {})
