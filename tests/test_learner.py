"""One update, the model included, held against what must be true of any right one."""

import copy
import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces

import torchbeast.learner
from torchbeast import monobeast
from torchbeast.base.errors import FlagError
from torchbeast.core.acting import act_step
from torchbeast.core.buffers import create_buffers
from torchbeast.learner import Learner, impala_loss, learn, model_loss
from torchbeast.local.env_spec import EnvSpec
from torchbeast.runs import checkpoint, flagset

T, B, A = 6, 4, 3
OBSERVATION = spaces.Box(-1, 1, (5,), np.float32)
# (row, environment) in which an episode begins.
BEGINS = [(2, 0), (4, 0), (0, 1), (6, 2)]
SMALL = ["--unroll_length", str(T), "--batch_size", str(B), "--precision", "fp32"]


def make_learner(*argv: str) -> Learner:
    arguments = ["--env", "CartPole-v1", "--disable_cuda", *SMALL, *argv]
    flags = flagset.parse(monobeast.make_parser(), arguments)
    return Learner(flags, EnvSpec(OBSERVATION, spaces.Discrete(A), 1))


def make_batch(learner: Learner) -> tuple[dict, tuple]:
    """Rollouts [T + 1, B, ...] off policy, and the state before row 0."""
    rng = np.random.default_rng(1)
    batch = create_buffers(learner.row_spec, (T + 1, B))
    for name, low, high in (("observation", -1, 1), ("reward", -2, 2)):
        batch[name].copy_(torch.tensor(rng.uniform(low, high, batch[name].shape)))
    for name in ("action", "last_action"):
        batch[name].copy_(torch.tensor(rng.integers(A, size=(T + 1, B))))
    batch["policy_logits"].copy_(torch.tensor(rng.normal(size=(T + 1, B, A))))
    batch["episode_step"].fill_(5)
    for place in BEGINS:
        batch["done"][place] = True
    batch["truncated"][4, 0] = True
    batch["truncation_value"][4, 0] = 1.75
    state = tuple(
        torch.tensor(rng.normal(size=x.shape), dtype=torch.float32)
        for x in learner.model.initial_state(B)
    )
    return batch, state


def loss_and_gradient(learner, batch, state):
    """The loss of the parameters, without an update; the targets are constants."""
    learner.model.zero_grad()
    loss, *_ = model_loss(learner, batch, state, 0.0)
    loss.backward()
    gradients = [x.grad.flatten() for x in learner.model.parameters()]
    return loss.item(), torch.cat(gradients)


def part(nested, dim, index):
    return {name: x.index_select(dim, index) for name, x in nested.items()}


def test_only_a_truncation_needs_the_last_observation():
    learner = make_learner("--use_lstm")
    batch, state = make_batch(learner)
    row = {name: x[4:5] for name, x in batch.items()}
    row["truncated"] = torch.tensor([[True, False, True, False]])
    last = batch["observation"][:1].clone()
    last[:, [1, 3]] = torch.nan
    mode, seen = learner.model.distribution.mode, []
    learner.model.core.register_forward_pre_hook(lambda _, x: seen.append(len(x[0][0])))
    found, _ = act_step(learner.model, row, state, mode, final_observation=last)
    assert seen == [B, 2]  # the model runs on no other rows again
    assert (found["truncation_value"] != 0).tolist() == row["truncated"].tolist()
    # Those of the episodes that were cut off, with the states from before the row.
    row |= {"observation": last, "done": torch.zeros_like(row["done"])}
    value = learner.model(row, state)[0]["baseline"][:, [0, 2]]
    torch.testing.assert_close(found["truncation_value"][:, [0, 2]], value)


