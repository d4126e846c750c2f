import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Categorical, Independent, Normal

from torchbeast.core.distributions import make_distribution

T, B, A = 5, 3, 7
SIZES = (2, 5, 3)
INF = np.inf


def box(low, high):
    return spaces.Box(np.array(low, np.float32), np.array(high, np.float32))


SPACES = {
    "discrete": spaces.Discrete(A),
    "multi_discrete": spaces.MultiDiscrete(SIZES),
    "scalar_box": spaces.Box(-2.0, 6.0, ()),
    "bounded_box": box([-2, 0, 5, 1], [2, 1, 8, 100]),
    "unbounded_box": box([-INF] * 4, [INF] * 4),
    # A width above float32, none, and the lowest and highest floats.
    "strange_box": box([-3.4e38, 0, -1e30, 0], [3.4e38, 0, 1e30, 1]),
    "partly_bounded_box": box([-INF, 0, -3, -INF], [0, INF, 5, INF]),
    "box_of_two_dimensions": box(
        [[-1, 0], [2, -5], [-INF, 0]], [[1, 4], [3, 5], [INF] * 2]
    ),
}
BOXES = [x for x in SPACES if "box" in x and x != "strange_box"]


def units(space):
    """Center and half width of every dimension; 0 and 1 if a bound is missing."""
    center, scale = np.zeros(space.shape), np.ones(space.shape)
    for i in np.ndindex(space.shape):
        if np.isfinite([space.low[i], space.high[i]]).all():
            center[i] = (space.low[i] + space.high[i]) / 2
            scale[i] = (space.high[i] - space.low[i]) / 2
    return torch.tensor(center).float(), torch.tensor(scale).float()


def oracle(space, logits):
    """torch's distributions in the units of the space."""
    if isinstance(space, spaces.Discrete):
        return Categorical(logits=logits)
    half = logits.shape[-1] // 2
    mean, x = logits[..., :half], logits[..., half:]
    center, scale = units(space)
    bounded = np.isfinite(space.low) & np.isfinite(space.high)
    std = torch.where(torch.tensor(bounded).flatten(), x.sigmoid(), x.exp())
    mean, std = (x.reshape(x.shape[:-1] + space.shape) for x in (mean, std))
    return Independent(Normal(center + scale * mean, scale * std), len(space.shape))


@pytest.mark.parametrize("name", SPACES)
def test_samples_belong_to_the_generator(name):
    distribution = make_distribution(SPACES[name])
    logits = torch.randn(T, B, distribution.num_logits)
    before = logits.clone()

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        torch.rand(1)  # the global generator has no part in it
        return [distribution.sample(logits, generator) for _ in range(10)]

    first, again, other = draw(1), draw(1), draw(2)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(first, other, strict=True))
    assert not all(torch.equal(first[0], x) for x in first[1:])
    assert torch.equal(logits, before)


# --- Discrete and MultiDiscrete ---


@pytest.mark.parametrize(
    ("name", "sizes"), [*{"discrete": (A,), "multi_discrete": SIZES}.items()]
)
def test_choices_are_independent(name, sizes):
    distribution = make_distribution(SPACES[name])
    logits = 2 * torch.randn(T, B, sum(sizes))
    parts = [Categorical(logits=x) for x in logits.split(sizes, -1)]
    draws = [torch.randint(n, (T, B)) for n in sizes]
    action, mode = torch.stack(draws, -1), torch.stack([x.mode for x in parts], -1)
    if name == "discrete":
        action, mode = action.squeeze(-1), mode.squeeze(-1)
    log_prob = sum(x.log_prob(a) for x, a in zip(parts, draws, strict=True))
    torch.testing.assert_close(distribution.log_prob(logits, action), log_prob)
    torch.testing.assert_close(
        distribution.entropy(logits), sum(x.entropy() for x in parts)
    )
    assert torch.equal(distribution.mode(logits), mode)
    one_hots = [np.eye(n)[x] for n, x in zip(sizes, draws, strict=True)]
    np.testing.assert_array_equal(
        distribution.features(action), np.concatenate(one_hots, -1)
    )


def test_discrete_samples_follow_the_probabilities():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 0.0], [3.0, *[0.0] * 6]])
    draws = make_distribution(SPACES["discrete"]).sample(
        logits.expand(20_000, 2, A), torch.Generator().manual_seed(1)
    )
    # Neighbouring environments draw independently: the joint counts factorise.
    joint = torch.bincount(draws[:, 0] * A + draws[:, 1], minlength=A * A)
    product = logits[0].softmax(-1).outer(logits[1].softmax(-1)).flatten()
    expected = 20_000 * product
    # Chi-square of 48 degrees of freedom: 94 is exceeded once in 10,000 times.
    assert ((joint - expected) ** 2 / expected).sum() < 94.0


# --- Masks ---


def allowed_actions(name):
    """[T, B, P] bool with a choice of at least one in every part, often of just one."""
    parts = []
    for n in [A] if name == "discrete" else SIZES:
        one = torch.nn.functional.one_hot(torch.randint(n, (T, B)), n)
        parts.append((torch.rand(T, B, n) < 0.4) | one.bool())
    return torch.cat(parts, -1)


