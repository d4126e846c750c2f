"""--explorer: rewards that the learner makes itself; the examples RND and counts."""

import math

import pytest
import runs
import torch
from environments import CombinationLock
from gymnasium import spaces
from test_learner import make_batch, make_learner

from examples.exploration.common import EpisodicCounts
from examples.exploration.counts import Counts
from examples.exploration.rnd import RND
from torchbeast.base.errors import FlagError
from torchbeast.core.distributions import make_distribution
from torchbeast.extras.explorer.method import make_method
from torchbeast.learner import learn
from torchbeast.monobeast import make_parser
from torchbeast.runs import flagset
from torchbeast.runs.trust import UntrustedError

VARIANTS = "torchbeast.monobeast", "torchbeast.polybeast"
COUNTS, RANDOM = "examples.exploration.counts:Counts", "examples.exploration.rnd:RND"
LOCK = "environments:CombinationLock"
QUICK = {
    **{"preset": "classic-control", "num_actors": 2, "envs_per_actor": 4},
    **{"batch_size": 8, "precision": "fp32", "torch_threads": 1},
    **{"unroll_length": CombinationLock.LENGTH, "env": LOCK},
}


ACTIONS = spaces.Discrete(2)


def column(rows, name):
    return [float(row[name]) for row in rows if row[name]]


def mean(numbers):
    return sum(numbers) / len(numbers)


def saved(folder, xpid):
    return torch.load(folder / xpid / "model.tar", weights_only=True)


# --- Methods --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("method", [COUNTS, RANDOM + '{"learning_rate": 0.001}'])
def test_it_opens_a_lock_that_random_play_does_not(tmp_path, method):
    """Random play opens it in one of 65,536 episodes. These runs have about 4,000.

    With --sync, so that a busy machine does not change what they learn, and PolyBeast
    learns the same.
    """
    flags = {"sync": True, "disable_checkpoint": True}
    flags |= {**QUICK, "total_steps": 40_000, "explorer": method}
    runs.run(tmp_path, "lock", timeout=400, **flags)
    rows = runs.read_logs(tmp_path, "lock")
    assert mean(column(rows, "mean_game_return")[-10:]) > 0.3
    rewards = column(rows, "mean_intrinsic_reward")
    assert mean(rewards[-10:]) < 0.3 * mean(rewards[:10])


def rows_of(observations, done):
    return {
        "observation": torch.tensor(observations),
        "done": torch.tensor(done),
        "reward": torch.zeros(len(done), len(done[0])),
    }


def test_counts_are_those_of_a_dict():
    space = spaces.Discrete(5)
    method = Counts(space, make_distribution(spaces.Discrete(2)), scale=2.0)
    seen = {}
    for start in range(4):
        shown = [[(start + 2 * t) % 5, (t * t) % 5, 1] for t in range(6)]
        done = [[t == 3, False, t == 1] for t in range(6)]
        valid = torch.tensor([[True, t != 2, True] for t in range(5)])
        for t in range(1, 6):
            for b in range(3):
                if valid[t - 1, b]:
                    seen[shown[t][b]] = seen.get(shown[t][b], 0) + 1
        found = method.explore(rows_of(shown, done), valid)
        for t in range(1, 6):
            for b in range(3):
                counts = valid[t - 1, b] and not done[t][b]
                expected = 2.0 / math.sqrt(seen[shown[t][b]]) if counts else 0.0
                assert found.reward[t - 1, b] == pytest.approx(expected), (t, b)


def test_counts_leave_out_what_a_replay_shows_again():
    method = Counts(spaces.Discrete(5), make_distribution(spaces.Discrete(2)))
    rows = rows_of([[0, 3], [1, 1], [2, 4]], [[False, False]] * 3)
    rows["replayed"] = torch.tensor([False, True])
    found = method.explore(rows, torch.ones(2, 2, dtype=torch.bool))
    assert method.counts.sum() == 2
    assert (found.reward > 0).all()


def test_rnd_learns_what_it_sees():
    torch.manual_seed(3)
    space = spaces.Discrete(6)
    method = RND(space, make_distribution(spaces.Discrete(2)), scale=1.0)
    target = [x.clone() for x in method.target.parameters()]
    optimizer = method.make_optimizer()
    rows = rows_of([[0, 1]] * 5, [[False, False]] * 5)
    valid = torch.ones(4, 2, dtype=torch.bool)
    valid[:, 1] = False  # 1 does not count: it stays new
    for _ in range(300):
        found = method.explore(rows, valid)
        assert not found.reward.requires_grad
        assert (found.reward[:, 1] == 0).all()
        optimizer.zero_grad()
        found.loss.backward()
        optimizer.step()
    with torch.no_grad():
        novelty = method.explore(rows, torch.ones_like(valid)).reward[0]
    assert 10 * novelty[0] < novelty[1]
    for x, y in zip(target, method.target.parameters(), strict=True):
        assert torch.equal(x, y)


def test_counts_of_an_episode():
    counts = EpisodicCounts(spaces.Discrete(7), buckets=512)
    state = counts.initial_state(2)
    first = [[2, 1], [2, 3], [2, 1], [5, 1], [2, 1]]
    done = [[False, False]] * 3 + [[True, False], [False, False]]
    found = []
    for observation, over in zip(first, done, strict=True):
        fields, state = counts.act(rows_of([observation], [over]), state)
        found.append(fields["episodic_count"][0].tolist())
    assert found == [[1, 1], [2, 1], [3, 2], [1, 3], [1, 4]]


# --- The seam -------------------------------------------------------------------------


