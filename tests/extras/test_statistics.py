"""Wrappers with running statistics, which no checkpoint has."""

import pytest
from small_envs import env_flags

from torchbeast.envs.environment import example_environment


@pytest.mark.parametrize(
    ("wrapper", "flag"),
    [
        ("NormalizeObservation", "--normalize_observations"),
        ("NormalizeReward", "--normalize_rewards"),
        ("ClipReward", None),
    ],
)
def test_one_warning_of_each(caplog, wrapper, flag):
    flags = env_flags("CartPole-v1", wrapper=f"gymnasium.wrappers:{wrapper}")
    if wrapper == "ClipReward":
        flags.wrapper += '{"max_reward": 1}'
    example_environment(flags).close()
    found = [x.getMessage() for x in caplog.records]
    assert len(found) == (flag is not None)
    assert all(f"has a {wrapper}" in x and f"Use {flag}," in x for x in found)
