"""Training and testing with every kind of model, observation and action."""

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


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def train_and_test(savedir, *, num_games, **flags):
    """Trains UPDATES times; returns the model's state and the games of test mode.

    A game is (return, steps).
    """
    runs.run(savedir, "a", **{**TINY, **flags})
    rows = runs.read_logs(savedir, "a")
    assert len(rows) == UPDATES
    for row in rows:
        losses = [float(row[name]) for name in row if name.endswith("_loss")]
        assert len(losses) == 4
        assert all(map(math.isfinite, losses))
        assert float(row["grad_norm"]) > 0
    output = runs.run(savedir, "a", mode="test", num_test_episodes=num_games)
    games = [
        (float(value), int(steps))
        for value, steps in re.findall(r"return (-?\d+\.\d+) after (\d+) steps", output)
    ]
    assert len(games) == num_games
    saved = torch.load(savedir / "a" / "model.tar", weights_only=True)
    return saved["model_state_dict"], games


@pytest.mark.parametrize(
    ("env", "model", "use_lstm"),
    [
        ("MinAtar/Breakout-v1", "shallow", None),
        ("PongNoFrameskip-v4", "shallow", True),
        ("PongNoFrameskip-v4", "deep", None),
        ("MinAtar/Breakout-v1", "deep", True),
    ],
)
def test_images(tmp_path, env, model, use_lstm):
    if env.startswith("MinAtar"):
        pytest.importorskip("minatar")
    state, games = train_and_test(
        tmp_path, num_games=2, env=env, model=model, use_lstm=use_lstm
    )
    convolutions = [name for name, x in state.items() if x.ndim == 4]
    blocks_deep = 3 * (1 + 2 * 2)
    layers_shallow = 3 if env.startswith("Pong") else 2
    assert len(convolutions) == (blocks_deep if model == "deep" else layers_shallow)
    assert any(name.startswith("core.") for name in state) == bool(use_lstm)
    if env.startswith("Pong"):
        assert [steps for _, steps in games] == [400 // 4] * 2


def test_tuple_observation_and_actions_from_one(tmp_path):
    state, games = train_and_test(tmp_path, num_games=3, env="environments:Recall")
    weight = state["vector.layers.0.weight"]
    assert weight.shape[1] == 4 + 4  # one-hot digit, steps left
    assert state["policy.weight"].shape[0] == 3
    for value, steps in games:
        assert steps == 4
        assert value in (0.0, 1.0)
