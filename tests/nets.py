"""Models for tests, their flags, spaces, weights and inputs."""

import numpy as np
import torch
from gymnasium import spaces

from torchbeast import monobeast
from torchbeast.core.distributions import make_distribution
from torchbeast.envs.environment import Environment
from torchbeast.flags import DECLARED, Flags
from torchbeast.model import Net

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
DONE = ((0, 1), (2, 0), (2, 2), (3, 0))  # rows where episodes begin


def default_flags(**changes):
    return Flags(**{name: x.default for name, x in DECLARED.items()} | changes)


def make_net(observation_space, action_space, model="shallow", use_lstm=False, **more):
    """A Net with these flags; all others have their defaults."""
    flags = default_flags(model=model, use_lstm=use_lstm, **more)
    return Net(flags, observation_space, action_space)


def make_flags(*words):
    return monobeast.make_flags(words)


def make_weights(flags):
    """Random ones, with which actions have different probabilities."""
    torch.manual_seed(3)
    env = Environment(flags, None)
    env.close()
    model = Net(flags, env.observation_space, env.action_space)
    torch.nn.init.normal_(model.policy.weight, std=0.1)
    return model.state_dict()


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
            torch.from_numpy(rng.normal(size=(rows, B, distribution.num_logits)))
        ).to(distribution.action_dtype),
    }


def map_leaves(f, x):
    if isinstance(x, dict):
        return {name: map_leaves(f, part) for name, part in x.items()}
    if isinstance(x, tuple):
        return tuple(map_leaves(f, part) for part in x)
    return f(x)


def random_state(net, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(x.shape, generator=generator) for x in net.initial_state(B)
    )


def assert_same(outputs, expected, **tolerances):
    assert outputs.keys() == expected.keys()
    for name in outputs:
        torch.testing.assert_close(outputs[name], expected[name], **tolerances)


def small_net(use_lstm, **options):
    return make_net(MINATAR, ACTION_SPACES["discrete"], use_lstm=use_lstm, **options)
