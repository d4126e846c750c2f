"""The encoders of examples/exploration/encoders."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from examples.exploration.encoders.minigrid_encoder import MiniGrid
from examples.exploration.encoders.nethack_encoder import NetHack

N = 5
COUNTS = (11, 6, 4)  # MiniGrid's objects, colours and states
NETHACK = spaces.Dict(  # of NLE
    {
        "glyphs": spaces.Box(0, 5976, (21, 79), np.int16),
        "blstats": spaces.Box(-(2**31), 2**31 - 1, (27,), np.int64),
        "message": spaces.Box(0, 255, (256,), np.uint8),
    }
)


def image(size):
    shape = (N, *size)
    parts = [torch.randint(count, shape, dtype=torch.uint8) for count in COUNTS]
    return torch.stack(parts, -1)


def nethack_observation():
    """The hero stands where blstats says; numbers as large as a game's gold."""
    height, width = NETHACK["glyphs"].shape
    blstats = torch.randint(0, 10_000, (N, *NETHACK["blstats"].shape))
    blstats[:, NetHack.X] = torch.arange(N) * (width - 1) // (N - 1)  # both edges
    blstats[:, NetHack.Y] = torch.arange(N) * (height - 1) // (N - 1)
    last = int(NETHACK["glyphs"].high.max())
    return {
        "glyphs": torch.randint(last + 1, (N, height, width), dtype=torch.int16),
        "blstats": blstats,
        "message": torch.randint(256, (N, 256), dtype=torch.uint8),
    }


def check_gradients(encoder, observation):
    encoder(observation).square().sum().backward()
    for name, weight in encoder.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("size", [(7, 7), (5, 9)])
def test_minigrid_alone_or_in_a_dict(size, layer_norm):
    space = spaces.Box(0, 255, (*size, 3), np.uint8)
    encoder = MiniGrid(space, 0.5, layer_norm)
    both = spaces.Dict({"direction": spaces.Discrete(4), "image": space})
    twin = MiniGrid(both, 0.5, layer_norm)
    twin.load_state_dict(encoder.state_dict())
    x = image(size)
    features = encoder(x)
    assert features.shape == (N, 128)
    assert features.dtype == torch.float32
    torch.testing.assert_close(twin({"direction": torch.ones(N), "image": x}), features)
    torch.testing.assert_close(encoder(x[2:3]), features[2:3])
    check_gradients(encoder, x)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_nethack(layer_norm):
    encoder = NetHack(NETHACK, 0.5, layer_norm)
    observation = nethack_observation()
    features = encoder(observation)
    assert features.shape == (N, 64 + 128 + 64 + 32)  # map, crop, numbers, words
    assert features.dtype == torch.float32
    assert features.isfinite().all()
    one = {name: x[2:3] for name, x in observation.items()}
    torch.testing.assert_close(encoder(one), features[2:3], rtol=1e-4, atol=1e-4)
    check_gradients(encoder, observation)


def test_what_is_around_the_hero():
    """Against slices of the map, and against what lies beyond its edges."""
    encoder = NetHack(NETHACK)
    observation = nethack_observation()
    x, y = observation["blstats"][:, 0], observation["blstats"][:, 1]
    crop = encoder.around(observation["glyphs"].long(), x, y)
    assert crop.shape == (N, 9, 9)
    for n in range(N):
        for i in range(9):
            for j in range(9):
                row, column = y[n] + i - 4, x[n] + j - 4
                inside = 0 <= row < 21 and 0 <= column < 79
                beyond = int(NETHACK["glyphs"].high.max()) + 1
                glyph = observation["glyphs"][n, row, column] if inside else beyond
                assert crop[n, i, j] == glyph
