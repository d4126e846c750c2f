"""RIDE, NovelD, E3B and AMIGo of examples/exploration."""

import collections
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from nets import make_net

from examples.exploration.amigo import AMIGo
from examples.exploration.common import Deviation
from examples.exploration.e3b import E3B
from examples.exploration.noveld import NovelD
from examples.exploration.ride import RIDE
from torchbeast.base.nested import map_nested
from torchbeast.core.distributions import make_distribution
from torchbeast.extras.episodes import cut_at_episodes

T, B = 11, 3
SPACE = spaces.MultiDiscrete([3, 2])
ACTIONS = spaces.Discrete(4)
SCALE = '{"scale": 0.1}'  # for the short episodes of these runs
JSON = {"amigo": '{"batch_size": 16, "least_steps": 3}'}
METHODS = {"ride": RIDE, "noveld": NovelD, "e3b": E3B, "amigo": AMIGo}
NAMES = {
    name: f"examples.exploration.{name}:{x.__name__}{JSON.get(name, SCALE)}"
    for name, x in METHODS.items()
}


def make_rows(seed=0, steps=T):
    """Rows [T + 1, B] of random observations, of which there are six."""
    random = np.random.default_rng(seed)
    shape = steps + 1, B
    done = random.random(shape) < 0.2
    done[0] = True
    return {
        "observation": torch.from_numpy(random.integers((3, 2), size=(*shape, 2))),
        "done": torch.from_numpy(done),
        "reward": torch.zeros(shape),
        "action": torch.from_numpy(random.integers(4, size=shape)),
    }


def make_valid(seed=1):
    return torch.from_numpy(np.random.default_rng(seed).random((T, B)) < 0.8)


def act(actor, rows, state=None):
    """The rows with the actor's fields, which sees one after the other."""
    state = actor.initial_state(rows["done"].shape[1]) if state is None else state
    fields = []
    for t in range(len(rows["done"])):
        row = map_nested(lambda x, t=t: x[t : t + 1], rows)
        made, state = actor.act(row, state)
        fields.append(made)
    return {**rows, **map_nested(lambda *x: torch.cat(x), *fields)}


def counts_in_episodes(rows):
    """How often each observation was seen in its episode: [T + 1, B]."""
    counts = np.zeros(rows["done"].shape)
    for b in range(B):
        seen = collections.Counter()
        for t in range(len(counts)):
            if rows["done"][t, b]:
                seen.clear()
            seen[tuple(rows["observation"][t, b].tolist())] += 1
            counts[t, b] = seen[tuple(rows["observation"][t, b].tolist())]
    return counts


def numbers(x):
    return x.detach().double().numpy()


def test_ride_rewards_impact_by_the_root_of_the_count():
    torch.manual_seed(0)
    ride = RIDE(SPACE, make_distribution(ACTIONS), scale=0.3)
    rows, valid = act(ride.actor, make_rows()), make_valid()
    found = ride.explore(rows, valid)
    embedded = numbers(ride.embed(rows["observation"]))
    counts = counts_in_episodes(rows)
    assert counts.max() > 2
    counted = {
        (t, b): math.dist(embedded[t + 1, b], embedded[t, b])
        for t, b in np.ndindex(T, B)
        if valid[t, b] and not rows["done"][t + 1, b]
    }
    mean_impact = np.mean(list(counted.values()))
    for t, b in np.ndindex(T, B):
        impact = counted.get((t, b), 0) / mean_impact
        expected = 0.3 * impact / math.sqrt(counts[t + 1, b])
        assert float(found.reward[t, b]) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert not found.reward.requires_grad
    assert found.discount is None


def test_noveld_rewards_the_way_out_of_the_known():
    torch.manual_seed(0)
    noveld = NovelD(SPACE, make_distribution(ACTIONS), scale=0.3, alpha=0.6)
    rows, valid = act(noveld.actor, make_rows()), make_valid()
    novelty = numbers(
        noveld.predictor(rows["observation"]) - noveld.target(rows["observation"])
    )
    novelty = np.sqrt((novelty**2).sum(-1))  # [T + 1, B]
    counted = (valid & ~rows["done"][1:]).numpy()
    deviation = novelty[1:][counted].std()
    counts = counts_in_episodes(rows)
    found = noveld.explore(rows, valid)
    for t, b in np.ndindex(T, B):
        expected = max(novelty[t + 1, b] - 0.6 * novelty[t, b], 0)
        expected *= 0.3 / deviation * counted[t, b] * (counts[t + 1, b] == 1)
        assert float(found.reward[t, b]) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert 3 < np.count_nonzero(found.reward) < counted.sum() - 3
    assert not found.reward.requires_grad
    # The random network learns nothing.
    trained = {id(x) for x in noveld.make_optimizer().param_groups[0]["params"]}
    assert not trained & {id(x) for x in noveld.target.parameters()}


