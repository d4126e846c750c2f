"""Models of the docs: the patch of PopArt, a transformer as the core."""

import importlib.util

import numpy as np
import pytest
import runs
import torch
from cue_games import Gold, Pennies
from gymnasium import spaces
from nets import make_net, make_rows, map_leaves
from test_forking import Fork

from torchbeast.extras.episodes import cut_at_episodes


@pytest.fixture(params=["monobeast", "polybeast"])
def variant(request, tmp_path):
    """Flags of both variants, for runs that learn quickly."""
    flags = {
        "envs_per_actor": 4,
        "batch_size": 4,
        "unroll_length": 10,
        "optimizer": "adam",
        "epsilon": 0.00001,
    }
    if request.param == "polybeast":
        flags |= {
            "module": "torchbeast.polybeast",
            "num_actors": None,
            "num_servers": 2,
            "pipes_basename": f"unix:{tmp_path}/pipe",
        }
    return flags


# --- PopArt ---------------------------------------------------------------------------


@pytest.mark.timeout(420)
def test_popart_learns_games_of_very_different_rewards(tmp_path, variant):
    """Without it, the gradients of the game with large rewards hide the other."""
    fork = Fork(tmp_path, "popart")
    changed = ("games", "learner", "model")
    assert fork.files == {f"torchbeast/{name}.py" for name in changed}
    flags = {
        **variant,
        "learning_rate": 0.003,
        "env": "torchbeast.games:Games",
        "env_kwargs": '{"games": ["cue_games:Pennies", "cue_games:Gold"]}',
    }
    rows = fork.train(timeout=200, **flags, total_steps=5000)
    for task, game in enumerate((Pennies, Gold)):
        best = game.LENGTH * game.VALUE
        returns = [float(row[f"return_{task}"] or "nan") for row in rows]
        assert np.nanmax(returns) <= best  # of this game, and not of the other
        assert np.nanmean(returns[-10:]) > 0.9 * best  # chance: 0.25
    ratio = float(rows[-1]["sigma_1"]) / float(rows[-1]["sigma_0"])
    assert ratio == pytest.approx(Gold.VALUE / Pennies.VALUE, rel=0.3)

    weights = fork.checkpoint()["model_state_dict"]
    average, square = (weights[f"baseline.{name}"] for name in ("mean", "square"))
    saved = np.sqrt(square.double() - average.double() ** 2).tolist()
    resumed = fork.train(timeout=200, **flags, total_steps=5080)[len(rows) :]
    assert len(resumed) == 2
    found = [float(resumed[0][f"sigma_{task}"]) for task in range(2)]
    assert found == pytest.approx(saved, rel=1e-3)


def test_popart_keeps_the_values_when_the_moments_change(tmp_path):
    K, N, D = 3, 40, 7
    path = Fork(tmp_path, "popart").path / "torchbeast" / "model.py"
    spec = importlib.util.spec_from_file_location("forked_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # what it imports comes from this tree
    head = module.PopArt(D, K)
    x, task = torch.randn(N, D), torch.arange(N) % 2 * 2  # none of task 1
    before = head(x, task)
    for shift, scale in ((0, 1), (50, 300), (-4, 0.1)):
        targets = shift + scale * (1 + task) * torch.randn(N)
        share, mean = 1 - (1 - head.STEP_SIZE) ** (N / 2), head.mean[2].item()
        head.update(targets, task)
        wanted = mean + share * (targets[task == 2].mean().item() - mean)
        assert head.mean[2].item() == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(head(x, task), before, rtol=0, atol=1e-4)
    assert head.sigma[2] > 10  # so the weights have changed, too


# --- A transformer --------------------------------------------------------------------

T, B, A = 80, 3, 7  # more rows than the memory holds
SPACE = spaces.Dict({"body": spaces.Box(-1, 1, (4,)), "digit": spaces.Discrete(3)})
BEGINS = [(0, 0), (5, 1), (6, 1), (40, 0), (50, 2), (79, 2)]


TRANSFORMER = "examples.transformer:TransformerCore"


@pytest.fixture(scope="module")
def transformer():
    """A net with a transformer, none of whose layers is the identity."""
    torch.manual_seed(1)
    net = make_net(SPACE, spaces.Discrete(A), use_lstm=True, core=TRANSFORMER)
    with torch.no_grad():
        for p in net.core.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return net.requires_grad_(False)


def act(net, rows, state):
    """Acts row by row: the outputs [T, B, ...], and the states before all rows."""
    steps, states = [], [state]
    for t in range(T):
        row = map_leaves(lambda x, t=t: x[t : t + 1], rows)
        outputs, state = net(row, state, acting=True)
        steps.append(outputs)
        states.append(state)
    return {name: torch.cat([x[name] for x in steps]) for name in steps[0]}, states


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("first", "last"), [(0, T), (20, 41)])
def test_a_transformer_learns_from_what_it_acts_on(transformer, first, last):
    """The learner gets the same outputs of a rollout [first, last), whole or cut."""
    rows = make_rows(SPACE, spaces.Discrete(A), rows=T, done=BEGINS)
    acted, states = act(transformer, rows, transformer.initial_state(B))
    acted = {name: x[first:last] for name, x in acted.items()}
    batch = map_leaves(lambda x: x[first:last], rows)
    outputs, state = transformer(batch, states[first])
    for name, x in acted.items():
        assert_close(outputs[name], x)
    assert_close(state, states[last])

    wanted = {f"wanted {name}": x for name, x in acted.items()}
    cut, state = cut_at_episodes({**batch, **wanted}, states[first])
    outputs, _ = transformer(cut, state)
    inside = cut["valid"]
    assert inside.sum() >= (last - first - 1) * B
    for name in acted:
        assert_close(outputs[name][inside], cut[f"wanted {name}"][inside])


def test_attention_sees_the_past_of_the_episode_only(transformer):
    """Rows 10 to 69 are an episode. Row 20 has an effect on those from 20 on."""
    rows = make_rows(SPACE, spaces.Discrete(A), rows=T, done=[(10, 0), (70, 0)])
    changed = map_leaves(torch.clone, rows)
    changed["observation"]["body"][20, 0] += 1
    outputs, state = transformer(rows, transformer.initial_state(B))
    others, other_state = transformer(changed, transformer.initial_state(B))
    assert_close(other_state, state)
    for name, x in outputs.items():
        differs = (others[name] != x).reshape(T, B, -1).any(-1)
        assert differs[:, 0].nonzero().flatten().tolist() == list(range(20, 70))
        assert not differs[:, 1:].any()


@pytest.mark.timeout(420)
def test_a_transformer_learns_to_remember(tmp_path, variant):
    flags = {**variant, "env": "cue_games:Repeat", "use_lstm": True}
    flags |= {"core": TRANSFORMER, "rollouts": "episode"}
    flags |= {"learning_rate": 0.001, "total_steps": 5000}
    runs.run(tmp_path, "run", timeout=200, **flags)
    rows = runs.read_logs(tmp_path, "run")
    assert float(rows[-1]["mean_game_return_100"]) > 3  # without a memory: 2
