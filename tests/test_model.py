import numpy as np
import pytest
import torch
from gymnasium import spaces
from nets import make_net
from torch import nn

from torchbeast.core.distributions import make_distribution
from torchbeast.core.observations import (
    InputCheck,
    flatten_leaf,
    image_size,
    is_image,
    log_encoders,
)
from torchbeast.encoders import ImageEncoder

T, B, A = 5, 3, 7
PONG = spaces.Box(0, 255, (84, 84, 4), np.uint8)
MINATAR = spaces.Box(0, 1, (10, 10, 4), bool)
VECTOR = spaces.Box(-np.inf, np.inf, (9,), np.float64)

OBSERVATION_SPACES = {
    "atari": PONG,
    "atari_channels_first": spaces.Box(0, 255, (4, 84, 84), np.uint8),
    "rgb": spaces.Box(0, 255, (40, 56, 3), np.uint8),
    "minatar": MINATAR,
    "minatar_ten_channels": spaces.Box(0, 1, (10, 10, 10), bool),
    "grid": spaces.Box(0, 10, (7, 7, 3), np.uint8),
    "float_image": spaces.Box(-np.inf, np.inf, (1, 12, 20), np.float32),
    "vector": VECTOR,
    "scalar": spaces.Box(-1.0, 1.0, ()),
    "matrix": spaces.Box(-1.0, 1.0, (2, 5)),
    "small_cube": spaces.Box(0, 9, (11, 4, 2), np.int16),
    "discrete": spaces.Discrete(6, start=-2),
    "multi_discrete": spaces.MultiDiscrete([3, 5, 2], start=[0, 1, -1]),
    "multi_discrete_matrix": spaces.MultiDiscrete([[3, 5], [2, 4]]),
    "multi_discrete_unsigned": spaces.MultiDiscrete([3, 5], np.uint16, start=[7, 1]),
    "multi_binary": spaces.MultiBinary([2, 3]),
    "dict": spaces.Dict({"position": VECTOR, "carries": spaces.Discrete(3)}),
    "tuple": spaces.Tuple([MINATAR, spaces.MultiBinary(4)]),
    "nested": spaces.Dict(
        {
            "cameras": spaces.Tuple(
                [PONG, spaces.Dict({"map": MINATAR, "goal": spaces.Discrete(5)})]
            ),
            "body": spaces.Dict({"joints": VECTOR, "touch": spaces.MultiBinary(2)}),
            "clock": spaces.Box(0.0, 1.0, ()),
        }
    ),
}
ACTION_SPACES = {
    "discrete": spaces.Discrete(A),
    "multi_discrete": spaces.MultiDiscrete([2, 5, 3]),
    "box": spaces.Box(-2.0, 2.0, (2, 4)),
}


def sample(space, leading, rng):
    """Random observations [*leading, ...] in the structure of a space, as buffers."""
    if isinstance(space, spaces.Dict):
        # Not the order of the space: only the names count.
        return {k: sample(s, leading, rng) for k, s in reversed(space.spaces.items())}
    if isinstance(space, spaces.Tuple):
        return tuple(sample(s, leading, rng) for s in space.spaces)
    shape = (*leading, *space.shape)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        sizes = space.n if isinstance(space, spaces.Discrete) else space.nvec
        numbers = rng.integers(0, sizes, shape) + np.asarray(space.start, np.int64)
        return torch.from_numpy(np.asarray(numbers))
    if space.dtype.kind == "f":
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32))
    high = 1 if isinstance(space, spaces.MultiBinary) else space.high.max()
    return torch.from_numpy(rng.integers(0, int(high) + 1, shape).astype(space.dtype))