@pytest.mark.parametrize("name", ["discrete", "multi_discrete"])
def test_masked_actions(name):
    """With logits of -inf, the policy and its gradients have no such actions."""
    distribution = make_distribution(SPACES[name])
    free = 2 * torch.randn(T, B, distribution.num_logits, dtype=torch.float64)
    free.requires_grad_()
    allowed = allowed_actions(name)
    logits = free.masked_fill(~allowed, -INF)
    action = distribution.sample(logits.detach())
    found = distribution.log_prob(logits, action), distribution.entropy(logits)
    # As if they were very unlikely.
    sizes = SIZES if name == "multi_discrete" else [A]
    parts = free.masked_fill(~allowed, -1e4).split(sizes, -1)
    oracles = [Categorical(logits=x) for x in parts]
    actions = action.view(T, B, -1).unbind(-1)
    log_probs = [x.log_prob(a) for x, a in zip(oracles, actions, strict=True)]
    expected = sum(log_probs), sum(x.entropy() for x in oracles)
    torch.testing.assert_close(found, expected)
    gradients = [
        torch.autograd.grad((log_prob + 0.7 * entropy).sum(), free)[0]
        for log_prob, entropy in (found, expected)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", ["discrete", "multi_discrete"])
def test_masked_actions_are_never_chosen(name):
    distribution = make_distribution(SPACES[name])
    allowed = allowed_actions(name)
    # Even if what is allowed is unlikely by its logits.
    logits = torch.where(allowed, torch.tensor(-1e30), torch.tensor(-INF))
    generator = torch.Generator().manual_seed(1)
    draws = distribution.sample(logits.expand(2000, *logits.shape), generator)
    for action in (draws, distribution.mode(logits)):
        chosen = distribution.features(action).bool()
        assert (chosen <= allowed).all()


# --- Box ---


@pytest.mark.parametrize("name", BOXES)
def test_box_log_prob_and_mode(name):
    space = SPACES[name]
    distribution = make_distribution(space)
    logits = torch.randn(T, B, distribution.num_logits).clamp(-1.5, 1.5)
    expected = oracle(space, logits)
    actions = expected.sample()
    # The unit of the log-probability is that in which the bounds are -1 and 1.
    log_unit = units(space)[1].log().sum()
    log_prob = distribution.log_prob(logits, actions) - log_unit
    near = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(log_prob, expected.log_prob(actions), **near)
    entropy = distribution.entropy(logits) + log_unit
    torch.testing.assert_close(entropy, expected.entropy(), **near)
    torch.testing.assert_close(distribution.mode(logits), expected.mean)


@pytest.mark.parametrize("name", BOXES)
def test_box_samples_have_the_mean_and_deviation(name):
    space = SPACES[name]
    distribution = make_distribution(space)
    logits = 0.5 * torch.randn(distribution.num_logits)
    n = 20_000
    generator = torch.Generator().manual_seed(1)
    draws = distribution.sample(logits.expand(n, -1), generator).reshape(n, -1)
    expected = oracle(space, logits).base_dist
    mean, std = expected.mean.flatten(), expected.stddev.flatten()
    # Five standard errors each.
    assert ((draws.mean(0) - mean).abs() < 5 * std / n**0.5).all()
    assert ((draws.std(0) - std).abs() < 5 * std / (2 * n) ** 0.5).all()
    z = (draws - mean) / std
    correlation = z.T @ z / n - torch.eye(z.shape[1])
    assert correlation.abs().max() < 5 * (2 / n) ** 0.5


def test_box_features_of_the_bounds_are_one():
    distribution = make_distribution(SPACES["bounded_box"])
    ends = torch.tensor([[-2.0, 0.0, 5.0, 1.0], [2.0, 1.0, 8.0, 100.0]])
    assert distribution.features(ends).tolist() == [[-1] * 4, [1] * 4]
    assert distribution.features(3 * ends)[1].max() == 1  # clipped


@pytest.mark.parametrize("name", ["unbounded_box", "bounded_box", "strange_box"])
def test_box_deviation_is_limited(name):
    distribution = make_distribution(SPACES[name])
    low, high = (torch.tensor([0.0] * 4 + [x] * 4) for x in (-1000.0, 1000.0))
    for logits in (low, high):
        action = distribution.sample(logits)
        assert distribution.log_prob(logits, action).isfinite()
        assert distribution.entropy(logits).isfinite()
    assert distribution.entropy(low) < distribution.entropy(high)
    if name == "bounded_box":  # at most half of the range
        most = Normal(torch.zeros(4), torch.ones(4)).entropy().sum()
        torch.testing.assert_close(distribution.entropy(high), most)


# --- Other spaces ---


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiBinary(3),
        spaces.Tuple((spaces.Discrete(2),)),
        spaces.MultiDiscrete([[2, 3], [4, 5]]),
        spaces.Box(0, 255, (3,), np.uint8),
    ],
)
def test_unsupported_spaces_are_named(space):
    with pytest.raises(ValueError, match="supported are Discrete") as error:
        make_distribution(space)
    assert str(space) in str(error.value)
