import re

import numpy as np
import pytest
import torch

from torchbeast.core import vtrace

T, B, A = 5, 3, 7


def clip(x, threshold):
    return x if threshold is None else np.minimum(x, threshold)


def ground_truth(
    log_rhos,
    discounts,
    rewards,
    values,
    bootstrap_value,
    clip_rho=1.0,
    clip_pg_rho=1.0,
    clip_c=1.0,
    trace_decay=1.0,
):
    """V-trace as the sums over products in the paper's definition.

    All arrays are [T, ...] and of one shape, bootstrap_value has no time. Returns vs
    and the policy-gradient advantages.
    """
    steps = len(values)
    rhos = np.exp(log_rhos)
    next_values = np.concatenate([values[1:], bootstrap_value[None]])
    deltas = clip(rhos, clip_rho) * (rewards + discounts * next_values - values)
    cs = trace_decay * clip(rhos, clip_c)
    vs = np.array(
        [
            values[s]
            + sum(
                np.prod(discounts[s:t] * cs[s:t], axis=0) * deltas[t]
                for t in range(s, steps)
            )
            for s in range(steps)
        ]
    )
    next_vs = np.concatenate([vs[1:], bootstrap_value[None]])
    return vs, clip(rhos, clip_pg_rho) * (rewards + discounts * next_vs - values)


def make_inputs(trailing=(), seed=1):
    """Random inputs, float64; about a third of the ρ are below 0.5 or above 2 each."""
    rng = np.random.default_rng(seed)
    shape = (T, B, *trailing)
    return {
        "log_rhos": rng.normal(scale=1.5, size=(T, B)),
        "discounts": rng.uniform(0.2, 0.99, size=shape) * (rng.random(shape) > 0.2),
        "rewards": rng.normal(size=shape),
        "values": rng.normal(scale=3.0, size=shape),
        "bootstrap_value": rng.normal(scale=3.0, size=shape[1:]),
    }


def tensors(inputs):
    return {name: torch.from_numpy(x) for name, x in inputs.items()}


@pytest.mark.parametrize("trailing", [(), (2,), (2, 4)])
@pytest.mark.parametrize(
    "settings",  # clip_rho, clip_pg_rho, clip_c, trace_decay
    [
        *((), (3.7, 2.2, 1.0, 0.9), (0.4, 5.0, 0.7, 1.0)),
        *((None, None, None, 1.0), (1.0, 2.0, 1.6, 0.3)),
    ],
)
def test_ground_truth(trailing, settings):
    inputs = make_inputs(trailing)
    given = tensors(inputs).values()
    returns = vtrace.from_importance_weights(*given, *settings)
    wide = inputs["log_rhos"].reshape(T, B, *[1] * len(trailing))
    inputs["log_rhos"] = np.broadcast_to(wide, (T, B, *trailing))
    vs, pg_advantages = ground_truth(*inputs.values(), *settings)
    np.testing.assert_allclose(returns.vs, vs, rtol=1e-12)
    np.testing.assert_allclose(returns.pg_advantages, pg_advantages, rtol=1e-12)


@pytest.mark.parametrize("name", ["rewards", "discounts", "log_rhos"])
def test_trailing_dimensions_are_broadcast(name):
    """One reward, discount or weight for several value heads."""
    inputs = make_inputs((2, 4))
    inputs["log_rhos"] = np.random.default_rng(2).normal(size=(T, B, 2, 4))
    for narrow in ((..., slice(0, 1)), (..., slice(1, 2), slice(None))):
        given = {**inputs, name: inputs[name][narrow]}
        assert given[name].size < inputs[name].size
        returns = vtrace.from_importance_weights(**tensors(given))
        wide = np.broadcast_to(given[name], (T, B, 2, 4))
        vs, pg_advantages = ground_truth(**{**given, name: wide})
        np.testing.assert_allclose(returns.vs, vs, rtol=1e-12)
        np.testing.assert_allclose(returns.pg_advantages, pg_advantages, rtol=1e-12)