def make_rows(observation_space, action_space, seed=1, rows=T, done=()):
    """Random rows [T, B], where episodes start only at `done`, pairs (t, b)."""
    rng = np.random.default_rng(seed)
    begins = torch.zeros(rows, B, dtype=torch.bool)
    for place in done:
        begins[place] = True
    distribution = make_distribution(action_space)
    return {
        "observation": sample(observation_space, (rows, B), rng),
        "reward": torch.from_numpy(rng.normal(size=(rows, B))).float(),
        "done": begins,
        "last_action": distribution.sample(
            torch.from_numpy(rng.normal(size=(rows, B, distribution.num_logits))),
        ).to(distribution.action_dtype),
    }


def map_leaves(f, x):
    if isinstance(x, dict):
        return {name: map_leaves(f, part) for name, part in x.items()}
    if isinstance(x, tuple):
        return tuple(map_leaves(f, part) for part in x)
    return f(x)


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


def random_state(net, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(x.shape, generator=generator) for x in net.initial_state(B)
    )


def assert_same(outputs, expected, **tolerances):
    assert outputs.keys() == expected.keys()
    for name in outputs:
        torch.testing.assert_close(outputs[name], expected[name], **tolerances)


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


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize("torso", ["shallow", "deep"])
@pytest.mark.parametrize("observation", ["atari", "minatar", "vector", "nested"])
def test_torsos_and_cores(observation, torso, use_lstm):
    space = OBSERVATION_SPACES[observation]
    net = make_net(space, ACTION_SPACES["discrete"], torso, use_lstm)
    state = net.initial_state(B)
    assert [x.shape for x in state] == ([(1, B, 256)] * 2 if use_lstm else [])
    assert all(not x.any() for x in state)
    outputs, new_state = net(make_rows(space, ACTION_SPACES["discrete"]), state)
    assert outputs["policy_logits"].shape == (T, B, A)
    assert outputs["baseline"].shape == (T, B)
    assert [x.shape for x in new_state] == [x.shape for x in state]
    assert all(x.any() for x in new_state)


def test_order_of_a_dict_observation_does_not_count():
    space = OBSERVATION_SPACES["nested"]
    net = make_net(space, ACTION_SPACES["discrete"])
    rows = make_rows(space, ACTION_SPACES["discrete"])
    observation = rows["observation"]
    assert list(observation) != list(space.spaces)
    ordered = {name: observation[name] for name in space.spaces}
    assert_same(net({**rows, "observation": ordered})[0], net(rows)[0], rtol=0, atol=0)


@pytest.mark.parametrize("observation", ["discrete", "multi_discrete"])
def test_integers_are_one_hot_from_their_start(observation):
    space = OBSERVATION_SPACES[observation]
    net = make_net(space, ACTION_SPACES["discrete"])
    encoded = []
    net.vector.layers.register_forward_pre_hook(lambda _, x: encoded.append(x[0]))
    rows = make_rows(space, ACTION_SPACES["discrete"])
    net(rows)
    x = rows["observation"].numpy().reshape(T * B, -1) - np.atleast_1d(space.start)
    sizes = [6] if observation == "discrete" else [3, 5, 2]
    expected = [np.eye(n)[x[:, i]] for i, n in enumerate(sizes)]
    np.testing.assert_array_equal(encoded[0], np.concatenate(expected, axis=1))


# --- Images ---


