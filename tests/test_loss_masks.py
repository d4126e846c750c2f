"""The loss of masked steps and of replayed columns."""

import math

import numpy as np
import pytest
import torch
from loss_cases import B, T, log_softmax, loss_of, make_batch, oracle_targets


def joined(batch, outputs, mask=None, replayed=None, **changes):
    more = {}
    if mask is not None:
        more["valid"] = np.asarray(mask)
    if replayed is not None:
        more["replayed"] = np.asarray(replayed)
    learned = {name: torch.tensor(x).requires_grad_() for name, x in outputs.items()}
    loss, stats = loss_of({**batch, **more}, learned, **changes)
    loss.backward()
    return loss.item(), stats, {name: x.grad for name, x in learned.items()}


def test_a_masked_step_does_not_count():
    """Nothing is learned at it, and the target before it is its value."""
    batch, outputs = make_batch()
    mask = np.ones((T + 1, B), bool)
    mask[3, 0] = mask[1, 2] = False
    unclipped = {"reward_clipping": "none"}
    _, stats, gradients = joined(batch, outputs, mask, **unclipped)
    for name in ("policy_logits", "baseline"):
        assert not gradients[name][3, 0].any()
        assert gradients[name][2, 0].any()
    # The rows after the masked step do not count for those before it.
    changed = {name: x.copy() for name, x in batch.items()}
    changed["reward"][4:, 0] += 0.5  # of the steps from row 3 on
    changed["reward"][2:, 2] -= 0.5
    after = joined(changed, outputs, mask, **unclipped)[2]
    for name in ("policy_logits", "baseline"):
        torch.testing.assert_close(gradients[name][:3, 0], after[name][:3, 0])
        torch.testing.assert_close(gradients[name][0, 2], after[name][0, 2])
        assert not torch.equal(gradients[name][4, 0], after[name][4, 0])
    log_pi = log_softmax(outputs["policy_logits"])[:-1]
    entropy = -(np.exp(log_pi) * log_pi).sum(-1)
    counted = mask[:-1]
    assert stats["entropy"].item() == pytest.approx(entropy[counted].mean())
    values = outputs["baseline"][:-1][counted]
    assert stats["mean_value"].item() == pytest.approx(values.mean())
    rhos = np.exp(oracle_targets(batch, outputs)[2][counted])
    ess = rhos.mean() ** 2 / np.square(rhos).mean()
    assert stats["ess"].item() == pytest.approx(ess)


def test_advantages_are_normalized_over_what_counts():
    batch, outputs = make_batch()
    mask = np.ones((T + 1, B), bool)
    mask[:, 1] = False
    scaled = {"normalize_advantages": True, "entropy_cost": 0.0}
    _, stats, _ = joined(batch, outputs, mask, **scaled)
    without = [
        {name: np.delete(x, 1, axis=1) for name, x in nested.items()}
        for nested in (batch, outputs)
    ]
    _, expected, _ = joined(*without, **scaled)
    assert stats["pg_loss"].item() == pytest.approx(expected["pg_loss"].item())


def test_rejection_against_a_loop():
    """KL(π ‖ π̃) by its definition; rejected steps cut the trace."""
    batch, outputs = make_batch()
    outputs["policy_logits"] = batch["policy_logits"] + 0.6 * (
        outputs["policy_logits"] - batch["policy_logits"]
    )
    replayed = np.array([True, False, True])
    mask = np.ones((T + 1, B), bool)
    for t in range(T):
        for b in range(B):
            pi = np.exp(log_softmax(outputs["policy_logits"][t, b]))
            mu = np.exp(log_softmax(batch["policy_logits"][t, b]))
            implied = np.minimum(0.7 * mu, pi) / np.minimum(0.7 * mu, pi).sum()
            mask[t, b] = not replayed[b] or (pi * np.log(pi / implied)).sum() <= 0.05
    rejected = ~mask[:-1]
    assert 2 <= rejected.sum() < replayed.sum() * T - 1
    flags = {"kl_threshold": 0.05, "entropy_cost": 0.0, "clip_rho": 0.7}
    _, stats, gradients = joined(batch, outputs, replayed=replayed, **flags)
    _, _, expected = joined(batch, outputs, mask, **flags)
    share = rejected.sum() / (replayed.sum() * T)
    assert stats["frac_rejected"].item() == pytest.approx(share)
    for name, x in gradients.items():
        torch.testing.assert_close(x, expected[name])


def test_the_entropy_of_replayed_steps_does_not_count():
    batch, outputs = make_batch()
    cost = {"entropy_cost": 2.0, "baseline_cost": 0.0, "kl_threshold": math.inf}
    replayed = np.array([False, True, False])
    _, stats, with_cost = joined(batch, outputs, replayed=replayed, **cost)
    _, _, without = joined(
        batch, outputs, replayed=replayed, **{**cost, "entropy_cost": 0.0}
    )
    difference = with_cost["policy_logits"] - without["policy_logits"]
    assert not difference[:, 1].any()
    assert difference[:-1, 0].any()
    log_pi = log_softmax(outputs["policy_logits"])[:-1]
    entropy = -(np.exp(log_pi) * log_pi).sum(-1)
    assert stats["entropy"].item() == pytest.approx(entropy[:, ~replayed].mean())