def test_e3b_keeps_the_inverse_of_its_episode():
    torch.manual_seed(0)
    e3b = E3B(SPACE, make_distribution(ACTIONS), scale=0.3, size=5, ridge=0.2)
    rows, valid = act(e3b.actor, make_rows()), make_valid()
    embedded = numbers(e3b.actor.embed(rows["observation"]))
    bonus = np.zeros((T + 1, B))
    for t, b in np.ndindex(T + 1, B):
        begin = max(i for i in range(t + 1) if rows["done"][i, b])
        before = embedded[begin:t, b]  # [n, 5]
        inverse = np.linalg.inv(0.2 * np.eye(5) + before.T @ before)
        bonus[t, b] = embedded[t, b] @ inverse @ embedded[t, b]
    assert numbers(rows["elliptical_bonus"]) == pytest.approx(bonus, rel=1e-3)
    found = e3b.explore(rows, valid)
    counted = (valid & ~rows["done"][1:]).numpy()
    expected = 0.3 * bonus[1:] / bonus[1:][counted].std() * counted
    assert numbers(found.reward) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert not found.reward.requires_grad


def test_the_deviation_is_that_of_all_values_that_count():
    random = np.random.default_rng(0)
    deviation, seen = Deviation(), []
    for _ in range(5):
        x, counts = random.normal(4, 3, (T, B)), random.random((T, B)) < 0.5
        seen.append(x[counts])
        found = deviation.update(torch.tensor(x).float(), torch.from_numpy(counts))
        assert float(found) == pytest.approx(np.concatenate(seen).std(), rel=1e-3)
    # Values that are nearly equal make no huge rewards.
    equal = torch.full((T, B), 5.0)
    least = Deviation().update(equal, torch.ones(T, B, dtype=torch.bool))
    assert float(least) == pytest.approx(0.05)
    # Without a value it stays.
    none = torch.zeros(T, B, dtype=torch.bool)
    assert float(deviation.update(torch.ones(T, B), none)) == float(found)


GRID = spaces.Box(0, 255, (3, 5, 3), np.uint8)
CELLS = 3 * 5


def grid_rows(*agents):
    """Rows [n, 1] of an agent that stands in these cells; None: an episode begins."""
    cells, done = [], []
    for agent in agents:
        if agent is None:
            done.append(True)
            continue
        grid = np.ones((CELLS, 3), np.uint8)
        grid[agent] = 10, 0, 2
        cells.append(grid.reshape(GRID.shape))
        done += [False] * (len(cells) - len(done))
    observation = torch.from_numpy(np.stack(cells)).unsqueeze(1)
    return {
        "observation": observation,
        "done": torch.tensor(done).unsqueeze(1),
        "reward": torch.zeros(len(cells), 1),
    }


def only(teacher, cell):
    """Makes the teacher propose this cell."""

    def propose(grid):
        logits = torch.full((len(grid), CELLS), -1e9)
        logits[:, cell] = 0
        return logits, torch.zeros(len(grid))

    teacher.forward = propose


def test_amigo_keeps_a_goal_until_its_cell_changes():
    amigo = AMIGo(GRID, make_distribution(ACTIONS), scale=0.3)
    only(amigo.actor.teacher, 3)
    # From 0 over 3, so that 3 is the goal again, which is reached by leaving it. Then
    # another episode, which begins in the goal.
    rows = act(amigo.actor, grid_rows(None, 0, 1, 2, 3, 4, 4, None, 3, 3))
    assert (rows["goal"] == 3).all()
    reached = [0, 0, 0, 1, 1, 0, 0, 0]
    assert rows["goal_reached"].flatten().int().tolist() == reached
    assert rows["goal_steps"].flatten().tolist() == [0, 1, 2, 0, 0, 1, 0, 1]
    # The grid of the goal is the one for which it was proposed.
    agent = (rows["goal_grid"][:, 0].flatten(1, 2)[..., 0] == 10).int().argmax(-1)
    assert agent.tolist() == [0, 0, 0, 3, 4, 4, 3, 3]
    valid = torch.ones(7, 1, dtype=torch.bool)
    found = amigo.explore(rows, valid)
    assert found.reward.flatten().tolist() == pytest.approx([0, 0, 0.3, 0.3, 0, 0, 0])
    assert found.loss is None  # three goals of 32 have ended
    waiting = amigo.waiting
    assert waiting["steps"].tolist() == [2, 0, 1]
    assert waiting["reached"].tolist() == [True, True, False]
    assert waiting["goal"].tolist() == [3, 3, 3]
    # Steps that don't count, and replayed ones.
    amigo.waiting = {}
    assert not amigo.explore(rows, ~valid).reward.any()
    amigo.explore({**rows, "replayed": torch.tensor([True])}, valid)
    assert len(amigo.waiting["steps"]) == 0