@pytest.mark.parametrize("torso", ["shallow", "deep"])
@pytest.mark.parametrize("shape", [(84, 60, 4), (10, 12, 6)])
def test_channels_last_and_first_give_the_same(torso, shape):
    space = spaces.Box(0, 255, shape, np.uint8)
    turned = spaces.Box(0, 255, (shape[2], shape[0], shape[1]), np.uint8)
    net = make_net(space, ACTION_SPACES["discrete"], torso)
    turned_net = make_net(turned, ACTION_SPACES["discrete"], torso)
    turned_net.load_state_dict(net.state_dict())
    rows = make_rows(space, ACTION_SPACES["discrete"])
    observation = rows["observation"].permute(0, 1, 4, 2, 3).contiguous()
    assert_same(turned_net({**rows, "observation": observation})[0], net(rows)[0])


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((7, 7, 20), (7, 7, 20)),  # MiniGrid's one-hot image: more channels than pixels
        ((20, 7, 7), (7, 7, 20)),
        ((4, 84, 84), (84, 84, 4)),
        ((210, 160, 3), (210, 160, 3)),
        ((3, 210, 160), (210, 160, 3)),
        ((9, 9, 9), (9, 9, 9)),
        ((36, 84), (36, 84, 1)),
        ((4, 84, 80, 3), (84, 80, 12)),
        ((4, 3, 84, 80), (84, 80, 12)),
    ],
)
def test_the_axis_of_the_channels(shape, size):
    space = spaces.Box(0, 1, shape, np.uint8)
    assert is_image(space)
    assert image_size(space) == size
    encoder = ImageEncoder(space, "shallow")
    first = next(x for x in encoder.parameters() if x.ndim == 4)
    assert first.shape[1] == size[-1]
    encoder(torch.ones(2, *shape, dtype=torch.uint8))


def test_an_image_without_pixels_is_no_image():
    assert not is_image(spaces.Box(0, 255, (0, 8, 8), np.uint8))


@pytest.mark.parametrize("shape", [(4, 20, 30, 3), (4, 3, 20, 30)])
def test_the_channels_of_a_stack_are_those_of_its_images(shape):
    encoder = ImageEncoder(spaces.Box(0, 255, shape, np.uint8), "shallow")
    x = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    images = x if shape[1] == 3 else x.permute(0, 1, 4, 2, 3)
    joined = torch.cat(images.unbind(1), 1).float() / 255
    torch.testing.assert_close(encoder(x), encoder.torso(joined))


@pytest.mark.parametrize("torso", ["shallow", "deep"])
@pytest.mark.parametrize(
    "shape", [(16, 1024, 1), (1024, 16), (7, 5000, 3), (40, 2000), (480, 640, 3)]
)
def test_large_images_have_no_more_weights_than_screens_of_atari(shape, torso):
    def count(shape):
        space = spaces.Box(0, 255, shape, np.uint8)
        net = make_net(space, ACTION_SPACES["discrete"], torso)
        net(make_rows(space, ACTION_SPACES["discrete"], rows=1))
        return sum(x.numel() for x in net.parameters())

    assert count(shape) < 6 * count((210, 160, 3))


def test_as_many_channels_as_pixels_are_taken_as_last():
    """MinAtar's Seaquest: 10 x 10 pixels of 10 channels."""
    net = make_net(
        OBSERVATION_SPACES["minatar_ten_channels"], ACTION_SPACES["discrete"]
    )
    image = torch.rand(1, 10, 10, 10)
    expected = net.images[0].torso(image.permute(0, 3, 1, 2))
    torch.testing.assert_close(net.images[0](image), expected)


def test_images_are_scaled_to_one():
    space = spaces.Box(0, 255, (40, 56, 3), np.uint8)
    unit_space = spaces.Box(0.0, 1.0, (40, 56, 3))
    net = make_net(space, ACTION_SPACES["discrete"])
    unit_net = make_net(unit_space, ACTION_SPACES["discrete"])
    unit_net.load_state_dict(net.state_dict())
    rows = make_rows(space, ACTION_SPACES["discrete"])
    units = {**rows, "observation": rows["observation"].float() / 255}
    assert_same(net(rows)[0], unit_net(units)[0])
    assert not torch.allclose(
        net(rows)[0]["baseline"], unit_net(rows)[0]["baseline"], atol=0.01
    )


def test_a_bound_of_the_dtype_is_no_scale():
    for high in (np.finfo(np.float32).max, np.inf):
        space = spaces.Box(0.0, high, (40, 56, 3))
        assert make_net(space, ACTION_SPACES["discrete"]).images[0].scale == 1


