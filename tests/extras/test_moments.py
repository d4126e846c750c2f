import numpy as np
import pytest
import runs
import torch
from gymnasium import spaces
from nets import make_net, make_rows

from torchbeast import load_agent, monobeast
from torchbeast.base.errors import FlagError
from torchbeast.extras.moments.running import RunningMoments

T, B, D = 6, 3, 4
GAMMA = 0.8
MIXED = spaces.Dict(
    {
        "body": spaces.Box(-np.inf, np.inf, (D,), np.float64),
        "camera": spaces.Box(0, 255, (8, 9, 3), np.uint8),
        "floor": spaces.Discrete(5, start=2),
        "height": spaces.Box(-1, 1, (), np.float32),
        "keys": spaces.MultiBinary(2),
        "open": spaces.Box(0, 1, (2,), np.int8),
        "score": spaces.Box(0, 10_000, (2,), np.int32),
    }
)
ACTIONS = spaces.Discrete(7)


def test_moments_are_those_of_all_values():
    rng = np.random.default_rng(1)
    values = 5 + 3 * rng.normal(size=(500, 2, D)).astype(np.float32)
    moments = RunningMoments((2, D))
    for part in np.split(values, [1, 40, 41, 300]):
        moments.update(torch.from_numpy(part))
    assert moments.count == 500
    np.testing.assert_allclose(moments.mean, values.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.variance, values.var(0), rtol=1e-4)
    scaled = moments(torch.from_numpy(values))
    wanted = (values - values.mean(0)) / values.std(0)
    np.testing.assert_allclose(scaled, wanted, rtol=1e-3, atol=1e-4)
    assert moments(torch.full((2, D), 1e6)).max() == 10  # clipped


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_not_finite_counts_as_the_mean(bad):
    values = torch.randn(20, D)
    moments, expected = RunningMoments((D,)), RunningMoments((D,))
    moments.update(values)
    expected.update(values)
    for _ in range(2):
        more = torch.randn(3, D)
        more[0, 2] = expected.mean[2]
        expected.update(more)
        more[0, 2] = bad
        moments.update(more)
    assert moments.state_dict().keys() == expected.state_dict().keys()
    for name, x in expected.state_dict().items():
        assert torch.equal(moments.state_dict()[name], x), name


def test_numbers_are_normalized_and_nothing_else():
    net = make_net(MIXED, ACTIONS, normalize_observations=True)
    batches = [make_rows(MIXED, ACTIONS, seed, rows=T + 1) for seed in (1, 2)]
    for batch in batches:
        net.update_moments(batch, ())

    def seen(name):  # rows 1 to T: the previous batch has counted row 0
        each = [batch["observation"][name][1:].reshape(T * B, -1) for batch in batches]
        return torch.cat(each).double().numpy()

    numbers = ("body", "height", "score")
    mean = {name: seen(name).mean(0) for name in numbers}
    std = {name: seen(name).std(0) for name in numbers}
    plain = make_net(MIXED, ACTIONS, normalize_observations=True)  # without moments
    weights = net.state_dict()
    weights = {name: x for name, x in weights.items() if ".moments." not in name}
    plain.load_state_dict(plain.state_dict() | weights)
    rows = make_rows(MIXED, ACTIONS, 3)
    by_hand = {name: x.clone() for name, x in rows["observation"].items()}
    for name in mean:
        x = by_hand[name].double().flatten(2) if name == "body" else by_hand[name]
        x = (x - torch.from_numpy(mean[name])) / torch.from_numpy(std[name])
        x = x * 10_000 if name == "score" else x  # the model divides by the bound
        by_hand[name] = x.reshape(by_hand[name].shape).float()
    before = net.state_dict()
    with torch.no_grad():
        outputs, _ = net(rows)
        wanted, _ = plain({**rows, "observation": by_hand})
    for name, x in wanted.items():
        torch.testing.assert_close(outputs[name], x, rtol=1e-4, atol=1e-5)
    for name, x in net.state_dict().items():  # only the learner updates them
        assert torch.equal(x, before[name])


def test_rewards_are_divided_by_the_deviation_of_their_discounted_sum():
    """The sums go on from rollout to rollout, and begin anew with an episode."""
    net = make_net(
        spaces.Box(-1, 1, (D,)), ACTIONS, normalize_rewards=True, discounting=GAMMA
    )
    begins = [(0, 0), (0, 1), (0, 2), (4, 1), (7, 0), (9, 2), (12, 2)]
    space = spaces.Box(-1, 1, (D,), np.float32)
    rows = make_rows(space, ACTIONS, rows=2 * T + 1, done=begins)
    sums = []
    for b in range(B):
        total = 0.0
        for t in range(2 * T + 1):
            if t > 0:
                total = GAMMA * total + rows["reward"][t, b].item()
                sums.append(total)
            if rows["done"][t, b]:
                total = 0.0
    rows["reward"][0] = 0.0  # the first rows of a run
    first = {name: x[: T + 1] for name, x in rows.items()}
    second = {name: x[T:] for name, x in rows.items()}
    start = net.initial_state(B)
    state = start
    for t in range(T):  # as an actor: up to the row before the last
        with torch.no_grad():
            outputs, state = net(
                {name: x[t : t + 1] for name, x in rows.items()}, state, acting=True
            )
        assert "reward" not in outputs
    net.update_moments(first, start)
    net.update_moments(second, state)
    assert net.return_moments.variance.item() == pytest.approx(np.var(sums), rel=1e-4)
    outputs, _ = net(second, state)
    wanted = second["reward"] / np.std(sums)
    torch.testing.assert_close(outputs["reward"], wanted.float())


NORMALIZED = {
    "env": "MountainCarContinuous-v0",  # truncated, too
    "env_kwargs": '{"max_episode_steps": 90}',
    "normalize_observations": True,
    "normalize_rewards": True,
    "eval_interval": 200,
    "eval_episodes": 1,
}


@pytest.mark.parametrize(
    "more",
    [
        {"use_lstm": True},
        {"replay_ratio": 1, "replay_size": 400, "learn_start": 200},  # while it fills
    ],
)
def test_a_run_keeps_its_moments(tmp_path, more):
    """They are in the checkpoint, also after a resume, and an agent has them."""
    flags = {**runs.SMALL, **NORMALIZED, **more}
    runs.run(tmp_path, "run", **flags)
    runs.run(tmp_path, "run", **{**flags, "total_steps": 900})
    agent = load_agent(tmp_path / "run")
    moments = agent.model.vector.moments
    assert moments.count == agent.model.return_moments.count == 900
    assert -1.2 < moments.mean[0] < 0.6  # the car's position
    observation, _ = agent.make_env().reset()
    action, state = agent.act(observation)
    action, state = agent.act(observation, state, reward=-0.1)
    assert action.shape == (1,)
    assert state.core[-1].item() == pytest.approx(-0.1)


def test_an_encoder_of_your_own_gets_the_values_as_they_are():
    encoder = "examples.exploration.encoders.minigrid_encoder:MiniGrid"
    with pytest.raises(FlagError, match="no effect with --encoder"):
        monobeast.make_flags(["--encoder", encoder, "--normalize_observations"])
