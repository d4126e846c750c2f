"""Masks of actions in the observation: in acting, in the learner, in evaluation."""

import gymnasium
import numpy as np
import pytest
import runs
import torch
from gymnasium import spaces
from small_envs import env_flags, here

from torchbeast.core.distributions import make_distribution
from torchbeast.envs.environment import Environment
from torchbeast.envs.values import InvalidEnvironmentError


class InDict(gymnasium.Env):
    """Games of 7 steps. Raises if a forbidden action is taken; allows two at a time."""

    observation_space = spaces.Dict(
        {
            "action_mask": spaces.Box(0, 1, (5,), np.int8),
            "vector": spaces.Box(0, 1, (3,)),
        }
    )
    action_space = spaces.Discrete(5, start=2)
    terminates = False

    def draw(self):
        """A new mask, and an observation that says nothing of it."""
        self.allowed = np.zeros(5, np.int8)
        self.allowed[self.np_random.choice(5, 2, replace=False)] = 1
        return {"action_mask": self.allowed, "vector": np.zeros(3, np.float32)}, {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.draw()

    def check(self, action):
        assert self.allowed[action - 2], f"{action} is forbidden: {self.allowed}"

    def step(self, action):
        self.check(action)
        self.steps += 1
        observation, info = self.draw()
        over = self.steps == 7
        return observation, 1.0, over and self.terminates, over, info


def check_a_run(tmp_path, module, env, highest, lowest, **flags):
    """Trains and tests; the environment raises if an action is forbidden."""
    flags |= {**runs.SMALL, "module": module, "batch_size": 3, "env": env}
    runs.run(tmp_path, "a", **flags)
    entropy = float(runs.read_logs(tmp_path, "a")[0]["entropy"])
    assert lowest <= entropy <= highest + 1e-6
    output = runs.run(tmp_path, "a", module=module, mode="test", num_test_episodes=30)
    assert "30 games: mean return 7.00" in output


MODULES = ["torchbeast.monobeast", "torchbeast.polybeast"]


@pytest.mark.parametrize("module", MODULES)
def test_a_forbidden_action_is_never_taken(tmp_path, module):
    # A policy over two of the actions has at most log 2.
    check_a_run(tmp_path, module, here(InDict), np.log(2), 0.6, use_lstm=True)


def test_a_mask_that_forbids_all_has_no_effect():
    logits = torch.tensor([[0.5, 1.0, 2.0]] * 2)
    allowed = torch.tensor([[True, True, False], [False, False, False]])
    masked = make_distribution(spaces.Discrete(3)).mask(logits, allowed)
    assert masked.tolist() == [[0.5, 1.0, -torch.inf], [0.5, 1.0, 2.0]]


class WrongSize(InDict):
    action_space = spaces.Discrete(6)


def test_a_mask_that_does_not_fit_the_actions():
    with pytest.raises(InvalidEnvironmentError, match="need 6 numbers"):
        Environment(env_flags(here(WrongSize)), 1).initial()
