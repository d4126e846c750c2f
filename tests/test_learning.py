"""A short check that the agent learns; it fails if the algorithm is broken."""

import json
import subprocess
import sys

import pytest
import runs


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kept_run_of_cartpole_comes_out_the_same():
    """Each digit of it; a random policy keeps the pole up for 22 steps, it for 257."""
    words = [sys.executable, runs.ROOT / "benchmarks" / "exact_run.py"]
    limit = {"timeout": runs.patience(400)}
    done = subprocess.run(words, capture_output=True, text=True, **limit)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_steering_is_learned_with_the_preset_mujoco(tmp_path):
    """Continuous actions, normalized observations and rewards, minibatches.

    A random policy has 1.4, and 9 is the most that is possible.
    """
    flags = {"preset": "mujoco", "env": "environments:Steering", "sync": True}
    flags |= {"envs_per_actor": 32, "total_steps": 24_000}
    runs.run(tmp_path, "a", timeout=380, **flags)
    rows = runs.read_logs(tmp_path, "a")
    assert float(rows[-1]["mean_game_return_100"]) > 4


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_recall_is_learned_with_an_lstm(tmp_path):
    """The agent has to name the digit of three steps before; chance gives 1/3."""
    flags = {
        "env": "environments:Recall",
        "use_lstm": True,
        "num_actors": 2,
        "envs_per_actor": 4,
        "unroll_length": 10,
        "optimizer": "adam",
        "learning_rate": 0.001,
        "epsilon": 0.00001,
        "total_steps": 20_000,
        "sync": True,
    }
    runs.run(tmp_path, "a", timeout=380, **flags)
    rows = runs.read_logs(tmp_path, "a")
    assert float(rows[-1]["mean_game_return_100"]) > 0.8
    # A test needs the state of the LSTM, too.
    runs.run(tmp_path, "a", mode="test", num_test_episodes=100)
    assert json.loads((tmp_path / "a" / "test.json").read_text())["mean"] > 0.7
