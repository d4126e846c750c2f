"""Which observation and action spaces both variants can use, checked at the start.

docs/environments.md lists them.
"""

import math
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation

from torchbeast.envs.checks import (
    InvalidEnvironmentError,
    UnsupportedSpaceError,
    describe,
    leaves_of,
)

_ELEMENTARY_SPACES = (
    spaces.Box,
    spaces.Discrete,
    spaces.MultiDiscrete,
    spaces.MultiBinary,
)

# The limits of PolyBeast's messages, see libtorchbeast/stream_spec.h. They hold for
# both variants, so that what trains with one also trains with the other.
MAX_ELEMENTS = 2**20
MAX_CHOICES = 2**18
MAX_ACTION_NUMBERS = 2**16
MAX_ARRAYS = 1024
MAX_LEVELS = 16
MAX_DIMENSIONS = 6
MAX_KEY_BYTES = 1024
MAX_START = 2**53
_DTYPES = {"bool", "float16", "float32", "float64"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


class FrameStack(spaces.Box):
    """A Box [K, ...] whose observations are the last K frames, the oldest first.

    A replay stores each frame once. An observation that does not continue the one
    before it is right, but takes more room.
    """


def declare_stack(env: gymnasium.Env) -> None:
    """Declares the frames of Gymnasium's FrameStackObservation, which does not say so.

    Wrappers around it may follow if they keep its space.
    """
    space, inner = env.observation_space, env
    while isinstance(inner, gymnasium.Wrapper) and inner.observation_space is space:
        if isinstance(inner, FrameStackObservation) and type(space) is spaces.Box:
            env.observation_space = as_stack(space)
        inner = inner.env


def as_stack(space: Any) -> FrameStack:
    """The same Box as a FrameStack."""
    return FrameStack(space.low, space.high, space.shape, space.dtype.type)


def check_observation_space(space: spaces.Space) -> None:
    """Raises UnsupportedSpaceError unless both variants can hold observations."""
    fault = next(_faults(space, "observation", 1), "")
    if not fault:
        leaves = [leaf for _, leaf in leaves_of(space)]
        size = sum(math.prod(leaf.shape or ()) for leaf in leaves)
        choices = sum(map(_num_choices, leaves))
        for count, what, most in (
            (len(leaves), "parts", MAX_ARRAYS),
            (size, "elements", MAX_ELEMENTS),
            (choices, "choices in Discrete and MultiDiscrete", MAX_CHOICES),
        ):
            if count > most:
                fault = f"{space} has {count:,} {what}; at most {most:,} are allowed"
        if not size:
            fault = f"the observation space {space} has no element"
    if fault:
        raise UnsupportedSpaceError(
            f"{fault}. Wrap the environment in a gymnasium.ObservationWrapper; "
            "docs/environments.md shows how."
        )


def _faults(space: spaces.Space, place: str, level: int) -> Iterator[str]:
    """Why a space can't be stored or sent."""
    if level > MAX_LEVELS:
        yield f"{place} is nested too deeply; at most {MAX_LEVELS} levels are allowed"
    elif isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            text = key.encode(errors="ignore") if isinstance(key, str) else b"\0"
            if b"\0" in text or len(text) > MAX_KEY_BYTES or text.decode() != key:
                yield (
                    f"{place} is a Dict with the key {key!r:.99}; keys must be str of "
                    f"at most {MAX_KEY_BYTES} bytes of UTF-8, without a zero byte"
                )
            yield from _faults(part, f"{place}[{key!r}]", level + 1)
    elif isinstance(space, spaces.Tuple):
        for i, part in enumerate(space.spaces):
            yield from _faults(part, f"{place}[{i}]", level + 1)
    elif fault := _leaf_fault(space):
        yield f"{place} has the unsupported space {space}; {fault}"


def _leaf_fault(leaf: spaces.Space) -> str:
    """Why an elementary space can't be stored or sent; "" if it can."""
    if not isinstance(leaf, _ELEMENTARY_SPACES):
        return (
            "allowed are Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple "
            "of those"
        )
    dtype = np.dtype(leaf.dtype)
    if not dtype.isnative or dtype.name not in _DTYPES:
        return (
            f"its dtype is {dtype}; allowed are bool, integers of 8 to 64 bits, "
            "float16, float32 and float64, in the byte order of this machine"
        )
    if len(leaf.shape or ()) > MAX_DIMENSIONS:
        return f"at most {MAX_DIMENSIONS} dimensions are allowed"
    if isinstance(leaf, spaces.MultiDiscrete) and (
        leaf.nvec.ndim != 1 or not len(leaf)
    ):
        return "a MultiDiscrete needs one dimension, and at least one element"
    start = np.abs(np.asarray(getattr(leaf, "start", 0), np.float64))
    if start.max(initial=0) + _num_choices(leaf) > MAX_START:
        return "its start is too large: 2**53 is the largest number"
    return ""


def _num_choices(space: spaces.Space) -> int:
    """The sum of all n of a Discrete or MultiDiscrete; else 0."""
    sizes = getattr(space, "nvec", getattr(space, "n", 0))
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return 0
    return sum(map(int, np.ravel(sizes)))


def check_action_space(space: spaces.Space) -> None:
    """Raises UnsupportedSpaceError unless there is a policy for `space`."""
    allowed = isinstance(space, _ELEMENTARY_SPACES) and 0 not in (space.shape or ())
    if isinstance(space, spaces.Box) and not np.issubdtype(space.dtype, np.floating):
        allowed = False
    fault = _leaf_fault(space) if allowed else ""
    count = max(_num_choices(space), math.prod(space.shape or ()))
    if allowed and count > MAX_ACTION_NUMBERS:
        fault = f"it has {count:,} numbers, at most {MAX_ACTION_NUMBERS:,}"
    if not allowed or fault:
        raise UnsupportedSpaceError(
            f"action has the unsupported space {space}{fault and ': '}{fault}; allowed "
            "are Discrete, MultiDiscrete of one dimension, MultiBinary, and Box of "
            "floats, none of them empty. Wrap the environment in a "
            "gymnasium.ActionWrapper."
        )


def policy_space(space: spaces.Space) -> spaces.Space:
    """The action space that a policy sees: a MultiBinary is a choice for each bit."""
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiDiscrete([2] * math.prod(space.shape))
    return space


def plain_space(space: spaces.Space) -> spaces.Space:
    """The same space without what subclasses add, which may not be picklable."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict([(key, plain_space(x)) for key, x in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([plain_space(x) for x in space.spaces])
    if isinstance(space, FrameStack):
        return as_stack(space)
    if isinstance(space, spaces.Box):
        return spaces.Box(space.low, space.high, space.shape, space.dtype.type)
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n), start=int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec, space.dtype.type, start=space.start)
    assert isinstance(space, spaces.MultiBinary)
    return spaces.MultiBinary(space.shape or ())


def check_interface(name: str, env: Any) -> None:
    """Raises InvalidEnvironmentError unless `env` looks like a single environment."""
    if isinstance(env, gymnasium.vector.VectorEnv) or hasattr(
        env, "single_observation_space"
    ):
        raise InvalidEnvironmentError(
            f"--env {name} is a vector environment ({type(env).__name__}). Name a "
            "function with a parameter num_envs that makes it, or give a single "
            "environment; --envs_per_actor makes several of it"
        )
    own = getattr(env, "observation_space", None)
    if hasattr(env, "agent_iter") or hasattr(env, "agent_selection"):
        kind = "a PettingZoo environment of the AEC API"
    elif hasattr(env, "possible_agents") and (callable(own) or own is None):
        kind = "a PettingZoo environment of the parallel API"
    elif own is None and hasattr(env, "observation_spec"):
        kind = "an environment of the dm_env API, with observation_spec"
    else:
        kind = ""
    if kind:
        raise InvalidEnvironmentError(
            f"--env {name} made {describe(env)}, {kind}. TorchBeast needs a "
            "gymnasium.Env with one agent: convert it, for example by the packages "
            "shimmy (dm_env) or supersuit (PettingZoo)"
        )
    missing = [
        attribute
        for attribute in ("observation_space", "action_space", "reset", "step")
        if not hasattr(env, attribute)
    ]
    if missing:
        raise InvalidEnvironmentError(
            f"--env {name} made {describe(env)}, which is not an environment: it has "
            f"no {', '.join(missing)}"
        )
    for attribute in ("observation_space", "action_space"):
        space = getattr(env, attribute)
        is_space = any(kind.__name__ == "Space" for kind in type(space).__mro__)
        if not is_space:  # old Gym has a class of the same name
            raise InvalidEnvironmentError(
                f"--env {name}: its {attribute} is {describe(space)}; it must be a "
                "space of Gymnasium"
            )
