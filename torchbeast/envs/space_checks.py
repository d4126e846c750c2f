"""Which observation and action spaces both variants can use, checked at the start.

docs/environments.md lists them.
"""

import math
from typing import Any, NoReturn

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation

from torchbeast.envs import checks

_ELEMENTARY = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary

# The limits here are those of PolyBeast's messages, see libtorchbeast/stream_spec.h.
# They hold for both variants: what trains with one also trains with the other.
_MAX_LEVELS, _MAX_DIMENSIONS, _MAX_KEY_BYTES = 16, 6, 1024
_DTYPES = {"bool", "float16", "float32", "float64"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}

# Attributes of what is not a single environment of Gymnasium: what it is, what to do.
_OTHERS = {
    "single_observation_space": (
        "a vector environment",
        "a function with a parameter num_envs has to make it; --envs_per_actor makes "
        "several of a single one",
    ),
    "agent_iter": (
        "a PettingZoo environment of the AEC API",
        "name parallel_env of its module, or your own function, annotated "
        "-> ParallelEnv, that returns pettingzoo.utils.aec_to_parallel(env)",
    ),
    "possible_agents": (
        "a PettingZoo environment of the parallel API",
        "name its class, derived from ParallelEnv, or a function annotated "
        "-> ParallelEnv",
    ),
    "observation_spec": (
        "an environment of the dm_env API",
        "return shimmy.DmControlCompatibilityV0(env) if it is one of dm_control, "
        "shimmy.BSuiteCompatibilityV0(env) if of bsuite, else your own gymnasium.Env",
    ),
    "default_params": (
        "a functional environment of gymnax",
        "return gymnax.wrappers.GymnaxToGymWrapper(env)",
    ),
    "observation_size": (
        "a functional environment of brax",
        "return brax.envs.wrappers.gym.GymWrapper(env)",
    ),
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
    leaves = _check_parts(space, "observation", 1)
    size = sum(math.prod(leaf.shape or ()) for leaf in leaves)
    choices = sum(sum(num_options(leaf)) for leaf in leaves)
    for count, what, most in (
        (len(leaves), "parts", 2**10),
        (size, "elements", 2**20),
        (choices, "choices in Discrete and MultiDiscrete", 2**18),
    ):
        if count > most:
            _refuse(f"{space} has {count:,} {what}; at most {most:,} are allowed")
    if not size:
        _refuse(f"the observation space {space} has no element")


def _refuse(fault: str) -> NoReturn:
    raise checks.UnsupportedSpaceError(
        f"{fault}. Wrap the environment in a gymnasium.ObservationWrapper; "
        "docs/environments.md shows how."
    )


def _check_parts(space: spaces.Space, place: str, level: int) -> list[spaces.Space]:
    """The leaves of a space, if each can be stored and sent."""
    if level > _MAX_LEVELS:
        _refuse(f"{place} is nested too deeply; {_MAX_LEVELS} levels are allowed")
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        if fault := _leaf_fault(space):
            _refuse(f"{place} has the unsupported space {space}; {fault}")
        return [space]
    leaves = []
    parts: Any = space.spaces
    if isinstance(space, spaces.Tuple):
        parts = dict(enumerate(parts))
    for key, part in parts.items():
        if isinstance(space, spaces.Dict) and not _can_be_sent(key):
            _refuse(
                f"{place} is a Dict with the key {key!r:.99}; keys must be str of "
                f"at most {_MAX_KEY_BYTES} bytes of UTF-8"
            )
        leaves += _check_parts(part, f"{place}[{key!r}]", level + 1)
    return leaves


def _can_be_sent(key: Any) -> bool:
    text = key.encode(errors="ignore") if isinstance(key, str) else b""
    return len(text) <= _MAX_KEY_BYTES and text.decode() == key


def _leaf_fault(leaf: spaces.Space) -> str:
    """Why an elementary space can't be stored or sent; "" if it can."""
    if not isinstance(leaf, _ELEMENTARY):
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
    shape = leaf.shape or ()
    if len(shape) > _MAX_DIMENSIONS:
        return f"at most {_MAX_DIMENSIONS} dimensions are allowed"
    if isinstance(leaf, spaces.MultiDiscrete) and (len(shape) != 1 or shape == (0,)):
        return "a MultiDiscrete needs one dimension, and at least one element"
    start = np.abs(np.asarray(getattr(leaf, "start", 0), np.float64))
    if start.max(initial=0) + min(sum(num_options(leaf)), 2**18) > 2**53:
        return "its start is too large: 2**53 is the largest number"
    return ""


def num_options(space: spaces.Space) -> list[int]:
    """The number of options of each choice in the space; [] if it has no choices."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ravel().tolist()
    return []


def check_action_space(space: spaces.Space) -> None:
    """Raises UnsupportedSpaceError unless there is a policy for `space`."""
    fault = "it has no policy"
    has_integers = isinstance(space, spaces.Box) and space.dtype.kind != "f"
    if isinstance(space, _ELEMENTARY) and not has_integers:
        count = max(sum(num_options(space)), math.prod(space.shape or ()))
        fault = _leaf_fault(space)
        if not fault and not 0 < count <= 2**16:
            fault = f"it has {count:,} numbers, at most {2**16:,}"
    if fault:
        raise checks.UnsupportedSpaceError(
            f"action has the unsupported space {space}: {fault}; allowed are Discrete, "
            "MultiDiscrete of one dimension, MultiBinary, and Box of floats, none of "
            "them empty. Wrap the environment in a gymnasium.ActionWrapper. If it has "
            "an action per agent, docs/environments.md (Several agents) shows how."
        )


def policy_space(space: spaces.Space) -> spaces.Space:
    """The action space that a policy sees: a MultiBinary is a choice for each bit."""
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiDiscrete([2] * math.prod(space.shape))
    return space


def plain_space(space: Any) -> spaces.Space:
    """Gymnasium's own space for one of a subclass, of the gym package, or like it.

    What a subclass adds may not be picklable.

    Raises:
      UnsupportedSpaceError: Gymnasium has no such space.
    """
    # Crafter has a BoxSpace.
    kinds = {kind.__name__.removesuffix("Space") for kind in type(space).__mro__}
    if isinstance(space, FrameStack):
        return as_stack(space)
    if "Box" in kinds:
        dtype = np.dtype(space.dtype).type
        return spaces.Box(space.low, space.high, space.shape, dtype)
    if "Discrete" in kinds:
        return spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    if "MultiDiscrete" in kinds:
        dtype, start = getattr(space, "dtype", np.int64), getattr(space, "start", None)
        return spaces.MultiDiscrete(space.nvec, np.dtype(dtype).type, start=start)
    if "MultiBinary" in kinds:
        return spaces.MultiBinary(space.n)
    if "Dict" in kinds:
        parts = space.spaces.items()
        return spaces.Dict([(key, plain_space(part)) for key, part in parts])
    if "Tuple" in kinds:
        return spaces.Tuple([plain_space(part) for part in space.spaces])
    raise checks.UnsupportedSpaceError(
        f"{space!r} has the type {type(space)}; allowed are Box, Discrete, "
        "MultiDiscrete, MultiBinary, Dict, Tuple"
    )


def check_interface(flag: str, env: Any) -> None:
    """Raises InvalidEnvironmentError unless `env` looks like a single environment.

    Args:
      flag: what made it, for the message.
    """
    found = {x: getattr(env, x, None) for x in ("observation_space", "action_space")}
    wrong = [
        f"its {x} is {checks.describe(space)}"
        for x, space in found.items()  # old Gym has a class of the same name
        if not any(kind.__name__ == "Space" for kind in type(space).__mro__)
    ]
    wrong += [f"it has no {x}" for x in ("reset", "step") if not hasattr(env, x)]
    others = [x for name, x in _OTHERS.items() if hasattr(env, name)]
    if wrong or hasattr(env, "single_observation_space"):
        what, advice = f"no environment: {', '.join(wrong)}", ""
        if others:
            what, advice = others[0][0], f": {others[0][1]}"
        raise checks.InvalidEnvironmentError(
            f"{flag} made {checks.describe(env)}, which is {what}. TorchBeast needs a "
            f"gymnasium.Env with one agent{advice}"
        )
