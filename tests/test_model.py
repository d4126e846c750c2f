import numpy as np
import pytest
import torch
from gymnasium import spaces
from nets import (
    ACTION_SPACES,
    MINATAR,
    OBSERVATION_SPACES,
    PONG,
    VECTOR,
    B,
    T,
    assert_same,
    make_net,
    make_rows,
    random_state,
)
from torch import nn


def leaf_places(x, place=()):
    """The paths of the leaves: sequences of names and indices."""
    if isinstance(x, dict | tuple):
        for key in x if isinstance(x, dict) else range(len(x)):
            yield from leaf_places(x[key], (*place, key))
    else:
        yield place


def with_leaf(x, place, leaf):
    """A copy of a nested structure with one leaf replaced."""
    if not place:
        return leaf
    if isinstance(x, dict):
        return {**x, place[0]: with_leaf(x[place[0]], place[1:], leaf)}
    parts = list(x)
    parts[place[0]] = with_leaf(x[place[0]], place[1:], leaf)
    return tuple(parts)


def get_leaf(x, place):
    for key in place:
        x = x[key]
    return x


# --- Spaces ---


@pytest.mark.parametrize("action", ACTION_SPACES)
@pytest.mark.parametrize("observation", OBSERVATION_SPACES)
def test_every_leaf_reaches_the_outputs_and_every_weight_learns(observation, action):
    observation_space = OBSERVATION_SPACES[observation]
    action_space = ACTION_SPACES[action]
    net = make_net(observation_space, action_space)
    rows = make_rows(observation_space, action_space)
    outputs, state = net(rows)
    num_logits = {"discrete": 7, "multi_discrete": 10, "box": 16}[action]
    assert outputs["policy_logits"].shape == (T, B, num_logits)
    assert outputs["baseline"].shape == (T, B)
    assert all(x.dtype == torch.float32 for x in outputs.values())
    assert state == ()
    # Both kinds of features end with the last action, as in checkpoints of before.
    last = net.distribution.features(rows["last_action"].flatten(0, 1))
    last = last * ~rows["done"].reshape(-1, 1)
    assert all(torch.equal(x[:, -last.shape[1] :], last) for x in net.encode(rows))

    (outputs["policy_logits"].sum() + outputs["baseline"].sum()).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad.abs().sum() > 0, name

    others = {
        key: make_rows(observation_space, action_space, seed=2)[key]
        for key in ("observation", "reward", "last_action")
    }
    for place in leaf_places(others):
        changed = with_leaf(rows, place, get_leaf(others, place))
        for name, x in net(changed)[0].items():
            assert not torch.equal(x, outputs[name]), (place, name)


def test_order_of_a_dict_observation_does_not_count():
    space = OBSERVATION_SPACES["nested"]
    net = make_net(space, ACTION_SPACES["discrete"])
    rows = make_rows(space, ACTION_SPACES["discrete"])
    observation = rows["observation"]
    assert list(observation) != list(space.spaces)
    ordered = {name: observation[name] for name in space.spaces}
    assert_same(net({**rows, "observation": ordered})[0], net(rows)[0], rtol=0, atol=0)


# --- Published sizes ---


@pytest.mark.parametrize(
    ("torso", "use_lstm", "size"),
    [
        # Convolutions, linear layer, core (four gates with two biases each), heads.
        ("shallow", False, 8_224 + 32_832 + 36_928 + 1_606_144 + 520 * 7),
        ("shallow", True, 1_684_128 + 4 * (519 * 256 + 256 * 256 + 512) + 257 * 7),
        ("deep", False, 9_872 + 41_632 + 46_240 + 991_488 + 264 * 7),
        ("deep", True, 1_089_232 + 4 * (263 * 256 + 256 * 256 + 512) + 257 * 7),
    ],
)
def test_published_number_of_parameters_for_pong(torso, use_lstm, size):
    net = make_net(PONG, spaces.Discrete(6), torso, use_lstm)
    assert sum(p.numel() for p in net.parameters()) == size


# --- Width and normalization of the encoders ---


@pytest.mark.parametrize("torso", ["shallow", "deep"])
@pytest.mark.parametrize("observation", ["atari", "minatar", "vector", "nested"])
def test_wider_encoders(observation, torso):
    """Twice the width: features twice as many, weights between layers four times."""
    space, action = OBSERVATION_SPACES[observation], ACTION_SPACES["discrete"]
    net, wide, thin = (
        make_net(space, action, torso, encoder_width=x) for x in (1.0, 2.0, 0.001)
    )
    rest = 1 + action.n  # last reward and last action
    features = net.policy.in_features - rest
    assert wide.policy.in_features - rest == 2 * features
    encoders = len(net.images) + (net.vector is not None)
    assert thin.policy.in_features - rest == encoders  # at least one unit
    for x, y in zip(net.parameters(), wide.parameters(), strict=True):
        if x.ndim > 1 and x.shape[1] % 16 == 0 and len(x) > action.n:
            assert y.numel() == 4 * x.numel()


