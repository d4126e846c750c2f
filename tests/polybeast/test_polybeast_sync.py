"""--sync: PolyBeast makes the same updates as MonoBeast."""

import pytest
import runs

SYNC = {
    "num_actors": 2,
    "envs_per_actor": 3,
    "batch_size": 2,
    "unroll_length": 7,
    "total_steps": 6 * 7 * 40,
    "precision": "fp32",
    "torch_threads": 1,
    "reward_clipping": "none",
    "sync": True,
    "disable_checkpoint": True,
}

WITH_STATE = {
    "use_lstm": True,
    "normalize_observations": True,
    "normalize_rewards": True,
    "updates_per_batch": 2,
    "minibatches": 2,
    "max_policy_lag": 3,  # older: the last of three batches, and each row 0
}


def assert_logs_agree(mono, poly, tolerance=1e-5):
    """Steps, episodes and games are equal, floats nearly.

    Sums may be added up in another order if threads or the alignment of memory
    differ, so floats may differ in their last digits, and the differences grow from
    update to update: hence the tolerance. Steps, episodes and games may not differ: one
    other action would change them. frac_rho_above_1 is left out: the last digit decides
    whether a ratio is above 1 if the policy is the one that acted.
    """
    assert len(mono) == len(poly)
    for row, other in zip(mono, poly, strict=True):
        for name, value in row.items():
            if value == other[name] or name == "frac_rho_above_1":
                continue
            assert float(other[name]) == pytest.approx(
                float(value), rel=1e-3, abs=tolerance
            ), (name, row["step"])


@pytest.mark.parametrize(
    ("env", "rounds", "more"),
    [
        ("MountainCar-v0", 40, {}),
        ("MountainCar-v0", 40, WITH_STATE),
        pytest.param("MinAtar/Breakout-v1", 15, {}, marks=pytest.mark.slow),
    ],
    ids=["plain", "with_state", "images"],
)
def test_sync_gives_monobeasts_updates(tmp_path, env, rounds, more):
    """With truncated episodes (MountainCar's, after 200 steps) and convolutions."""
    flags = {**SYNC, "env": env, "total_steps": 6 * 7 * rounds, **more}
    runs.run(tmp_path, "mono", **flags)
    flags |= {
        "module": "torchbeast.polybeast",
        "pipes_basename": f"unix:{tmp_path}/pipe",
    }
    runs.run(tmp_path, "poly", **flags, num_servers=2)
    mono = runs.logs(tmp_path, "mono")
    poly = runs.logs(tmp_path, "poly")
    assert len(mono) == 3 * rounds
    assert int(mono[-1]["episodes"]) > 5
    assert_logs_agree(mono, poly)


@pytest.mark.slow
def test_a_forks_fields_and_dropout_are_the_same_in_both(tmp_path, monkeypatch):
    """edited.py raises if a row has the field of another episode.

    With Dropout, only a model that acts in eval mode and learns in train mode gives the
    same updates in both variants.
    """
    flags = {
        **SYNC,
        "module": "edited",
        "env": "environments:Goals",
        "use_lstm": True,
        "total_steps": 6 * 7 * 10,
    }
    runs.run(tmp_path, "mono", **flags)
    monkeypatch.setenv("VARIANT", "torchbeast.polybeast.start")
    flags |= {"pipes_basename": f"unix:{tmp_path}/pipe", "num_servers": 2}
    runs.run(tmp_path, "poly", **flags)
    mono = runs.logs(tmp_path, "mono")
    poly = runs.logs(tmp_path, "poly")
    assert len(mono) == 30
    assert sum(float(row["starts"]) for row in mono) > 50
    assert_logs_agree(mono, poly)