LSTM = pytest.mark.parametrize("lstm", [(), ("--use_lstm",)])


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_updates_per_batch(optimizer):
    """Three updates from one batch are three batches, but for what they count."""
    argv = ("--optimizer", optimizer, "--total_steps", "1000000000000")
    learner = make_learner(*argv)
    batch, state = make_batch(learner)
    for _ in range(3):
        learn(learner, batch, state).finish()
    other = make_learner(*argv, "--updates_per_batch", "3")
    row = learn(other, batch, state).finish()
    for x, y in zip(learner.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
    assert other.num_updates == 3
    assert row["step"] == other.step == T * B
    assert row["episodes"] == sum(t > 0 for t, _ in BEGINS)
    assert other.scheduler.last_epoch == 1


@LSTM
def test_minibatches(lstm, monkeypatch):
    """A pass has each rollout once, with its state; passes are split differently."""
    passes, parts = 8, 2
    learner = make_learner(
        *("--updates_per_batch", str(passes * parts), "--minibatches", str(parts)),
        *lstm,
    )
    batch, state = make_batch(learner)
    seen = []  # [update][rollout]: number of the rollout in the batch

    def update(learner, rows, initial_state, is_last):
        assert is_last == (len(seen) == passes * parts - 1)
        firsts = batch["observation"][0].tolist()
        numbers = [firsts.index(x) for x in rows["observation"][0].tolist()]
        for name, x in rows.items():
            assert torch.equal(x, batch[name][:, numbers]), name
        for x, y in zip(initial_state, state, strict=True):
            assert torch.equal(x, y[:, numbers])
        seen.append(sorted(numbers))
        return real_update(learner, rows, initial_state, is_last)

    real_update, real_check = torchbeast.learner.update, torchbeast.learner.check_finite
    monkeypatch.setattr(torchbeast.learner, "update", update)
    names = []  # what each check gets, twice per update

    def check(columns, *about):
        names.append({*columns} - {"sum_of_weights"})
        real_check(columns, *about)

    monkeypatch.setattr(torchbeast.learner, "check_finite", check)
    row = learn(learner, batch, state).finish()
    checked = {"total_loss", "grad_norm"}
    assert names[: 2 * (passes * parts - 1)] == [checked] * 2 * (passes * parts - 1)
    assert all(checked < x for x in names[2 * passes * parts - 2 : 2 * passes * parts])
    assert learner.num_updates == len(seen) == passes * parts
    assert all(len(numbers) == B // parts for numbers in seen)
    for i in range(0, len(seen), parts):
        assert sorted(itertools.chain(*seen[i : i + parts])) == list(range(B))
    assert len(set(map(tuple, seen))) > parts
    assert row["step"] == T * B
    assert learner.scheduler.last_epoch == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--encoder", 'torch.nn:Linear{"z": 1}'], FlagError),
        (["--encoder", "torch:float32"], FlagError),
        (["--encoder", "torch.nn:Linear"], TypeError),  # raised inside of it
        (["--use_lstm", "--core", "torchbeast.recurrent:make_core"], FlagError),
        (["--loss", 'torchbeast.learner:impala_loss{"z": 1}'], FlagError),
        (["--explorer", 'examples.exploration.rnd:RND{"z": 1}'], FlagError),
    ],
)
def test_what_a_flag_names_must_take_its_arguments(words, error):
    match = rf"^{words[-2]} .*{words[-1][:8]}" if error is FlagError else None
    with pytest.raises(error, match=match):
        make_learner(*words)


@pytest.mark.parametrize(
    "change", [{"optimizer": "adam"}, {"replay_ratio": 1.0}, {"rollouts": "episode"}]
)
def test_a_run_keeps_its_optimizer_and_parts(change):
    learner = make_learner()
    state = {**learner.state_dict(), "flags": learner.flags.as_dict() | change}
    (name,) = change
    if name != "optimizer":  # its part is deleted
        delattr(learner.flags, name)
    with pytest.raises(checkpoint.CheckpointError, match=f"--{name}"):
        learner.load_state_dict(state)


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_a_resume_with_other_flags_keeps_the_moments(optimizer):
    """And takes the new flags of the optimizer."""
    learner = make_learner("--optimizer", optimizer)
    learn(learner, *make_batch(learner)).finish()
    saved = {**learner.state_dict(), "flags": learner.flags.as_dict()}
    other = make_learner("--optimizer", optimizer, "--epsilon", "0.003")
    before = copy.deepcopy(saved)
    other.load_state_dict(saved)
    new = other.optimizer.state_dict()
    assert new["param_groups"][0]["eps"] == 0.003
    moments = before["optimizer_state_dict"]["state"]
    assert len(moments) == len(list(learner.model.parameters()))
    torch.testing.assert_close(new["state"], moments, rtol=0, atol=0)


@pytest.mark.parametrize("more", [(), ("--entropy_cost", "0.3")])
def test_progress_and_schedule_go_on_after_a_resume(more, monkeypatch):
    """Also with other flags. The loss gets the share of the run before the update."""
    seen = []

    def loss(*arguments, **more):
        seen.append(arguments[-1])
        return impala_loss(*arguments, **more)

    monkeypatch.setattr(torchbeast.learner, "impala_loss", loss)
    total = ("--total_steps", str(5 * T * B))
    learner = make_learner(*total)
    batch, state = make_batch(learner)
    rates = [learn(learner, batch, state).finish()["learning_rate"] for _ in range(2)]
    saved = {**learner.state_dict(), "flags": learner.flags.as_dict()}
    resumed = make_learner(*total, *more)
    resumed.load_state_dict(saved)
    rates += [learn(resumed, batch, state).finish()["learning_rate"] for _ in range(4)]
    assert seen == [0, 1 / 5, 2 / 5, 3 / 5, 4 / 5, 1]
    assert rates == [learner.flags.learning_rate * (1 - x) for x in seen]


