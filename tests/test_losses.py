import argparse
import math

import numpy as np
import pytest
import test_learner
import torch
from loss_cases import (
    FLAGS,
    A,
    B,
    T,
    log_softmax,
    loss_of,
    make_batch,
    oracle_parts,
    oracle_targets,
)

from torchbeast import learner
from torchbeast.core.columns import ColumnError
from torchbeast.learner import learn


@pytest.mark.parametrize(
    ("seed", "changes"),
    [
        (1, {}),
        (2, {"reward_clipping": "none"}),
        (3, {"clip_rho": 0.6, "clip_pg_rho": 1.7, "clip_c": 0.4}),
        (4, {"trace_decay": 0.3}),
    ],
)
def test_parts_of_the_loss(seed, changes):
    batch, outputs = make_batch(seed)
    vs, pg_advantages, log_rhos = oracle_targets(batch, outputs, **changes)
    expected = oracle_parts(
        batch, outputs["policy_logits"], outputs["baseline"], vs, pg_advantages
    )
    loss, stats = loss_of(batch, outputs, **changes)
    for name, value in expected.items():
        assert stats[name].item() == pytest.approx(value, rel=1e-6), name
    assert loss.item() == pytest.approx(sum(expected.values()), rel=1e-6)
    assert stats["total_loss"].item() == loss.item()
    entropy = -expected["entropy_loss"] / FLAGS["entropy_cost"] / (T * B)
    assert stats["entropy"].item() == pytest.approx(entropy)
    assert 0 < entropy < np.log(A)
    assert stats["mean_value"].item() == pytest.approx(outputs["baseline"][:T].mean())
    assert stats["frac_rho_above_1"].item() == pytest.approx((log_rhos > 0).mean())
    rhos = np.exp(log_rhos)
    ess = rhos.sum() ** 2 / (T * B * np.square(rhos).sum())
    assert stats["ess"].item() == pytest.approx(ess)
    kl = (rhos - 1 - log_rhos).mean()
    assert stats["behavior_kl"].item() == pytest.approx(kl)
    assert not any(x.requires_grad for x in stats.values())


def test_normalized_advantages():
    """Only the policy's part changes. Advantages of 0 stay 0."""
    batch, outputs = make_batch()
    clips = {"clip_rho": 0.6, "clip_pg_rho": 1.7}
    vs, advantages, log_rhos = oracle_targets(batch, outputs, **clips)
    weights = np.minimum(np.exp(log_rhos), 1.7)
    centred = advantages - weights * (advantages.sum() / weights.sum())
    advantages = centred / np.sqrt(np.mean(centred**2))
    expected = oracle_parts(
        batch, outputs["policy_logits"], outputs["baseline"], vs, advantages
    )
    _, stats = loss_of(batch, outputs, normalize_advantages=True, **clips)
    for name, value in expected.items():
        assert stats[name].item() == pytest.approx(value, rel=1e-6), name
    scaled = {"normalize_advantages": True, "reward_clipping": "none"}
    batch["reward"][:] = outputs["baseline"][:] = batch["truncation_value"][:] = 0
    assert loss_of(batch, outputs, **scaled)[1]["pg_loss"].item() == 0


def test_clip_ratio_stops_what_has_gone_too_far():
    """The gradient of PPO's loss, by autograd, where V-trace's weights don't clip."""
    batch, outputs = make_batch()
    settings = {"clip_rho": math.inf, "clip_pg_rho": math.inf, "entropy_cost": 0.0}
    _, weighted, log_rhos = oracle_targets(batch, outputs, **settings)
    logits = torch.tensor(outputs["policy_logits"]).requires_grad_()
    chosen = torch.as_tensor(batch["action"])[:-1, :, None]
    log_probs = logits.log_softmax(-1)[:-1].gather(-1, chosen).squeeze(-1)
    behavior = log_softmax(batch["policy_logits"])[:-1]
    behavior = np.take_along_axis(behavior, chosen.numpy(), -1).squeeze(-1)
    ratios = (log_probs - torch.as_tensor(behavior)).exp()
    advantages = torch.as_tensor(weighted / np.exp(log_rhos))
    clipped = ratios.clamp(0.7, 1.3) * advantages
    torch.minimum(ratios * advantages, clipped).sum().neg().backward()

    learned = {name: torch.tensor(x).requires_grad_() for name, x in outputs.items()}
    loss, stats = loss_of(batch, learned, **settings, clip_ratio=0.3)
    loss.backward()
    torch.testing.assert_close(learned["policy_logits"].grad, logits.grad)
    stopped = (logits.grad[:-1] == 0).all(-1).float().mean().item()
    assert 0.1 < stopped < 0.9
    assert stats["frac_clipped"].item() == pytest.approx(stopped)