def test_no_gradient_flows_out():
    inputs = {k: x.requires_grad_() for k, x in tensors(make_inputs()).items()}
    inputs.pop("log_rhos")  # made of the logits
    logits = torch.randn(2, T, B, A, requires_grad=True)
    actions = torch.zeros(T, B, dtype=torch.int64)
    returns = vtrace.from_logits(logits[0], logits[1], actions, **inputs)
    assert not returns.vs.requires_grad
    assert not returns.pg_advantages.requires_grad


def test_bfloat16():
    """NumPy lacks it, so these take another way."""
    inputs = tensors(make_inputs())
    returns = vtrace.from_importance_weights(
        **{k: x.bfloat16() for k, x in inputs.items()}
    )
    expected = vtrace.from_importance_weights(**inputs).vs.bfloat16()
    torch.testing.assert_close(returns.vs, expected, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("clips", [{}, {"clip_rho": 2.5, "clip_pg_rho": None}])
def test_from_logits(clips):
    """Without arguments, the thresholds are 1."""
    rng = np.random.default_rng(3)
    behavior, target = rng.normal(scale=2.0, size=(2, T, B, A))
    actions = rng.integers(A, size=(T, B))
    inputs = make_inputs()
    del inputs["log_rhos"]
    returns = vtrace.from_logits(
        *(torch.from_numpy(x) for x in (behavior, target, actions)),
        **tensors(inputs),
        **{f"{name}_threshold": x for name, x in clips.items()},
    )
    log_mu, log_pi = np.zeros((2, T, B))
    for t in range(T):
        for b in range(B):
            a = actions[t, b]
            mu = np.exp(behavior[t, b]) / np.exp(behavior[t, b]).sum()
            pi = np.exp(target[t, b]) / np.exp(target[t, b]).sum()
            log_mu[t, b], log_pi[t, b] = np.log(mu[a]), np.log(pi[a])
    vs, pg_advantages = ground_truth(log_pi - log_mu, **inputs, **clips)
    expected = {
        "vs": vs,
        "pg_advantages": pg_advantages,
        "log_rhos": log_pi - log_mu,
        "behavior_action_log_probs": log_mu,
        "target_action_log_probs": log_pi,
    }
    assert returns._fields == tuple(expected)
    for name, x in expected.items():
        np.testing.assert_allclose(getattr(returns, name), x, rtol=1e-10, err_msg=name)


@pytest.mark.parametrize("leading", [(), (B,), (T, B), (2, T, B)])
def test_action_log_probs(leading):
    logits = 3 * torch.randn(*leading, A, dtype=torch.float64)
    actions = torch.randint(A, leading)
    expected = torch.distributions.Categorical(logits=logits).log_prob(actions)
    torch.testing.assert_close(vtrace.action_log_probs(logits, actions), expected)
    narrow = vtrace.action_log_probs(logits, actions.int())
    torch.testing.assert_close(narrow, expected)
    with pytest.raises(ValueError, match="don't fit policy_logits"):
        vtrace.action_log_probs(logits, actions.unsqueeze(-1))


@pytest.mark.parametrize(
    ("name", "shape", "trailing"),
    [
        *(("bootstrap_value", x, ()) for x in [(), (1, B), (B, 1), (1,), (T,)]),
        *(("rewards", x, ()) for x in [(T,), (B, T), (T, 1)]),
        *(("discounts", (T + 1, B), ()), ("values", (T, B, 1), ())),
        *(("log_rhos", x, ()) for x in [(T,), (B, T), (T, B, 1)]),
        *(("rewards", x, (2,)) for x in [(T, 1, 2), (1, B, 2), (T, B, 1, 2)]),
        ("bootstrap_value", (B,), (2,)),
    ],
)
def test_shapes_that_do_not_fit(name, shape, trailing):
    inputs = tensors(make_inputs(trailing))
    inputs[name] = torch.zeros(shape, dtype=torch.float64)
    shown = re.escape(str(list(shape)))
    with pytest.raises(ValueError, match=f"the shapes of .* don't fit: .*{shown}"):
        vtrace.from_importance_weights(**inputs)
