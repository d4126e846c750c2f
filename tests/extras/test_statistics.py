"""Wrappers with running statistics, which no checkpoint has."""

import gymnasium
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
    for index in (0, 8):  # the second one says nothing
        example_environment(flags, index).close()
    found = [x.getMessage() for x in caplog.records]
    assert len(found) == (flag is not None)
    assert all(f"has a {wrapper}" in x and f"Use {flag}," in x for x in found)


def several(num_envs):
    envs = gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="sync")
    return gymnasium.wrappers.vector.NormalizeObservation(envs)


def test_a_vector_environment(caplog):
    example_environment(env_flags(f"{__name__}:several", envs_per_actor=2)).close()
    assert "has a NormalizeObservation" in caplog.text