def test_amigo_rewards_no_goal_across_an_end_in_a_replay():
    """The rest of a long episode begins with done, where its actor saw no end."""
    amigo = AMIGo(GRID, make_distribution(ACTIONS), scale=0.3)
    only(amigo.actor.teacher, 3)
    rows = act(amigo.actor, grid_rows(None, 0, 1, 2, 3))
    valid = torch.ones(len(rows["done"]) - 1, 1, dtype=torch.bool)
    assert amigo.explore(rows, valid).reward.count_nonzero() == 1
    rows["done"] = rows["goal_reached"] | rows["done"]
    assert not amigo.explore(rows, valid).reward.any()


@pytest.mark.parametrize("name", METHODS)
def test_padding_has_no_reward_and_no_loss(name):
    """--rollouts episode cuts at episodes: the rows around one do not count."""
    torch.manual_seed(0)
    space = GRID if name == "amigo" else SPACE
    more = {"batch_size": 1000} if name == "amigo" else {}
    method = METHODS[name](space, make_distribution(ACTIONS), **more)
    rows = make_rows()
    if name == "amigo":
        x = torch.from_numpy(np.random.default_rng(0).integers(3, size=(T + 1, B, 45)))
        rows["observation"] = x.byte().reshape(T + 1, B, *GRID.shape)
    rows = act(method.actor, rows)
    every = torch.ones(T, B, dtype=torch.bool)
    whole = method.explore(rows, every)
    method.waiting = {}
    cut, _ = cut_at_episodes(rows, ())
    parts = method.explore(cut, cut["valid"][:-1])
    assert parts.reward.isfinite().all()
    assert not parts.reward[~cut["valid"][:-1]].any()
    rewarded = int((whole.reward > 0).sum())
    assert int((parts.reward > 0).sum()) == pytest.approx(rewarded, abs=rewarded // 2)
    if name == "amigo":
        assert float(parts.reward.sum()) == float(whole.reward.sum())
        assert len(method.waiting["goal"]) == int(whole.columns["goals"])


@pytest.mark.parametrize("use_lstm", [False, True])
def test_normalized_rewards_have_a_sum_beside_the_methods_state(use_lstm):
    """--normalize_rewards: the sum of an episode goes on in the next batch."""
    torch.manual_seed(0)
    about = {"use_lstm": use_lstm, "core_size": 7, "explorer": NAMES["ride"]}
    net = make_net(SPACE, ACTIONS, normalize_rewards=True, discounting=0.9, **about)
    state = net.initial_state(B)
    before = torch.tensor([5.0, -70.0, 300.0])
    (place,) = [i for i, x in enumerate(state) if x.shape == (1, B, 1)]
    state[place][:] = before.view(1, B, 1)
    rows = {**make_rows(), "reward": torch.randn(T + 1, B)}
    rows["done"][0] = False
    rows["last_action"] = torch.zeros(T + 1, B, dtype=torch.int64)
    net.update_moments(rows, state)
    sums, last = [], before.numpy()
    for reward, done in zip(numbers(rows["reward"]), rows["done"].numpy(), strict=True):
        sums.append(reward + 0.9 * last)
        last = sums[-1] * ~done
    variance = np.var(sums[1:])  # row 0 was in the batch before
    assert net.return_moments.variance.item() == pytest.approx(variance, rel=1e-3)
    first = {k: x[:1] for k, x in rows.items()}
    _, after = net(first, state, acting=True)
    torch.testing.assert_close(
        after[place].flatten(), torch.from_numpy(sums[0]).float()
    )


def test_values_that_are_not_finite_do_not_stay():
    """They end the run, and the last checkpoint must not have them."""
    deviation = Deviation()
    x = torch.tensor([[1.0, float("nan"), 3.0], [float("inf"), 7.0, 5.0]])
    counts = torch.tensor([[True, True, True], [True, False, True]])
    assert deviation.update(x, counts).item() == pytest.approx(np.std([1, 3, 5]))
    assert deviation.count == 3
