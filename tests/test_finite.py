import math

import numpy as np
import torch

from torchbeast.core.finite import find_cause
from torchbeast.envs.extra_fields import EXTRA_FIELDS, ExtraField

T, B = 5, 3


def make_batch():
    return {
        "reward": torch.ones(T + 1, B),
        "observation": {
            "map": torch.zeros(T + 1, B, 4, 7, dtype=torch.uint8),
            "vector": (torch.zeros(T + 1, B, 2),),
            "nothing": torch.zeros(T + 1, B, 0),
        },
    }


def test_the_cause_of_a_loss_that_is_not_finite(monkeypatch):
    batch = make_batch()
    assert "The cause is the update" in find_cause(batch)
    batch["reward"][2, 1] = float("nan")
    batch["reward"][3, 1] = float("inf")
    assert "the reward is nan" in find_cause(batch)
    assert "observation" not in find_cause(batch)
    batch = make_batch()
    batch["observation"]["vector"][0][1, 2, :] = -float("inf")
    cause = find_cause(batch)
    assert "the observation['vector'][0] is -inf" in cause
    assert "reward" not in cause
    monkeypatch.setitem(EXTRA_FIELDS, "goal", ExtraField((2,), np.float32, of="step"))
    batch = make_batch() | {"goal": torch.zeros(6, 3, 2)}
    batch["goal"][1, 2, 0] = math.nan
    assert "the goal is nan" in find_cause(batch)
    batch = make_batch() | {"truncation_value": torch.full((6, 3), math.nan)}
    assert "the environment: an episode's last observation" in find_cause(batch)


def test_values_that_are_too_large():
    batch = make_batch()
    batch["reward"][2, 1] = 1e38
    assert "the reward is 1e+38" in find_cause(batch)
    batch = make_batch()
    batch["observation"]["vector"][0][1, 2, 1] = -1e30
    assert "vector'][0] is -1e+30" in find_cause(batch)
