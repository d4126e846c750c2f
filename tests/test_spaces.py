"""Training and testing with every kind of model on images."""

import math
import re

import pytest
import runs
import torch

TINY = {
    **runs.SMALL,
    "num_actors": 1,
    "max_episode_frames": 400,  # of Pong
    "total_steps": 50,
}
UPDATES = TINY["total_steps"] // (TINY["batch_size"] * TINY["unroll_length"])


@pytest.mark.parametrize(
    ("env", "model", "use_lstm", "layers"),
    [
        ("MinAtar/Breakout-v1", "shallow", None, 2),
        ("PongNoFrameskip-v4", "shallow", True, 3),
        ("MinAtar/Breakout-v1", "deep", True, 3 * (1 + 2 * 2)),
    ],
)
def test_images(tmp_path, monkeypatch, env, model, use_lstm, layers):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if env.startswith("MinAtar"):
        pytest.importorskip("minatar")
    runs.run(tmp_path, "a", **{**TINY, "env": env}, model=model, use_lstm=use_lstm)
    rows = runs.read_logs(tmp_path, "a")
    assert len(rows) == UPDATES
    assert all(math.isfinite(float(row["total_loss"])) for row in rows)
    assert all(float(row["grad_norm"]) > 0 for row in rows)
    output = runs.run(tmp_path, "a", mode="test", num_test_episodes=2)
    steps = re.findall(r"return -?\d+\.\d+ after (\d+) steps", output)
    assert len(steps) == 2
    assert not env.startswith("Pong") or steps == ["100"] * 2
    saved = torch.load(tmp_path / "a" / "model.tar", weights_only=True)
    state = saved["model_state_dict"]
    assert sum(x.ndim == 4 for x in state.values()) == layers
    assert any(name.startswith("core.") for name in state) == bool(use_lstm)
