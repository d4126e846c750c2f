import argparse
import copy

import numpy as np
import pytest
import torch

from torchbeast import flags as declared_flags
from torchbeast.optimizer import advance, make_optimizer


def make_flags(**changes):
    declared = declared_flags.Optimizer.declared()
    flags = {
        **{name: flag.default for name, flag in declared.items()},
        "optimizer": "rmsprop",
        "learning_rate": 0.05,
        "momentum": 0.3,
        "epsilon": 0.02,
        "alpha": 0.9,
        "batch_size": 3,
        "unroll_length": 5,
        "total_steps": 150,
    }
    return argparse.Namespace(**{**flags, **changes})


def make(flags):
    model = torch.nn.Linear(4, 2).double()
    return model, *make_optimizer(model, flags, 15)


def update(model, optimizer, scheduler, x):
    optimizer.zero_grad()
    model(x).pow(2).sum().backward()
    optimizer.step()
    scheduler.step()


@pytest.mark.parametrize("momentum", [0.3, 0.0])
@pytest.mark.parametrize("outside", [False, True])
def test_steps_of_rmsprop(momentum, outside):
    """buffer = momentum * buffer + lr * g / sqrt(mean of g² + ε), the mean from 1."""
    flags = make_flags(momentum=momentum, epsilon_outside_root=outside)
    model, optimizer, scheduler = make(flags)
    w = model.weight.detach().numpy().copy()
    square, buffer = np.ones_like(w), np.zeros_like(w)
    for number in range(4):
        x = torch.randn(6, 4, dtype=torch.float64)
        update(model, optimizer, scheduler, x)
        g = model.weight.grad.numpy()
        square = flags.alpha * square + (1 - flags.alpha) * g**2
        rate = flags.learning_rate * (1 - number / 10)
        root = np.sqrt(square + flags.epsilon)
        if outside:
            root = np.sqrt(square) + flags.epsilon
        buffer = momentum * buffer + rate * g / root
        w = w - buffer
        np.testing.assert_allclose(model.weight.detach(), w, rtol=1e-12)


def test_adam_equals_pytorchs_and_loads_what_that_saved():
    """In one pass on a CPU; a checkpoint of before says nothing of that."""
    flags = make_flags(optimizer="adam", learning_rate_schedule="constant")
    model, optimizer, scheduler = make(flags)
    other = copy.deepcopy(model)
    plain = torch.optim.Adam(other.parameters(), lr=0.05, eps=0.02, foreach=False)
    for _ in range(3):
        x = torch.randn(6, 4, dtype=torch.float64)
        update(model, optimizer, scheduler, x)
        update(other, plain, scheduler, x)
        torch.testing.assert_close(model.weight, other.weight, rtol=1e-12, atol=0)
        assert optimizer.param_groups[0]["fused"]
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))


@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        ("linear", [1, 0.75, 0.5, 0.25, 0]),
        ("constant", [1, 1, 1, 1, 1]),
        ("cosine", [1, 0.8535534, 0.5, 0.1464466, 0]),
    ],
)
@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_schedules(optimizer, kind, shares):
    """At each quarter of the run, and after its end."""
    flags = make_flags(optimizer=optimizer, learning_rate_schedule=kind, total_steps=60)
    _, optimizer, scheduler = make(flags)
    assert optimizer.defaults["eps"] == 0.02
    optimizer.step()  # the scheduler warns if it comes first
    for share in [*shares, shares[-1]]:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * share)
        scheduler.step()


@pytest.mark.parametrize("kind", ["linear", "constant", "cosine"])
def test_a_jump_of_the_schedule_equals_its_batches(kind):
    flags = make_flags(learning_rate_schedule=kind, total_steps=15 * 997 + 4)
    _, optimizer, each = make(flags)
    optimizer.step()  # the scheduler warns if it comes first
    for batches in range(1100):
        if batches % 99 == 0:
            _, _keep, one = make(flags)
            advance(one, batches)
            assert one.get_last_lr() == each.get_last_lr()
        each.step()
    advance(one, 10**12)  # at once
