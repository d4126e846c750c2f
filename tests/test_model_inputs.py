import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from nets import ACTION_SPACES, A, B, T, assert_same, make_net, make_rows

from torchbeast.core.observations import flatten_leaf, image_size, is_image
from torchbeast.encoders import ImageEncoder

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
        ((4, 84, 84), (84, 84, 4)),
        ((210, 160, 3), (210, 160, 3)),
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


@pytest.mark.parametrize("shape", [(4, 20, 30, 3), (4, 3, 20, 30)])
def test_the_channels_of_a_stack_are_those_of_its_images(shape):
    encoder = ImageEncoder(spaces.Box(0, 255, shape, np.uint8), "shallow")
    x = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    images = x if shape[1] == 3 else x.permute(0, 1, 4, 2, 3)
    joined = torch.cat(images.unbind(1), 1).float() / 255
    torch.testing.assert_close(encoder(x), encoder.torso(joined))


@pytest.mark.parametrize("torso", ["shallow", "deep"])
@pytest.mark.parametrize("shape", [(16, 1024, 1), (40, 2000), (480, 640, 3)])
def test_large_images_have_no_more_weights_than_screens_of_atari(shape, torso):
    def count(shape):
        space = spaces.Box(0, 255, shape, np.uint8)
        net = make_net(space, ACTION_SPACES["discrete"], torso)
        net(make_rows(space, ACTION_SPACES["discrete"], rows=1))
        return sum(x.numel() for x in net.parameters())

    assert count(shape) < 6 * count((210, 160, 3))


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


def test_integers_are_scaled_by_their_bounds():
    low, high = np.array([-50, 0, 9_000, 0, -(2**31)]), [7, 10_000, 10_000, 1, 9]
    space = spaces.Box(low, np.array(high), dtype=np.int64)
    x = torch.tensor([low.tolist(), high])
    logs = -np.log1p(2.0**31), np.log1p(9)
    wanted = torch.tensor([[-1, 0, 0.9, 0, logs[0]], [0.14, 1, 1, 1, logs[1]]])
    torch.testing.assert_close(flatten_leaf(space, x), wanted.float())
    assert flatten_leaf(spaces.Box(-9, 9, (2,)), torch.ones(1, 2)).eq(1).all()  # floats


@pytest.mark.parametrize("shape", [(3,), (8, 8, 3)])
@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.uint32, np.int64])
def test_integers_of_any_size_make_no_certain_policy(dtype, shape):
    limits = np.iinfo(dtype)
    space = spaces.Box(limits.min, limits.max, shape, dtype)
    net = make_net(space, ACTION_SPACES["discrete"])
    rows = make_rows(spaces.Discrete(2), ACTION_SPACES["discrete"])
    for value in (limits.min, 1000 % limits.max, limits.max // 2 + 1):
        rows["observation"] = torch.full((T, B, *shape), int(value), dtype=torch.int64)
        logits = net(rows)[0]["policy_logits"]
        assert net.distribution.entropy(logits).min() > 0.9 * np.log(A)


@pytest.mark.parametrize(
    ("shape", "images"),
    [
        ((7, 7, 3), 1),
        ((3, 7, 9), 1),
        ((6, 7, 3), 0),
        ((7, 3, 100), 0),
        ((36, 1024), 1),
        ((35, 84), 0),
        ((0, 8, 8), 0),
        ((2, 84, 84, 3), 1),
        ((2, 3, 20, 30), 1),
        ((2, 6, 84, 3), 0),
        ((2, 2, 84, 84, 3), 0),
    ],
)
@pytest.mark.parametrize("torso", ["shallow", "deep"])
def test_what_counts_as_an_image(shape, images, torso):
    space = spaces.Box(0, 255, shape, np.uint8)
    assert is_image(space) == images
    if math.prod(shape):
        net = make_net(space, ACTION_SPACES["discrete"], torso)
        net(make_rows(space, ACTION_SPACES["discrete"]))
