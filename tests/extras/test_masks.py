"""--mask_actions: masks in the environment's info."""

import numpy as np
import pytest
from gymnasium import spaces
from small_envs import env_flags
from test_action_masks import MODULES, InDict, check_a_run

from torchbeast.envs.environment import Environment
from torchbeast.envs.values import InvalidEnvironmentError
from torchbeast.extras.envs.masks import MaskFromInfo


class InInfo(InDict):
    observation_space = spaces.Box(0, 1, (3,))
    terminates = True

    def draw(self):
        parts, _ = super().draw()
        return parts["vector"], {"action_mask": parts["action_mask"]}


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


@pytest.mark.parametrize(
    ("module", "name", "highest", "lowest"),
    [(MODULES[0], "Several", 0, 0), (MODULES[1], "InInfo", np.log(2), 0.6)],
)
def test_a_forbidden_action_is_never_taken(tmp_path, name, highest, lowest, module):
    bounds = highest, lowest
    check_a_run(tmp_path, module, f"{__name__}:{name}", *bounds, mask_actions=True)


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


@pytest.mark.parametrize(
    ("name", "arguments", "match"),
    [
        ("Wrong", '{"mask": 3}', r"no action_mask in \{'mask': 3\}"),
        ("Wrong", '{"action_mask": [1, 1, 0, 0]}', r"int8 \[4\] as .*MultiBinary\(5\)"),
        ("NoChoices", None, "Only Discrete and MultiDiscrete"),
    ],
)
def test_masks_that_do_not_fit_the_actions(name, arguments, match):
    env = f"{__name__}:{name}"
    flags = env_flags(env, env_kwargs=arguments, mask_actions=True)
    with pytest.raises(InvalidEnvironmentError, match=match):
        Environment(flags, 1).initial()
