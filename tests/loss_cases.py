"""A batch, the loss of it, and the same loss step by step in NumPy."""

import argparse
import math
import types

import numpy as np
import torch
from gymnasium import spaces
from nets import map_leaves
from test_vtrace import ground_truth

from torchbeast import flags as declared_flags
from torchbeast import learner
from torchbeast.core import means
from torchbeast.core.columns import join_columns
from torchbeast.core.distributions import make_distribution

T, B, A = 5, 3, 7
FLAGS = {
    **{name: flag.default for name, flag in declared_flags.Loss.declared().items()},
    "reward_clipping": "abs_one",
    "discounting": 0.9,
    "baseline_cost": 0.7,
    "entropy_cost": 0.3,
    "clip_rho": 1.0,
    "clip_pg_rho": 1.0,
    "clip_c": 1.0,
    "trace_decay": 1.0,
    "normalize_advantages": False,
    "clip_ratio": math.inf,
    "kl_threshold": 0.3,
}
DISTRIBUTION = make_distribution(spaces.Discrete(A))


def make_batch(seed=1):
    """A batch and the learner's outputs, NumPy, float64, rows 0 to T.

    Environment 1 terminates in row 3, environment 2 is truncated in row 2, environment
    0 terminates in row 0, which was learned from before.
    """
    rng = np.random.default_rng(seed)
    batch = {
        "action": rng.integers(A, size=(T + 1, B)),
        "policy_logits": rng.normal(size=(T + 1, B, A)),
        "reward": rng.normal(scale=2.0, size=(T + 1, B)),
        "done": np.zeros((T + 1, B), bool),
        "truncated": np.zeros((T + 1, B), bool),
        "truncation_value": np.zeros((T + 1, B)),
        "baseline": rng.normal(size=(T + 1, B)),  # of the actor: plays no part
    }
    for place in ((0, 0), (3, 1), (2, 2)):
        batch["done"][place] = True
    batch["truncated"][2, 2] = True
    batch["truncation_value"][2, 2] = 4.25
    outputs = {
        "policy_logits": batch["policy_logits"] + rng.normal(size=(T + 1, B, A)),
        "baseline": rng.normal(scale=2.0, size=(T + 1, B)),
    }
    return batch, outputs


class Replaying(types.SimpleNamespace):
    """A learner without a model, but for its outputs."""

    @property
    def mixer(self):
        from torchbeast.extras.replay.mixer import Mixer

        return Mixer


def loss_of(
    batch,
    outputs,
    progress=0.0,
    distribution=DISTRIBUTION,
    auxiliary_losses=lambda *_: {},
    **changes,
):
    """The total loss and its columns, as the learner gets them from its model."""
    flags = argparse.Namespace(**{**FLAGS, **changes})
    rows = {name: map_leaves(torch.as_tensor, x) for name, x in batch.items()}
    outputs = {name: torch.as_tensor(x) for name, x in outputs.items()}

    def model(batch, state):
        return outputs, state

    model.distribution, model.auxiliary_losses = distribution, auxiliary_losses
    loss = learner.make_loss(flags, model)
    fake = Replaying(flags=flags, model=model, loss=loss)
    total, sums, columns = learner.model_loss(fake, rows, (), progress)
    return total, means.fetch(join_columns(sums, columns), sums)()


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def oracle_targets(batch, outputs, **changes):
    """vs and advantages [T, B], and log ρ, step by step from the data contract."""
    flags = {**FLAGS, **changes}
    log_mu = log_softmax(batch["policy_logits"])
    log_pi = log_softmax(outputs["policy_logits"])
    log_rhos, rewards, discounts = np.zeros((3, T, B))
    for t in range(T):
        for b in range(B):
            a = batch["action"][t, b]
            log_rhos[t, b] = log_pi[t, b, a] - log_mu[t, b, a]
            # Row t + 1 has the result of row t's action.
            reward = batch["reward"][t + 1, b]
            if flags["reward_clipping"] == "abs_one":
                reward = min(1, max(-1, reward))
            if batch["truncated"][t + 1, b]:
                reward += flags["discounting"] * batch["truncation_value"][t + 1, b]
            rewards[t, b] = reward
            discounts[t, b] = 0 if batch["done"][t + 1, b] else flags["discounting"]
    values = outputs["baseline"]
    names = ("clip_rho", "clip_pg_rho", "clip_c", "trace_decay")
    settings = {name: flags[name] for name in names}
    targets = ground_truth(
        log_rhos, discounts, rewards, values[:T], values[T], **settings
    )
    return *targets, log_rhos


def oracle_parts(batch, logits, baseline, vs, pg_advantages, **changes):
    """The parts of the loss, given the targets."""
    flags = {**FLAGS, **changes}
    log_pi = log_softmax(logits)
    pg = squared = negative_entropy = 0.0
    for t in range(T):
        for b in range(B):
            pg -= log_pi[t, b, batch["action"][t, b]] * pg_advantages[t, b]
            squared += (vs[t, b] - baseline[t, b]) ** 2
            negative_entropy += (np.exp(log_pi[t, b]) * log_pi[t, b]).sum()
    return {
        "pg_loss": pg,
        "baseline_loss": flags["baseline_cost"] * squared / 2,
        "entropy_loss": flags["entropy_cost"] * negative_entropy,
    }