def test_an_update_has_the_clipped_gradient_of_its_batch():
    """Not that of the batch before, too."""
    learner = make_learner("--grad_norm_clipping", "40")
    batch, state = make_batch(learner)
    for _ in range(2):
        _, gradient = loss_and_gradient(learner, batch, state)  # leaves it there
        norm = gradient.norm().item()
        assert 40 < norm < 80
        row = learn(learner, batch, state).finish()
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)
        used = torch.cat([x.grad.flatten() for x in learner.model.parameters()])
        torch.testing.assert_close(used, 40 / norm * gradient, rtol=1e-3, atol=1e-6)


def test_columns_about_games():
    learner = make_learner("--episodes_for_avg", "150")
    batch, _ = make_batch(learner)
    rng = np.random.default_rng(2)
    returns = []
    for _ in range(30):
        over = rng.random((T + 1, B)) < 0.3
        batch["game_over"].copy_(torch.tensor(over))
        batch["done"].copy_(torch.tensor(over | (rng.random((T + 1, B)) < 0.3)))
        batch["game_return"].copy_(torch.tensor(rng.normal(size=(T + 1, B))))
        row = torchbeast.learner.count_batch(learner, batch, step=0, newest=0)
        returns += batch["game_return"][1:][over[1:]].tolist()
        assert row["games"] == len(returns)
        last = np.mean(returns[-100:])
        assert row["mean_game_return_100"] == pytest.approx(last)
        assert learner.counters.mean_return(150) == pytest.approx(
            np.mean(returns[-150:])
        )
    assert len(returns) > 150


def test_the_policy_lag_of_a_long_run():
    """Also where float32 can't tell one update from the next."""
    learner = make_learner("--updates_per_batch", "8")
    batch, _ = make_batch(learner)
    batch["policy_version"][:] = 50_000_000 - 3
    batch["policy_version"][2, 1] -= T * B
    batch["policy_version"][T] = 0  # acts in the next rollout
    row = torchbeast.learner.count_batch(learner, batch, step=0, newest=50_000_000)
    assert (row["policy_lag"], row["policy_lag_max"]) == (4, T * B + 3)
    assert row["policy_lag_batches"] == 4 / 8


def test_steps_beyond_the_max_policy_lag_do_not_count():
    """A batch is judged once, before its first update, each step by its own age."""
    more = ("--updates_per_batch", "4", "--minibatches", "2", "--rollouts", "episode")
    versions = np.random.default_rng(3).integers(2, 11, size=(T + 1, B))
    counts = torch.tensor(10 - versions <= 3)
    present = torch.rand(T + 1, B) < 0.8
    learners = make_learner(*more, "--max_policy_lag", "3"), make_learner(*more)
    batch, state = make_batch(learners[0])
    batch["policy_version"].copy_(torch.tensor(versions))
    rows = []
    for learner, valid in zip(learners, (present, present & counts), strict=True):
        learner.num_updates = 10
        torch.manual_seed(5)
        rows.append(learn(learner, batch | {"valid": valid}, state).finish())
    shares = [row.pop("frac_too_old") for row in rows]
    assert shares == pytest.approx([1 - counts[:T].double().mean().item(), 0])
    assert rows[0] == rows[1]
    models = (x.model.state_dict() for x in learners)
    torch.testing.assert_close(*models, rtol=0, atol=0)


@LSTM
def test_a_rollout_equals_its_episodes_apart(lstm):
    """Cut where an episode begins, the pieces' losses and gradients add up."""
    learner = make_learner(*lstm)
    batch, state = make_batch(learner)
    first = part(batch, 1, torch.tensor([0]))
    first_state = tuple(x[:, :1] for x in state)
    whole_loss, whole_gradient = loss_and_gradient(learner, first, first_state)
    loss, gradient = 0.0, torch.zeros_like(whole_gradient)
    for begin, end in ((0, 2), (2, 4), (4, T)):
        # Row `end` is the last of a piece and the first of the next.
        rows = part(first, 0, torch.arange(begin, end + 1))
        new = tuple(torch.zeros_like(x) for x in first_state)
        result = loss_and_gradient(learner, rows, first_state if begin == 0 else new)
        loss += result[0]
        gradient += result[1]
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-4, atol=1e-5)
