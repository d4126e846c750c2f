"""Games of several agents, in PettingZoo's parallel API: --env agent_games:Fading."""

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv


class Fading(ParallelEnv):
    """Three agents whose games end at different times; "c" is truncated.

    An agent observes the step, and what its last action was. All arrays are used again.

    Args:
      late: "b" comes at step 2, and not at all in every third game.
      masked: "observation" gets a neighbour "action_mask"; "info": the info has one.
    """

    possible_agents = ("a", "b", "c")
    render_mode = None

    def __init__(self, late=False, masked=""):
        self.late, self.masked = late, masked
        self.arrays = {x: np.zeros(2, np.float32) for x in self.possible_agents}
        self.games = 0

    def observation_space(self, agent):
        numbers = spaces.Box(0, 99, (2,))
        if self.masked != "observation":
            return numbers
        mask = spaces.MultiBinary(4)
        return spaces.Dict({"numbers": numbers, "action_mask": mask})

    def action_space(self, agent):
        return spaces.Discrete(4, start=3)

    def reset(self, seed=None, options=None):
        random = np.random.default_rng(seed)
        self.lives = dict(zip("abc", random.integers(3, 9, 3), strict=True))
        self.skips = seed % 3 == 0
        self.steps = 0
        self.agents = ["a", "c"] if self.late else ["a", "b", "c"]
        return self._results(dict.fromkeys(self.agents, 0))

    def _results(self, actions):
        observations, infos = {}, {}
        for agent, action in actions.items():
            self.arrays[agent][:] = self.steps, action
            observations[agent], infos[agent] = self.arrays[agent], {}
            mask = np.ones(4, np.int8)
            mask[self.steps % 4] = 0
            if self.masked == "observation":
                parts = {"numbers": self.arrays[agent], "action_mask": mask}
                observations[agent] = parts
            elif self.masked:
                infos[agent] = {"action_mask": mask}
        return observations, infos

    def step(self, actions):
        assert list(actions) == self.agents
        assert all(x in self.action_space(agent) for agent, x in actions.items())
        self.steps += 1
        rewards = {x: float(actions[x] * (ord(x) - 96)) for x in self.agents}
        ended = {x: self.steps >= self.lives[x] for x in self.agents}
        both = self.lives["c"] % 2 == 0  # then "c" is terminated, too
        terminated = {x: ended[x] and (both or x != "c") for x in self.agents}
        truncated = {x: ended[x] and x == "c" for x in self.agents}
        self.agents = [x for x in self.agents if not ended[x]]
        if self.late and self.steps == 2 and not self.skips:
            self.agents = sorted([*self.agents, "b"])
            actions = {**actions, "b": 0}
            rewards["b"], terminated["b"], truncated["b"] = 0.0, False, False
        observations, infos = self._results(actions)
        return observations, rewards, terminated, truncated, infos


class Split(ParallelEnv):
    """Both get 1 if "left" takes action 0 and "right" action 1, for 8 steps.

    They observe the same, so only an agent that knows who it is can do it each time:
    chance gives 2, and the best policy that does not know it gives 2, too.
    """

    possible_agents = ("left", "right")
    render_mode = None

    def observation_space(self, agent):
        return spaces.Box(0, 1, (3,))

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.steps = ["left", "right"], 0
        return self._all(np.ones(3, np.float32)), self._all({})

    def _all(self, x):
        return dict.fromkeys(self.possible_agents, x)

    def step(self, actions):
        self.steps += 1
        over = self.steps == 8
        reward = float(actions["left"] == 0 and actions["right"] == 1)
        if over:
            self.agents = []
        results = np.ones(3, np.float32), reward, over, False, {}
        return tuple(map(self._all, results))


class Uneven(Split):
    """One agent observes more than the other."""

    def observation_space(self, agent):
        return spaces.Box(0, 1, (3 if agent == "left" else 5,))


class UnevenActions(Split):
    def action_space(self, agent):
        return spaces.Discrete(2 if agent == "left" else 3)


class Faulty(Split):
    """Something is wrong with what it returns."""

    def __init__(self, fault):
        self.fault = fault
        names = {"nobody": [], "twice": ["left", "left"]}
        self.possible_agents = names.get(fault, ["left", "right"])

    def action_space(self, agent):
        return None if self.fault == "no space" else super().action_space(agent)

    def reset(self, seed=None, options=None):
        observations, infos = super().reset()
        if self.fault == "empty":
            self.agents = []
        return observations, infos

    def step(self, actions):
        *results, infos = super().step(actions)
        if self.fault in ("missing", "leaves"):
            del results[1]["right"]
        if self.fault == "leaves":
            self.agents = ["left"]
        if self.fault == "shape":
            results[0]["right"] = np.ones(4, np.float32)
        if self.fault == "stays":
            results[2]["left"] = True
        return (*results, infos)


def annotated() -> ParallelEnv:
    return Split()


def not_annotated():
    return Split()


def lying() -> ParallelEnv:
    return AECEnv()


def identity(env, env_index, scale=1):
    """A wrapper."""
    env.scale, env.number = scale, env_index
    return env