def test_gradients_against_finite_differences():
    """The targets are constants: only log π, the values and the entropy are learned."""
    batch, outputs = make_batch()
    vs, pg_advantages, _ = oracle_targets(batch, outputs)
    learned = {name: torch.tensor(x).requires_grad_() for name, x in outputs.items()}
    loss_of(batch, learned)[0].backward()

    def oracle_loss(logits, baseline):
        parts = oracle_parts(batch, logits, baseline, vs, pg_advantages)
        return sum(parts.values())

    epsilon = 1e-5
    for name, x in outputs.items():
        for place in np.ndindex(x.shape):
            x[place] += epsilon
            above = oracle_loss(outputs["policy_logits"], outputs["baseline"])
            x[place] -= 2 * epsilon
            below = oracle_loss(outputs["policy_logits"], outputs["baseline"])
            x[place] += epsilon
            slope = (above - below) / (2 * epsilon)
            assert learned[name].grad[place].item() == pytest.approx(
                slope, rel=1e-5, abs=1e-6
            ), (name, place)
    # The last row is only a bootstrap.
    assert not learned["policy_logits"].grad[T].any()
    assert not learned["baseline"].grad[T].any()


@pytest.mark.parametrize(
    ("final", "progress", "cost"),
    [(None, 0.75, 0.3), (0.1, 0.0, 0.3), (0.1, 0.75, 0.15), (0.5, 1.0, 0.5)],
)
def test_the_entropy_cost_changes_linearly(final, progress, cost):
    _, stats = loss_of(*make_batch(), final_entropy_cost=final, progress=progress)
    entropy = stats["entropy"] * (T * B)
    assert -stats["entropy_loss"] / entropy == pytest.approx(cost)


def test_auxiliary_losses_are_added_and_logged():
    batch, outputs = make_batch()
    loss, _ = loss_of(batch, outputs)
    auxiliary = {
        "a_loss": torch.tensor(2.5, requires_grad=True),
        "per_task": torch.tensor([-1.0, 4.0]),
        "per_step": torch.full((T, B), 0.5),
        "a_number": 7,
    }
    seen = []

    def losses(*arguments):
        seen.append(arguments)
        return auxiliary

    both, stats = loss_of(batch, outputs, 0.25, auxiliary_losses=losses)
    assert both.item() == pytest.approx(loss.item() + 2.5 + 3 + T * B / 2 + 7)
    assert stats["a_number"].item() == 7
    assert stats["a_loss"].item() == 2.5
    assert stats["per_task"].tolist() == [-1, 4]
    assert stats["per_step"].item() == T * B / 2
    both.backward()
    assert auxiliary["a_loss"].grad == 1.0
    ((*same, targets, valid, the_flags, progress),) = seen
    assert progress == 0.25
    assert [x.keys() for x in same] == [batch.keys(), outputs.keys()]
    vs, advantages, _ = oracle_targets(*make_batch())
    np.testing.assert_allclose(targets.vs, vs, rtol=1e-5)
    np.testing.assert_allclose(targets.pg_advantages, advantages, rtol=1e-5)
    assert valid.shape == (T, B)
    assert valid.all()
    assert the_flags.discounting == FLAGS["discounting"]


def test_value_heads_with_rewards_and_discounts_of_their_own(monkeypatch):
    """Two heads learn as alone; the policy learns from the sum of their advantages."""
    batch, outputs = make_batch()
    others = np.random.default_rng(7).normal(size=(2, T + 1, B))
    second = {**batch, "reward": others[0], "truncation_value": np.zeros((T + 1, B))}
    alone = [
        (batch, outputs, {"discounting": 0.9}),
        (second, {**outputs, "baseline": others[1]}, {"discounting": 0.5}),
    ]
    parts = [loss_of(*x, **changes)[1] for *x, changes in alone]
    one_head = learner.rewards_and_discounts

    def two_heads(batch, outputs, flags):
        each = [
            one_head(
                {name: torch.as_tensor(x) for name, x in one_batch.items()},
                {},
                argparse.Namespace(**{**FLAGS, **changes}),
            )
            for one_batch, _, changes in alone
        ]
        return tuple(torch.stack(x, dim=-1) for x in zip(*each, strict=True))

    monkeypatch.setattr(learner, "rewards_and_discounts", two_heads)
    both = {**outputs, "baseline": np.stack([outputs["baseline"], others[1]], -1)}
    _, stats = loss_of(batch, both)
    for name in "baseline_loss", "pg_loss":
        assert stats[name].item() == pytest.approx(sum(x[name].item() for x in parts))
    wanted = [outputs["baseline"][:T].mean(), others[1][:T].mean()]
    assert stats["mean_value"].tolist() == pytest.approx(wanted)


