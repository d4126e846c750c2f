"""Options that were each tested alone, together: most pairs are in one of the runs.

A run is trained, resumed and tested, as a user does it.
"""

import json
import math
import random

import pytest
import runs

REPLAY = {"replay_size": 300, "replay_ratio": 1.5, "learn_start": 60}
METHODS = ["counts:Counts", "rnd:RND", "noveld:NovelD", "e3b:E3B"]
OPTIONS = {
    "environment": [
        {"env": f"environments:{name}"}
        for name in ("GridWorld", "Locks", "Steering", "Corridor")
    ],
    "core": [{}, {"use_lstm": True}, {"use_lstm": True, "core": "gru"}],
    "explorer": [{}, *({"explorer": f"examples.exploration.{x}"} for x in METHODS)],
    "rewards": [{}, {"normalize_rewards": True}],
    "observations": [{}, {"normalize_observations": True}, {"layer_norm": True}],
    "loss": [
        {"trace_decay": 0.9, "final_entropy_cost": 0},
        {"clip_ratio": 0.2, "normalize_advantages": True, "updates_per_batch": 3},
        {"minibatches": 2, "updates_per_batch": 2, "optimizer": "adam"},
    ],
    "replay": [{}, REPLAY, {**REPLAY, "save_replay": True}],
    "rollouts": [{}, {"rollouts": "episode"}],
    "precision": [{"precision": "fp32"}, {"precision": "bf16"}],
    "order": [{}, {"sync": True}, {"record": True, "num_learner_threads": 2}],
    "variant": [{}, {"module": "torchbeast.polybeast", "num_servers": 2}],
}


def flags_of(choice):
    """The flags of a choice, without those that are refused together."""
    flags = {**runs.SMALL, "batch_size": 6, "checkpoint_interval": "inf"}
    for part in choice.values():
        flags |= part
    if "num_servers" in flags:
        del flags["num_actors"]
        flags.pop("record", None)  # MonoBeast's
    if "replay_size" in flags:
        flags |= {"num_learner_threads": None, "minibatches": None}
    if flags.get("sync") and ("replay_size" in flags or "num_servers" in flags):
        flags |= {"disable_checkpoint": True, "save_replay": None}
    return flags


# With these, 16 runs have 440 of the 460 pairs of options.
SEEDS = [2551, 3940, 2554, 2940, 3481, 1046, 1150, 3330]
SEEDS += [1776, 1483, 3941, 3429, 1408, 2972, 3978, 2647]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_train_resume_and_test(tmp_path, seed):
    chance = random.Random(seed)
    flags = flags_of({name: chance.choice(x) for name, x in OPTIONS.items()})
    module = flags.get("module", "torchbeast.monobeast")
    runs.run(tmp_path, "a", **flags)
    assert_learned(runs.read_logs(tmp_path, "a"), 600)
    if flags.get("disable_checkpoint"):
        return
    runs.run(tmp_path, "a", module=module, total_steps=900)
    assert_learned(runs.read_logs(tmp_path, "a"), 900)
    again = {"mode": "test", "num_test_episodes": 2}
    runs.run(tmp_path, "a", module=module, **again)
    assert len(json.loads((tmp_path / "a" / "test.json").read_text())["returns"]) == 2
    if flags.get("record"):
        words = runs.command(tmp_path, "again", "torchbeast.tools.repeat")
        output = runs.run_words([*words[:3], "a", *words[3:]])
        assert "Equal to the recorded run" in output


def assert_learned(rows, steps):
    """The rows are those of so many steps, and all losses are numbers."""
    assert int(rows[-1]["step"]) >= steps
    losses = [float(row["total_loss"]) for row in rows if row.get("total_loss")]
    assert len(losses) > 3
    assert all(map(math.isfinite, losses))
