"""Masks of actions: in acting, in the learner, in evaluation."""

import gymnasium
import numpy as np
import pytest
import runs
import torch
from gymnasium import spaces
from small_envs import env_flags

from torchbeast.core.distributions import make_distribution
from torchbeast.envs.environment import Environment
from torchbeast.envs.values import InvalidEnvironmentError, MaskFromInfo


class InInfo(gymnasium.Env):
    """Games of 7 steps. Raises if a forbidden action is taken; allows two at a time."""

    observation_space = spaces.Box(0, 1, (3,))
    action_space = spaces.Discrete(5, start=2)

    def draw(self):
        """A new mask, and an observation that says nothing of it."""
        self.allowed = np.zeros(5, np.int8)
        self.allowed[self.np_random.choice(5, 2, replace=False)] = 1
        return np.zeros(3, np.float32), {"action_mask": self.allowed}

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

    terminates = True


class InDict(InInfo):
    """The same with the mask in the observation; truncated games."""

    terminates = False
    observation_space = spaces.Dict(
        {
            "action_mask": spaces.Box(0, 1, (5,), np.int8),
            "vector": spaces.Box(0, 1, (3,)),
        }
    )

    def draw(self):
        observation, _ = super().draw()
        return {"action_mask": self.allowed, "vector": observation}, {}


class Several(InInfo):
    """Two choices; the mask is a tuple, as for MultiDiscrete.sample."""

    action_space = spaces.MultiDiscrete([3, 4])

    def draw(self):
        self.masks = tuple(
            np.eye(n, dtype=np.int8)[self.np_random.integers(n)] for n in (3, 4)
        )
        return np.zeros(3, np.float32), {"action_mask": self.masks}

    def check(self, action):
        for mask, choice in zip(self.masks, action, strict=True):
            assert mask[choice], f"{action} is forbidden: {self.masks}"


FLAGS = {
    "InInfo": {"mask_actions": True},
    "InDict": {"use_lstm": True},
    "Several": {"mask_actions": True},
}


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("module", ["torchbeast.monobeast", "torchbeast.polybeast"])
def test_a_forbidden_action_is_never_taken(tmp_path, name, module):
    """Neither in training nor in a test; the environments raise."""
    flags = {**runs.SMALL, "module": module, "batch_size": 3}
    flags |= {"env": f"test_action_masks:{name}", **FLAGS[name]}
    runs.run(tmp_path, "a", **flags)
    rows = runs.read_logs(tmp_path, "a")
    if name == "Several":
        assert {float(row["entropy"]) for row in rows} == {0.0}, "one is allowed"
    else:
        # A policy over two of the actions has at most log 2.
        assert 0.6 < float(rows[0]["entropy"]) <= np.log(2) + 1e-6
    output = runs.run(tmp_path, "a", module=module, mode="test", num_test_episodes=30)
    assert "30 games: mean return 7.00" in output


def test_a_mask_that_forbids_all_has_no_effect():
    logits = torch.tensor([[0.5, 1.0, 2.0]] * 2)
    allowed = torch.tensor([[True, True, False], [False, False, False]])
    masked = make_distribution(spaces.Discrete(3)).mask(logits, allowed)
    assert masked.tolist() == [[0.5, 1.0, -torch.inf], [0.5, 1.0, 2.0]]


class Wrong(InInfo):
    def __init__(self, **info):
        self.info = info

    def draw(self):
        return np.zeros(3, np.float32), self.info


def test_the_mask_is_that_of_the_info():
    env = MaskFromInfo(Wrong(action_mask=[True, 0, 2.5, 0, 0]))
    observation, _ = env.reset()
    assert observation["action_mask"].tolist() == [1, 0, 1, 0, 0]
    assert env.observation_space.contains(observation)


class NoChoices(InInfo):
    action_space = spaces.Box(-1, 1, (5,))


class WrongSize(InDict):
    action_space = spaces.Discrete(6)


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("Wrong", {"mask_actions": True}, r"no action_mask in \{'mask': 3\}"),
        (
            "Wrong",
            {"mask_actions": True, "env_kwargs": '{"action_mask": [1, 1, 0, 0]}'},
            r"int8 \[4\] as .*MultiBinary\(5\)",
        ),
        ("NoChoices", {"mask_actions": True}, "Only Discrete and MultiDiscrete"),
        ("WrongSize", {}, "need 6 numbers"),
    ],
)
def test_masks_that_do_not_fit_the_actions(name, changes, match):
    arguments = {"env_kwargs": '{"mask": 3}'} if name == "Wrong" else {}
    flags = env_flags(f"test_action_masks:{name}", **{**arguments, **changes})
    with pytest.raises(InvalidEnvironmentError, match=match):
        Environment(flags, 1).initial()