def test_rewards_of_the_model_replace_those_of_the_environment():
    batch, outputs = make_batch()
    rewards = np.random.default_rng(3).normal(size=(T + 1, B))
    assert (abs(rewards) > 1).any()  # they are not clipped
    unclipped = {"reward_clipping": "none"}
    _, wanted = loss_of({**batch, "reward": rewards}, outputs, **unclipped)
    _, stats = loss_of(batch, {**outputs, "reward": rewards})
    assert {k: x.item() for k, x in stats.items()} == {
        k: x.item() for k, x in wanted.items()
    }


def test_normalized_advantages_add_nothing_off_policy():
    """A constant that all rewards have in common is no reason to change the policy.

    Each action has been taken as often as the behaviour policy wants, and has the same
    advantage. So the gradient of the policy is 0, whatever the learner's policy is.
    """
    behavior = np.array([0.5, 0.3, 0.2, 1e-9, 1e-9, 1e-9, 1e-9])
    batch, outputs = make_batch()
    actions = np.repeat([0, 1, 2], [5, 3, 2])
    size = len(actions)
    rows = {name: x[:2, :1].repeat(size, axis=1) for name, x in batch.items()}
    learned = {name: x[:2, :1].repeat(size, axis=1) for name, x in outputs.items()}
    rows["policy_logits"] = np.tile(np.log(behavior), (2, size, 1))
    rows["action"] = np.tile(actions, (2, 1))
    rows["reward"][:], rows["done"][:] = 0.7, True
    learned["baseline"][:] = 0.0
    target = np.tile(np.log([0.2, 0.5, 0.3, 1e-9, 1e-9, 1e-9, 1e-9]), (2, size, 1))
    logits = torch.tensor(target).requires_grad_()
    learned["policy_logits"] = logits
    flags = {"clip_rho": math.inf, "clip_pg_rho": math.inf, "entropy_cost": 0.0}
    loss, _ = loss_of(rows, learned, normalize_advantages=True, **flags)
    loss.backward()
    torch.testing.assert_close(logits.grad.sum((0, 1)), torch.zeros(A).double())


@pytest.mark.parametrize("normalize", [False, True])
def test_an_action_that_the_learner_masks_has_no_weight(normalize):
    """Its importance weight is 0, and nothing becomes NaN."""
    batch, outputs = make_batch()
    grads, losses = [], []
    for logit in (-1e4, -np.inf):
        logits = torch.tensor(outputs["policy_logits"])
        logits[1, 1, batch["action"][1, 1]] = logit
        logits.requires_grad_()
        loss, stats = loss_of(
            batch, {**outputs, "policy_logits": logits}, normalize_advantages=normalize
        )
        loss.backward()
        grads.append(logits.grad)
        losses.append(stats)
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("name", ["entropy", "total_loss", "pg_loss"])
def test_an_auxiliary_loss_named_like_a_column_is_refused(name):
    batch, outputs = make_batch()
    losses = {"mine": torch.tensor(1.0), name: torch.tensor(2.0)}
    with pytest.raises(ColumnError, match=f"two columns named {name}: rename the loss"):
        loss_of(batch, outputs, auxiliary_losses=lambda *_: losses)


def test_a_loss_over_no_steps_changes_nothing():
    """Its means are empty cells, and nothing becomes NaN."""
    learner = test_learner.make_learner("--normalize_advantages")
    batch, state = test_learner.make_batch(learner)
    weights = [x.clone() for x in learner.model.parameters()]
    none = {**batch, "valid": torch.zeros_like(batch["done"])}
    row = learn(learner, none, state).finish()
    assert row["total_loss"] == row["grad_norm"] == 0
    assert all(row[x] is None for x in ("entropy", "mean_value", "ess", "behavior_kl"))
    for x, y in zip(weights, learner.model.parameters(), strict=True):
        assert torch.equal(x, y)
