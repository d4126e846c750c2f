import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from torchbeast.core.distributions import make_distribution
from torchbeast.extras.replay.mixer import implied_kl


@pytest.mark.parametrize("dims", [6, 17])
def test_implied_kl_of_narrow_policies_stays_finite(dims):
    """Log-ratios of hundreds of nats, which exp() would round to 0."""
    distribution = make_distribution(spaces.Box(-np.inf, np.inf, (dims,)))
    behavior = torch.cat([torch.zeros(dims), torch.full((dims,), np.log(0.05))])
    target = torch.cat([torch.full((dims,), 0.5), torch.full((dims,), np.log(0.14))])
    torch.manual_seed(1)
    found = implied_kl(distribution, target, behavior, 1.0)
    assert 10 * dims < found.item() < 100 * dims


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