@pytest.mark.parametrize("module", VARIANTS)
def test_actors_keep_the_state_of_an_episode(tmp_path, module):
    flags = {**runs.SMALL, "env": "environments:SeedLog", "module": module}
    flags |= {"explorer": "exploring:Watcher", "envs_per_actor": 2, "total_steps": 300}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEED_FILE", str(tmp_path / "seeds"))
        process = runs.start_words(runs.command(tmp_path, "run", **flags), fresh=True)
        output = runs.finish(process)
    assert "Finished at step 300" in output
    rows = runs.read_logs(tmp_path, "run")
    # Unrolls of 5 steps, episodes of 3: the count at step t of an episode is t + 1.
    seen = [[float(row[f"counts_{i}"]) for i in range(10)] for row in rows]
    for row in seen:
        for b in (0, 1):
            own = row[b::2]
            steps = [(own[0] - 1 + i) % 3 + 1 for i in range(5)]
            assert own == steps
    assert {row[0] for row in seen} == {1, 2, 3}


@pytest.mark.parametrize("module", VARIANTS)
def test_a_method_with_all_parts(tmp_path, module):
    """Its actor's weights reach the actors; a resume has its networks and optimizer."""
    flags = {**runs.SMALL, "env": LOCK, "module": module, "envs_per_actor": 2}
    flags |= {"explorer": 'exploring:Teacher{"discount": 0.25}', "use_lstm": True}
    runs.run(tmp_path, "run", **flags)
    rows = runs.read_logs(tmp_path, "run")
    hints = column(rows, "hint")
    assert hints[0] == 0
    assert hints[-1] == pytest.approx(3, abs=0.3)
    assert {"mean_value_0", "mean_value_1", "explorer_loss"} <= rows[0].keys()
    losses = column(rows, "explorer_loss")
    assert losses[-1] < 0.01 * losses[0]
    # The policy's optimizer has not moved what the method's own has learned.
    before = saved(tmp_path, "run")
    right = before["model_state_dict"]["explorer.right"]
    assert torch.equal(right, before["explorer_state_dict"]["method"]["actor.right"])
    (state,) = before["explorer_state_dict"]["optimizer"]["state"].values()
    assert state["step"] == len(rows)
    runs.run(tmp_path, "run", **{**flags, "total_steps": 900})
    after = saved(tmp_path, "run")
    (state,) = after["explorer_state_dict"]["optimizer"]["state"].values()
    assert state["step"] == len(runs.read_logs(tmp_path, "run"))
    assert column(runs.read_logs(tmp_path, "run"), "hint")[len(rows)] > 2.5
    del after["explorer_state_dict"]
    torch.save(after, tmp_path / "run" / "model.tar")
    output = runs.run(tmp_path, "run", **flags | {"total_steps": 1200}, status=1)
    assert "does not fit these flags: KeyError('explorer_state_dict')" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("head", [False, True])
def test_the_loss_has_both_rewards(head):
    """Without a value head the sum is learned from, with one each on its own."""
    learner = make_learner("--explorer", RANDOM if head else COUNTS)
    batch, state = make_batch(learner)
    rows, columns = learner.explorer.explore(batch)
    assert columns()["mean_intrinsic_reward"] > 0
    more = rows["intrinsic_reward"]
    assert more.shape == batch["reward"].shape
    assert (more[0] == 0).all()
    assert ("intrinsic_discount" in rows) == head
    outputs, _ = learner.model(rows, state)
    assert outputs["baseline"].shape[2:] == ((2,) if head else ())
    row = learn(learner, batch, state).finish()
    assert ("mean_value_1" in row) == head


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("examples.exploration.common:Deviation", r"Deviation is no class .*\.Method"),
        ("no_such_module:A", "no_such_module"),
        ("exploring:Wacher", "has no attribute 'Wacher'"),
        ("exploring:Teacher{1}", "not a JSON object"),
        ("exploring:Teacher,exploring:Watcher", "it may name one MODULE"),
    ],
)
def test_a_wrong_name_is_named(name, message):
    with pytest.raises(FlagError, match=message):
        make_method(name, ACTIONS, make_distribution(ACTIONS))


@pytest.mark.parametrize("field", ["reward", "discount"])
def test_the_shape_of_what_a_method_returns_is_checked(field, monkeypatch):
    learner = make_learner("--explorer", RANDOM)
    batch, _ = make_batch(learner)
    explore = learner.explorer.method.explore

    def wrong(rows, valid):
        found = explore(rows, valid)
        return found._replace(**{field: getattr(found, field).unsqueeze(-1)})

    monkeypatch.setattr(learner.explorer.method, "explore", wrong)
    T, B = batch["reward"].shape
    match = rf"the {field} has the shape \[{T - 1}, {B}, 1\], not .* \[{T - 1}, {B}\]"
    with pytest.raises(ValueError, match=match):
        learner.explorer.explore(batch)


@pytest.mark.parametrize("method", ["Broken", "Steep"])
def test_what_is_not_finite_ends_the_run(tmp_path, method):
    explorer = f"exploring:{method}"
    words = runs.command(tmp_path, "run", explorer=explorer, **runs.SMALL)
    process = runs.start_words(words)
    output = runs.finish(process)
    assert process.returncode == 1
    assert "loss or gradient of --explorer are not finite" in output
    # Before its first bad update.
    if method == "Steep":
        assert runs.read_logs(tmp_path, "run") == []


@pytest.mark.parametrize("flag", ["explorer", "encoder", "loss"])
def test_a_checkpoint_may_not_name_code(flag):
    typed = flagset.read(make_parser(), ["--env", "CartPole-v1"])
    with pytest.raises(UntrustedError, match=f"x.tar names --{flag} evil:Class"):
        flagset.merge(typed, {"flags": {flag: "evil:Class"}}, "x.tar")
