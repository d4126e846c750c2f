"""Batches of online and replayed rollouts."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from nets import make_net
from replayed_games import (
    OBSERVATIONS,
    A,
    Game,
    T,
    make_mixer,
    make_mixer_of,
    make_replay,
    numbered,
    play,
    stack,
)

from torchbeast.base.nested import map_nested
from torchbeast.core.distributions import make_distribution
from torchbeast.extras.replay.mixer import implied_kl


def test_states_are_those_of_whole_episodes():
    """The state before an unroll equals that of its episode, run alone."""
    rng = np.random.default_rng(8)
    games = [Game(rng, [3, 9, 14, 22, 6])]
    replay = make_replay(1000)
    play(replay, games)
    torch.manual_seed(1)
    model = make_net(OBSERVATIONS, spaces.Discrete(A), use_lstm=True)
    mixer = make_mixer(replay, model, 1.5)
    places = numbered(games)
    batch = map_nested(
        torch.from_numpy, map_nested(lambda x: x[:, None], next(games[0].rollouts()))
    )
    batch = map_nested(lambda x: torch.cat([x, x], dim=1), batch)
    batch["valid"] = torch.rand(batch["done"].shape) < 0.5  # as --max_policy_lag leaves
    compared = 0
    for _ in range(12):
        mixed, state = mixer.mix(batch, model.initial_state(2))
        assert mixed["replayed"].tolist() == [False] * 2 + [True] * 3
        assert torch.equal(mixed["valid"][:, :2], batch["valid"])
        for i in range(2, 5):
            image = mixed["observation"]["colours"][0, i].numpy().tobytes()
            _, at = places[image]
            begin = max(t for t in range(at + 1) if games[0].rows[t]["done"])
            if begin == at:
                continue
            whole = stack(games[0].rows[begin:at])
            whole = map_nested(lambda x: torch.from_numpy(x)[:, None], whole)
            with torch.no_grad():
                _, expected = model(whole, model.initial_state(1))
            for x, y in zip(state, expected, strict=True):
                torch.testing.assert_close(x[:, i : i + 1], y, rtol=1e-4, atol=1e-5)
            compared += 1
        mixer.carry_states(model)
    assert compared > 10


@pytest.mark.parametrize(
    ("field", "value", "cause"),
    [
        ("reward", np.nan, "the reward is nan"),
        ("reward", -np.inf, "the reward is -inf"),
        ("policy_logits", np.nan, "The cause is the update"),
        ("truncation_value", np.inf, "an episode's last observation is NaN or ∞"),
    ],
)
def test_a_batch_that_no_loss_can_use_is_not_stored(field, value, cause):
    rng = np.random.default_rng(11)
    replay = make_replay(1000)
    model = make_net(OBSERVATIONS, spaces.Discrete(A))
    mixer = make_mixer(replay, model, 1.0)
    rows = map_nested(lambda x: x[:, None], next(Game(rng, [2] * 9).rollouts()))
    rows["policy_logits"][:, 0, 1] = -np.inf  # a masked action
    mixer.add(map_nested(torch.from_numpy, rows), T)
    size = replay.size
    assert size > 0
    rows[field][2, 0] = value
    with pytest.raises(FloatingPointError, match=cause):
        mixer.add(map_nested(torch.from_numpy, rows), 2 * T)
    assert replay.size == size


def test_masked_actions_do_not_count_in_the_divergence():
    """It is that of the policies over the other actions."""
    torch.manual_seed(1)
    target, behavior = torch.randn(2, 4, 5, 7).double()
    left, masked = [0, 2, 3, 6], [1, 4, 5]
    few = make_distribution(spaces.Discrete(len(left)))
    expected = implied_kl(few, target[..., left], behavior[..., left], 1.0)
    target[..., masked] = behavior[..., masked] = -math.inf
    found = implied_kl(make_distribution(spaces.Discrete(7)), target, behavior, 1.0)
    torch.testing.assert_close(found, expected)
    assert (found > 0).all()


def test_when_the_learner_may_learn():
    """Also if unfinished episodes never let the replay reach learn_start."""
    rng = np.random.default_rng(10)
    games = [Game(rng, [12] * 30) for _ in range(2)]
    model = make_net(OBSERVATIONS, spaces.Discrete(A))
    for learn_start, first in ((0, 24), (50, 72), (100, 80)):
        replay = make_replay(100)
        mixer = make_mixer_of(replay, model, replay_ratio=1, learn_start=learn_start)
        ready = []
        for pair in zip(*(game.rollouts() for game in games), strict=True):
            rows = map_nested(torch.from_numpy, stack(pair, axis=1))
            ready.append(mixer.add(rows, step=0))
            if ready[-1]:
                mixer.mix(rows, ())
        begin = ready.index(True)
        assert all(ready[begin:])
        assert (begin + 1) * 2 * T >= first
        assert begin < 14


def test_fractions_of_a_ratio_add_up():
    rng = np.random.default_rng(9)
    games = [Game(rng, [12] * 5)]
    replay = make_replay(1000)
    play(replay, games)
    model = make_net(OBSERVATIONS, spaces.Discrete(A))
    mixer = make_mixer(replay, model, 0.3)
    rows = map_nested(lambda x: torch.from_numpy(x)[:, None], next(games[0].rollouts()))
    sizes = []
    for _ in range(10):
        mixed, _ = mixer.mix(rows, ())
        sizes.append(mixed["done"].shape[1] - 1)
    assert sizes == [0, 0, 0, 1, 0, 0, 1, 0, 0, 1]


def test_implied_kl_of_all_spaces():
    """Against sums over all actions, or a fine grid of them."""
    torch.manual_seed(1)
    target, behavior = torch.randn(2, 4, 5, 3).double()
    for clip_rho in (0.7, 1.0, 2.5):
        p, m = target.softmax(-1), behavior.softmax(-1)
        implied = torch.minimum(clip_rho * m, p)
        implied /= implied.sum(-1, keepdim=True)
        expected = (p * (p / implied).log()).sum(-1)
        discrete = make_distribution(spaces.Discrete(3))
        found = implied_kl(discrete, target, behavior, clip_rho)
        torch.testing.assert_close(found, expected)
        shifted = implied_kl(discrete, target + 5, behavior - 3, clip_rho)
        torch.testing.assert_close(shifted, expected)
    far = torch.tensor([[120.0, 0.0], [0.0, 120.0]])  # min(μ, π) is nearly uniform
    found = implied_kl(make_distribution(spaces.Discrete(2)), *far, 1.0)
    assert found.item() == pytest.approx(math.log(2), rel=1e-5)
    for space in (spaces.MultiDiscrete([3, 4]), spaces.Box(-1, 1, (1,), np.float32)):
        distribution = make_distribution(space)
        pair = torch.randn(2, 1, distribution.num_logits)
        many = pair.expand(2, 4000, distribution.num_logits)
        found = implied_kl(distribution, many[0], many[1], 1.0).mean()
        if isinstance(space, spaces.MultiDiscrete):
            actions = torch.cartesian_prod(torch.arange(3), torch.arange(4))
            weight = 1.0
        else:
            actions = torch.linspace(-30, 30, 200_001)[:, None]
            weight = 60 / 200_000
        n = len(actions)
        p, m = (distribution.log_prob(x.expand(n, -1), actions).exp() for x in pair)
        implied = torch.minimum(m, p)
        implied /= implied.sum() * weight
        inside = p > 0
        expected = (p * (p / implied.clamp(min=1e-38)).log())[inside].sum() * weight
        assert found.item() == pytest.approx(expected.item(), rel=0.1)
        same = implied_kl(distribution, many[0], many[0], 1.0)
        assert same.abs().max() == 0
        assert implied_kl(distribution, many[0], many[1], math.inf).abs().max() == 0