@pytest.mark.parametrize("torso", ["shallow", "deep"])
@pytest.mark.parametrize("observation", ["atari", "minatar", "vector", "nested"])
def test_layers_are_normalized(observation, torso):
    """The input of each activation has mean 0 and variance 1 in each sample."""
    space, action = OBSERVATION_SPACES[observation], ACTION_SPACES["discrete"]
    net = make_net(space, action, torso, layer_norm=True)
    norms = [x for x in net.modules() if isinstance(x, nn.GroupNorm)]
    plain = {type(x) for x in make_net(space, action, torso).modules()}
    assert norms
    assert nn.GroupNorm not in plain
    seen = []
    for norm in norms:
        norm.register_forward_hook(lambda _, __, out: seen.append(out.flatten(1)))
    rows = make_rows(space, action)
    net(rows)
    assert len(seen) == len(norms)
    for x in seen:
        torch.testing.assert_close(x.mean(1), torch.zeros(len(x)), atol=1e-4, rtol=0)
        assert (x.var(1, unbiased=False) < 1.001).all()
        assert (x.var(1, unbiased=False) > 0.5).all()


# --- bfloat16 ---


@pytest.mark.parametrize("observation", ["atari", "minatar", "nested"])
@pytest.mark.parametrize("torso", ["shallow", "deep"])
def test_encoders_stored_in_bf16_equal_autocast(observation, torso):
    """Actors store bfloat16 weights, the learner casts them: same results."""
    space, action = OBSERVATION_SPACES[observation], ACTION_SPACES["discrete"]
    net, acting = (make_net(space, action, torso, True, precision="bf16") for _ in "12")
    rows, state = make_rows(space, action), random_state(net)
    acting.encoders_to(torch.bfloat16)
    acting.load_state_dict(net.state_dict())
    for encoder in acting.images:
        assert {p.dtype for p in encoder.parameters()} == {torch.bfloat16}
    for part in filter(None, (acting.core, acting.vector)):
        assert {p.dtype for p in part.parameters()} == {torch.float32}
    with torch.inference_mode():
        assert_same(acting(rows, state)[0], net(rows, state)[0], rtol=0, atol=0)


@pytest.mark.parametrize("acting", [False, True])
def test_bf16_does_not_round_vectors(acting):
    """bfloat16 has no 257, so integers beside an image must stay in float32."""
    numbers = spaces.Box(0, 10_000, (3,), np.int32)
    space = spaces.Dict({"map": MINATAR, "numbers": numbers})
    net = make_net(space, ACTION_SPACES["discrete"], precision="bf16")
    rows = make_rows(space, ACTION_SPACES["discrete"])
    rows["observation"]["numbers"][:] = torch.tensor([256, 5000, 9999])
    near = with_leaf(
        rows, ("observation", "numbers"), rows["observation"]["numbers"] + 1
    )
    expected, expected_near = (net.eval()(x)[0] for x in (rows, near))
    if acting:
        net.encoders_to(torch.bfloat16)
    outputs, outputs_near = (net(x)[0] for x in (rows, near))
    assert_same(outputs, expected, rtol=0, atol=0)
    assert_same(outputs_near, expected_near, rtol=0, atol=0)
    for name, x in outputs.items():
        assert not torch.equal(x, outputs_near[name])


@pytest.mark.parametrize(
    ("observation", "use_lstm", "shared"),
    [("vector", False, False), ("vector", True, True), ("nested", False, True)],
)
def test_the_values_of_vectors_have_an_mlp_of_their_own(observation, use_lstm, shared):
    space, action_space = OBSERVATION_SPACES[observation], ACTION_SPACES["discrete"]
    net = make_net(space, action_space, use_lstm=use_lstm)
    rows = make_rows(space, action_space)
    outputs, _ = net(rows, net.initial_state(B))
    outputs["baseline"].sum().backward(retain_graph=True)
    moved = {name for name, x in net.named_parameters() if x.grad is not None}
    net.zero_grad()
    outputs["policy_logits"].sum().backward()
    moved &= {name for name, x in net.named_parameters() if x.grad is not None}
    assert bool(moved) == shared


@pytest.mark.parametrize("normalize", [True, False])
def test_tanh_is_for_normalized_numbers(normalize):
    net = make_net(VECTOR, ACTION_SPACES["discrete"], normalize_observations=normalize)
    kinds = {type(module) for module in net.modules()}
    assert (nn.Tanh in kinds) == normalize != (nn.ReLU in kinds)