def test_integers_are_scaled_by_their_bounds():
    low, high = np.array([-50, 0, 9_000, 0, -(2**31)]), [7, 10_000, 10_000, 1, 9]
    space = spaces.Box(low, np.array(high), dtype=np.int64)
    x = torch.tensor([low.tolist(), high])
    logs = -np.log1p(2.0**31), np.log1p(9)
    wanted = torch.tensor([[-1, 0, 0.9, 0, logs[0]], [0.14, 1, 1, 1, logs[1]]])
    torch.testing.assert_close(flatten_leaf(space, x), wanted.float())
    assert flatten_leaf(spaces.Box(-9, 9, (2,)), torch.ones(1, 2)).eq(1).all()  # floats


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint32, np.int64])
def test_integers_of_any_size_make_no_certain_policy(dtype):
    limits = np.iinfo(dtype)
    space = spaces.Box(limits.min, limits.max, (3,), dtype)
    net = make_net(space, ACTION_SPACES["discrete"])
    rows = make_rows(spaces.Discrete(2), ACTION_SPACES["discrete"])
    for value in (limits.min, 1000 % limits.max, limits.max // 2 + 1):
        rows["observation"] = torch.full((T, B, 3), int(value), dtype=torch.int64)
        logits = net(rows)[0]["policy_logits"]
        assert net.distribution.entropy(logits).min() > 0.9 * np.log(A)


def test_vectors_of_bytes_are_scaled_by_their_bound():
    for high in (1, 9, 255):
        space = spaces.Box(0, high, (2, 3), np.uint8)
        x = torch.full((4, 2, 3), high, dtype=torch.uint8)
        assert torch.equal(flatten_leaf(space, x), torch.ones(4, 6))
    nothing = spaces.Box(-1, 1, (0, 3))
    assert flatten_leaf(nothing, torch.zeros(4, 0, 3)).shape == (4, 0)


@pytest.mark.parametrize(
    ("shape", "images"),
    [
        ((7, 7, 3), 1),
        ((3, 7, 9), 1),
        ((36, 36, 1), 1),
        ((35, 90, 3), 1),
        ((6, 7, 3), 0),
        ((100, 3, 7), 0),
        ((7, 3, 100), 0),
        ((84, 84), 1),
        ((36, 1024), 1),
        ((35, 84), 0),
        ((2, 84, 84, 3), 1),
        ((2, 3, 20, 30), 1),
        ((2, 6, 84, 3), 0),
        ((2, 2, 84, 84, 3), 0),
    ],
)
@pytest.mark.parametrize("torso", ["shallow", "deep"])
def test_what_counts_as_an_image(shape, images, torso):
    space = spaces.Box(0, 255, shape, np.uint8)
    net = make_net(space, ACTION_SPACES["discrete"], torso)
    assert len(net.images) == images
    net(make_rows(space, ACTION_SPACES["discrete"]))


# --- What the learner says about the inputs ---


def batch_of(space, observation, logits=None):
    """A batch of a learner's first update [T, B, ...]."""
    rows = make_rows(space, ACTION_SPACES["discrete"])
    logits = torch.zeros(T, B, A) if logits is None else logits
    version = torch.zeros(T, B, dtype=torch.int64)
    rows |= {"policy_logits": logits, "policy_version": version}
    return {**rows, "observation": observation}


def test_large_inputs_are_named_once(caplog):
    space = spaces.Dict(
        {
            "bounded": spaces.Box(0, 10_000, (2,), np.int32),
            "depth": spaces.Box(0, np.inf, (9, 9, 1)),
            "far": spaces.Box(-np.inf, np.inf, (2,)),
            "near": spaces.Box(-np.inf, np.inf, (2,)),
        }
    )
    distribution = make_distribution(ACTION_SPACES["discrete"])
    shapes = {name: (T, B, *leaf.shape) for name, leaf in space.items()}
    values = {"bounded": 5000, "depth": 300, "far": -101, "near": 99}
    large = {name: torch.full(shapes[name], x) for name, x in values.items()}
    large["near"][0] = 1e6  # an outlier
    check = InputCheck(space, normalized=False)
    for _ in range(5):
        check.see(batch_of(space, large), distribution)
    assert len(caplog.records) == 2
    for record, place in zip(caplog.records, ("depth", "far"), strict=True):
        assert record.message.startswith(f"observation['{place}']")
        assert "--normalize_observations" in record.message
    caplog.clear()
    InputCheck(space, normalized=True).see(batch_of(space, large), distribution)
    assert ["depth" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("action", ["discrete", "box"])
def test_a_first_policy_without_chance_is_named(action, caplog):
    distribution = make_distribution(ACTION_SPACES[action])
    logits = torch.zeros(T, B, distribution.num_logits)
    certain = logits.clone()
    certain[..., : A // 2] = -30
    certain[..., -8:] = -30  # small standard deviations
    certain[..., 0] = 30
    masked = logits.clone()
    masked[..., 1:] = -torch.inf  # one choice is left
    used = {"discrete": [logits, masked], "box": [logits]}[action]
    for usual in used:
        InputCheck(VECTOR, False).see(
            batch_of(VECTOR, torch.zeros(T, B, 9), usual), distribution
        )
    trained = batch_of(VECTOR, torch.zeros(T, B, 9), certain)
    trained["policy_version"] += 5
    InputCheck(VECTOR, False).see(trained, distribution)
    assert not caplog.records
    InputCheck(VECTOR, False).see(
        batch_of(VECTOR, torch.zeros(T, B, 9), certain), distribution
    )
    assert ["deterministic" in record.message for record in caplog.records] == [True]


def test_the_log_says_which_encoder_each_observation_gets(caplog):
    caplog.set_level("INFO")
    space = spaces.Dict(
        {
            "a": spaces.Box(0, 1, (8, 8, 11), bool),
            "b": spaces.Box(0, 1, (5, 5, 11), bool),
            "c": spaces.Discrete(6),
            "d": VECTOR,
        }
    )
    net = make_net(space, ACTION_SPACES["discrete"])
    log_encoders(net, "shallow")
    count = sum(x.numel() for x in net.parameters())
    (record,) = caplog.records
    assert "['a']: image 8×8×11 → shallow" in record.message
    assert "['b']: 5×5×11 → MLP, images need 7 pixels" in record.message
    assert "['c']: Discrete(6) → MLP;" in record.message
    assert "['d']: 9 → MLP;" in record.message
    assert f"{count:,} weights" in record.message
    large = spaces.Box(-1, 1, (400_000,))
    log_encoders(make_net(large, ACTION_SPACES["discrete"]), "shallow")
    assert caplog.records[-1].levelname == "WARNING"


# --- Published sizes ---


def conv(inputs, outputs, kernel):
    return inputs * outputs * kernel * kernel + outputs


def linear(inputs, outputs):
    return inputs * outputs + outputs


def deep_block(inputs, outputs):
    return conv(inputs, outputs, 3) + 4 * conv(outputs, outputs, 3)


PONG_ACTIONS = 6
TORSO_SIZES = {
    "shallow": (
        512,
        conv(4, 32, 8)  # 84 -> 20
        + conv(32, 64, 4)  # -> 9
        + conv(64, 64, 3)  # -> 7
        + linear(64 * 7 * 7, 512),
    ),
    "deep": (
        256,
        deep_block(4, 16)  # 84 -> 42
        + deep_block(16, 32)  # -> 21
        + deep_block(32, 32)  # -> 11
        + linear(32 * 11 * 11, 256),
    ),
}


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize("torso", ["shallow", "deep"])
def test_published_number_of_parameters_for_pong(torso, use_lstm):
    features, size = TORSO_SIZES[torso]
    features += 1 + PONG_ACTIONS  # last reward and last action
    if use_lstm:  # four gates, each with two biases
        size += 4 * (features * 256 + 256 * 256 + 2 * 256)
        features = 256
    size += linear(features, PONG_ACTIONS) + linear(features, 1)
    net = make_net(PONG, spaces.Discrete(PONG_ACTIONS), torso, use_lstm)
    assert sum(p.numel() for p in net.parameters()) == size


# --- Width and normalization of the encoders ---


@pytest.mark.parametrize("torso", ["shallow", "deep"])
@pytest.mark.parametrize("observation", ["atari", "minatar", "vector", "nested"])
def test_wider_encoders(observation, torso):
    """Twice the width: features twice as many, weights between layers four times."""
    space = OBSERVATION_SPACES[observation]
    action = ACTION_SPACES["discrete"]
    net, wide, thin = (
        make_net(space, action, torso, encoder_width=x) for x in (1.0, 2.0, 0.001)
    )
    rest = 1 + action.n  # last reward and last action
    features = net.policy.in_features - rest
    assert wide.policy.in_features - rest == 2 * features
    encoders = len(net.images) + (net.vector is not None)
    assert thin.policy.in_features - rest == encoders  # at least one unit
    outputs, _ = thin(make_rows(space, action))
    assert outputs["baseline"].isfinite().all()
    shapes = [x.shape for x in net.parameters()], [x.shape for x in wide.parameters()]
    between = [
        (x, y)
        for x, y in zip(*shapes, strict=True)
        if len(x) > 1 and x[1] % 16 == 0 and x[0] > action.n
    ]
    assert between
    assert all((y[0], y[1]) == (2 * x[0], 2 * x[1]) for x, y in between)


@pytest.mark.parametrize("torso", ["shallow", "deep"])
@pytest.mark.parametrize("observation", ["atari", "minatar", "vector", "nested"])
def test_layers_are_normalized(observation, torso):
    """The input of each activation has mean 0 and variance 1 in each sample."""
    space, action = OBSERVATION_SPACES[observation], ACTION_SPACES["discrete"]
    net = make_net(space, action, torso, layer_norm=True)
    norms = [x for x in net.modules() if isinstance(x, nn.GroupNorm)]
    assert norms
    assert not any(
        isinstance(x, nn.GroupNorm) for x in make_net(space, action, torso).modules()
    )
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


# --- Episodes and the recurrent core ---

DONE = ((0, 1), (2, 0), (2, 2), (3, 0))


def small_net(use_lstm, **options):
    return make_net(MINATAR, ACTION_SPACES["discrete"], use_lstm=use_lstm, **options)


def test_lstm_against_a_plain_loop_over_cells():
    net = small_net(use_lstm=True)
    rows = make_rows(MINATAR, ACTION_SPACES["discrete"], done=DONE)
    state = random_state(net)
    inputs = []
    net.core.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    outputs, new_state = net(rows, state)

    x = torch.cat(inputs)
    assert len(x) == T
    cell = nn.LSTMCell(x.shape[-1], 256)
    cell.load_state_dict(
        {name.removesuffix("_l0"): p for name, p in net.core.named_parameters()}
    )
    h, c = state[0][0], state[1][0]
    for t in range(T):
        for b in range(B):
            if (t, b) in DONE:
                h, c = h.clone(), c.clone()
                h[b] = c[b] = 0
        h, c = cell(x[t], (h, c))
        torch.testing.assert_close(outputs["policy_logits"][t], net.policy(h))
        torch.testing.assert_close(outputs["baseline"][t], net.baseline(h)[:, 0])
    torch.testing.assert_close(new_state, (h[None], c[None]))


CORES = [{"use_lstm": False}] + [
    {"use_lstm": True, "core": core, "core_size": 10, "core_layers": layers}
    for core, layers in (("lstm", 1), ("lstm", 2), ("gru", 1), ("gru", 3))
]


@pytest.mark.parametrize("options", CORES)
@pytest.mark.parametrize("done", [(), DONE])
def test_an_unroll_equals_single_steps(options, done):
    net = small_net(**options)
    rows = make_rows(MINATAR, ACTION_SPACES["discrete"], done=done)
    state = single_state = random_state(net)
    outputs, state = net(rows, state)
    steps = []
    for t in range(T):
        row = map_leaves(lambda x, t=t: x[t : t + 1], rows)
        step, single_state = net(row, single_state)
        steps.append(step)
    joined = {name: torch.cat([step[name] for step in steps]) for name in outputs}
    assert_same(outputs, joined)
    torch.testing.assert_close(state, single_state)


def test_sizes_of_cores():
    for options in CORES[1:]:
        net = small_net(**options)
        kind = {"lstm": nn.LSTM, "gru": nn.GRU}[options["core"]]
        assert isinstance(net.core, kind)
        shape = (options["core_layers"], B, options["core_size"])
        count = 2 if options["core"] == "lstm" else 1
        assert [x.shape for x in net.initial_state(B)] == [shape] * count
        assert net.policy.in_features == net.baseline.in_features == shape[-1]


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_a_forget_bias_keeps_the_state(core):
    """Of new weights; all other weights are those without it."""

    def make(forget_bias):
        torch.manual_seed(1)
        options = {"core": core, "core_layers": 2, "forget_bias": forget_bias}
        return small_net(use_lstm=True, **options)

    plain, biased = make(0.0), make(20.0)
    changed = {
        name
        for (name, x), y in zip(
            plain.named_parameters(), biased.parameters(), strict=True
        )
        if not torch.equal(x, y)
    }
    assert changed == {"core.bias_ih_l0", "core.bias_ih_l1"}
    rows, first = make_rows(MINATAR, ACTION_SPACES["discrete"]), random_state(plain)
    kept = biased(rows, first)[1][-1] - first[-1]  # of the LSTM its cell
    lost = plain(rows, first)[1][-1] - first[-1]
    if core == "gru":
        assert kept.abs().max() < 1e-4
    else:  # the input gate still adds
        assert kept.norm() < lost.norm()


def test_done_in_row_0_resets_the_state():
    net = small_net(use_lstm=True)
    first = make_rows(MINATAR, ACTION_SPACES["discrete"], rows=1, done=[(0, 1)])
    outputs, state = net(first, random_state(net, seed=1))
    fresh, fresh_state = net(first, net.initial_state(B))
    for x, y in zip(
        (*outputs.values(), *state), (*fresh.values(), *fresh_state), strict=True
    ):
        same = [torch.equal(x[0, b], y[0, b]) for b in range(B)]
        assert same == [False, True, False]


@pytest.mark.parametrize("use_lstm", [False, True])
def test_nothing_leaks_over_the_beginning_of_an_episode(use_lstm):
    """The reward and last action of a first row belong to the previous episode."""
    net = small_net(use_lstm)
    rows = make_rows(MINATAR, ACTION_SPACES["discrete"], done=[(2, 0)])
    other = make_rows(MINATAR, ACTION_SPACES["discrete"], seed=2)
    changed = map_leaves(torch.clone, rows)
    changed["observation"][:2, 0] = other["observation"][:2, 0]
    changed["reward"][:3, 0] = other["reward"][:3, 0]
    changed["last_action"][:3, 0] = (rows["last_action"][:3, 0] + 1) % A
    state, changed_state = random_state(net, 1), random_state(net, 2)
    for x, y in zip(state, changed_state, strict=True):
        y[:, 1:] = x[:, 1:]

    outputs, changed_outputs = net(rows, state)[0], net(changed, changed_state)[0]
    for name, x in outputs.items():
        y = changed_outputs[name]
        torch.testing.assert_close(y[2:, 0], x[2:, 0], rtol=0, atol=0)
        torch.testing.assert_close(y[:, 1:], x[:, 1:], rtol=0, atol=0)
        assert (x[:2, 0] != y[:2, 0]).any(dim=-1).all()


def test_the_reward_is_clipped():
    net = small_net(use_lstm=False)
    rows = make_rows(MINATAR, ACTION_SPACES["discrete"])
    rows["reward"][:] = 1.0
    much = {**rows, "reward": torch.full((T, B), 50.0)}
    assert_same(net(much)[0], net(rows)[0], rtol=0, atol=0)
    none = {**rows, "reward": torch.zeros(T, B)}
    assert not torch.equal(net(none)[0]["baseline"], net(rows)[0]["baseline"])


# --- bfloat16 ---


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize("torso", ["shallow", "deep"])
@pytest.mark.parametrize("observation", ["atari", "nested"])
def test_bf16_is_near_fp32(observation, torso, use_lstm):
    space = OBSERVATION_SPACES[observation]
    net = make_net(space, ACTION_SPACES["discrete"], torso, use_lstm)
    rows = make_rows(space, ACTION_SPACES["discrete"], done=DONE)
    state = random_state(net)
    expected, expected_state = net(rows, state)
    net.bf16 = True
    outputs, new_state = net(rows, state)
    assert all(x.dtype == torch.float32 for x in (*outputs.values(), *new_state))
    assert not torch.equal(outputs["baseline"], expected["baseline"])
    # 8 bits of mantissa, over up to 17 layers.
    assert_same(outputs, expected, rtol=0.05, atol=0.05)
    torch.testing.assert_close(new_state, expected_state, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("observation", ["atari", "minatar", "nested"])
@pytest.mark.parametrize("torso", ["shallow", "deep"])
def test_encoders_stored_in_bf16_equal_autocast(observation, torso):
    """Actors store bfloat16 weights, the learner casts them: same results."""
    space = OBSERVATION_SPACES[observation]
    net = make_net(
        space, ACTION_SPACES["discrete"], torso, use_lstm=True, precision="bf16"
    )
    rows = make_rows(space, ACTION_SPACES["discrete"])
    state = random_state(net)
    weights = net.state_dict()
    acting = make_net(
        space, ACTION_SPACES["discrete"], torso, use_lstm=True, precision="bf16"
    )
    acting.encoders_to(torch.bfloat16)
    acting.load_state_dict(weights)
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


def test_bf16_changes_nothing_without_images():
    net = make_net(VECTOR, ACTION_SPACES["discrete"])
    rows = make_rows(VECTOR, ACTION_SPACES["discrete"])
    expected = net(rows)[0]
    net.bf16 = True
    assert_same(net(rows)[0], expected, rtol=0, atol=0)
    net.encoders_to(torch.bfloat16)
    assert_same(net(rows)[0], expected, rtol=0, atol=0)


def test_bf16_learns_in_fp32():
    net = small_net(use_lstm=True, precision="bf16")
    outputs, _ = net(make_rows(MINATAR, ACTION_SPACES["discrete"]), random_state(net))
    (outputs["policy_logits"].sum() + outputs["baseline"].sum()).backward()
    for name, parameter in net.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert parameter.grad.any(), name


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


@pytest.mark.parametrize(
    ("space", "normalize", "has_tanh"),
    [
        (VECTOR, True, True),
        (VECTOR, False, False),
        (spaces.Box(0, 255, (4,), np.uint8), True, True),
        (spaces.Dict({"a": VECTOR, "b": spaces.Discrete(300)}), True, True),
    ],
)
def test_tanh_is_for_normalized_numbers(space, normalize, has_tanh):
    net = make_net(space, ACTION_SPACES["discrete"], normalize_observations=normalize)
    kinds = {type(module) for module in net.modules()}
    assert (torch.nn.Tanh in kinds) == has_tanh
    assert (torch.nn.ReLU in kinds) != has_tanh
