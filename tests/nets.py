"""Models for tests, without a command line."""

from torchbeast.flags import DECLARED, Flags
from torchbeast.model import Net


def default_flags(**changes):
    return Flags(**{name: x.default for name, x in DECLARED.items()} | changes)


def make_net(observation_space, action_space, model="shallow", use_lstm=False, **more):
    """A Net with these flags; all others have their defaults."""
    flags = default_flags(model=model, use_lstm=use_lstm, **more)
    return Net(flags, observation_space, action_space)
