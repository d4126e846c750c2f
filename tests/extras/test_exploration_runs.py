"""Real runs with the methods of examples/exploration."""

import pytest
import runs
import torch
from test_exploration_methods import NAMES
from test_polybeast_sync import assert_logs_agree

ALL = {
    **NAMES,
    "counts": "examples.exploration.counts:Counts",
    "rnd": "examples.exploration.rnd:RND",
}
SYNC = {
    **runs.SMALL,
    "env": "environments:GridWorld",
    "sync": True,
    "unroll_length": 20,
    "learning_rate_schedule": "constant",
    "total_steps": 6 * 20 * 8,
}
# Here goals are reached by chance.
SHORT = {"env": "environments:Corridor", "env_kwargs": '{"length": 5}'}


@pytest.mark.parametrize("name", ALL)
def test_runs_are_equal_and_go_on(tmp_path, name):
    """In both variants. What waits for the teacher is in the checkpoint, too."""
    flags = {**SYNC, "explorer": ALL[name]}
    if name == "amigo":
        flags |= SHORT
    runs.run(tmp_path, "whole", **flags)
    whole = runs.logs(tmp_path, "whole")
    assert len(whole) == 24
    rewards = [float(row["mean_intrinsic_reward"]) for row in whole]
    assert sum(x > 0 for x in rewards) > 4
    losses = [float(row["explorer_loss"]) for row in whole if row.get("explorer_loss")]
    assert len(losses) > 4 or name == "counts"
    half = flags | {"total_steps": flags["total_steps"] // 2}
    runs.run(tmp_path, "parts", **half)
    assert "Resuming" in runs.run(tmp_path, "parts", **flags)
    assert runs.logs(tmp_path, "parts") == whole
    if losses:
        saved = torch.load(tmp_path / "whole" / "model.tar", weights_only=True)
        states = saved["explorer_state_dict"]["optimizer"]["state"].values()
        assert {int(x["step"]) for x in states} == {len(losses)}
    flags |= {"module": "torchbeast.polybeast", "num_servers": 2}
    flags |= {"pipes_basename": f"unix:{tmp_path}/pipe", "disable_checkpoint": True}
    runs.run(tmp_path, "poly", **flags)
    poly = runs.logs(tmp_path, "poly")
    assert_logs_agree(whole, poly)


@pytest.mark.parametrize("name", ["ride", "amigo"])  # test_combinations has the others
def test_a_run_with_replay_of_episodes(tmp_path, name):
    flags = {**runs.SMALL, "env": SYNC["env"], "rollouts": "episode", "use_lstm": True}
    flags |= {"replay_size": 500, "replay_ratio": 1.5, "learn_start": 100}
    runs.run(tmp_path, "a", **flags, explorer=ALL[name])
    rows = [x for x in runs.read_logs(tmp_path, "a") if x.get("total_loss")]
    assert len(rows) > 20
    assert any(float(row["mean_intrinsic_reward"]) > 0 for row in rows)
