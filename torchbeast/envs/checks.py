"""Checks what environments return: the form of every value, the numbers of a sample.

A value that can't be stored is an error. A value that may spoil training is a warning.
"""

import contextvars
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
from gymnasium import spaces

from torchbeast.base.errors import UserError
from torchbeast.base.nested import Nested, flatten, map_nested, with_places

FIRST_CALLS = 10  # checked calls of each environment at its start
CLOSE = "close"  # key of the warning that close() has raised
CHECK_EVERY = 1009  # later, one call of so many; prime, so that it hits all time steps

# The modules that call an environment's methods.
_CALLERS = {
    *("torchbeast.envs." + x for x in ("action_masks", "atari", "checks", "make_env")),
    *("torchbeast.envs." + x for x in ("environment", "old_gym", "parallel_envs")),
}
_OTHER_CALLERS = "gymnasium.wrappers", "gymnasium.core", "gymnasium.envs.registration"
_NUMBERS = ("reward", "terminated", "truncated")
_NUMBER_TYPES = {float, int, np.float64, np.float32}  # most rewards
_API = {
    "reset": "reset(seed=None, options=None) must return two values: observation, info",
    "step": (
        "step(action) must return five values: observation, reward, terminated, "
        "truncated, info"
    ),
}


class InvalidEnvironmentError(UserError, ValueError):
    """An environment breaks a rule; the message names it."""


class UnsupportedSpaceError(UserError, ValueError):
    """Buffers can't hold this observation space, or no policy has this action space."""


class Checker:
    """Checks what one environment returns, or several in one object.

    Args:
      name: --env, for messages.
      space: the observation space that one environment declares.
      warn: called with a key and a message for each suspect value.
      num_envs: the number of environments in the object; None: it is a single one.

    Attributes:
      number: which of the environments was looked at last. They take turns.
    """

    def __init__(
        self,
        name: str,
        space: spaces.Space,
        warn: Callable[[str, str], None],
        num_envs: int | None = None,
    ) -> None:
        self.name, self.space = name, space
        self.number = -1
        self._warn = warn
        self._leading = () if num_envs is None else (num_envs,)
        self._leaves = leaves_of(space)
        self._calls = 0
        self._categories = Categories(space)

    def call(self, method: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls reset() or step(); returns its values, the observation as arrays.

        Raises:
          InvalidEnvironmentError: the method takes other arguments, returns another
            number of values, or a value that can't be stored.
        """
        try:
            result = function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            if isinstance(error, InvalidEnvironmentError) or not raised_by_call(error):
                raise
            self.fail(method, f"does not follow Gymnasium's API: {error}")
        count = 5 if method == "step" else 2
        if not isinstance(result, tuple) or len(result) != count:
            self.fail(method, f"returned {describe(result)}")
        observation, *numbers, info = result
        if not isinstance(info, dict):
            self.fail(method, f"returned {describe(info)} as info; it must be a dict")
        arrays = self.read(method, observation)
        self._calls += 1
        is_sample = self._calls <= FIRST_CALLS or self._calls % CHECK_EVERY == 0
        if is_sample or self._leading or type(result[1]) not in _NUMBER_TYPES:
            for field, x in zip(_NUMBERS, numbers, strict=False):
                self._check_number(method, field, x)
        if is_sample:
            self._look(method, observation, numbers)
        return arrays, *numbers, info

    def read(self, method: str, observation: Any, how: str = "returned") -> Nested:
        """An observation as arrays. Raises InvalidEnvironmentError, see `call`."""
        try:
            arrays = read(self.space, observation, self._leading)
            self._categories.check(arrays)
        except ValueError as error:
            self.fail(method, f"{how} {error}")
        # A view that is flipped, for example, can't become a tensor.
        return map_nested(np.ascontiguousarray, arrays) if self._leading else arrays

    def read_last(self, last: Any, rows: np.ndarray, observation: Nested) -> Nested:
        """The last observations of these rows [E]; the others are of `observation`."""
        how = "truncated an episode, and has in info['final_obs']"
        is_each = isinstance(last, np.ndarray) and last.dtype.hasobject
        arrays = map_nested(np.copy, observation)
        try:
            given = last if is_each else read(self.space, last, self._leading)
            for e in np.flatnonzero(rows):
                row = map_nested(lambda x, e=e: x[e], given)
                one = read(self.space, row) if is_each else row
                for to, value in zip(flatten(arrays), flatten(one), strict=True):
                    to[e] = value
            self._categories.check(arrays)
        except (IndexError, ValueError) as error:
            self.fail("step", f"{how} {error}")
        return arrays

    def close(self, function: Callable, *args: Any) -> None:
        """Calls close(). An error is only a warning: the run is over."""
        try:
            function(*args)
        except (Exception, SystemExit):
            self.warn(CLOSE, f"close() raised:\n{traceback.format_exc()}")

    def warn(self, key: str, message: str) -> None:
        self._warn(key, f"--env {self.name}: {message}")

    def fail(self, method: str, what: str) -> NoReturn:
        raise InvalidEnvironmentError(
            f"--env {self.name}: {method}() {what}. {_API[method]}. An environment of "
            "the old Gym API is adapted if --env names its class: package.module:Class"
        ) from None

    def _check_number(self, method: str, field: str, value: Any) -> None:
        try:
            array = np.asarray(value)
        except Exception:  # as in `read`
            array = np.empty(0)
        is_end, each = field != "reward", " (a --wrapper can make it one)"
        if value is None and is_end and not self._leading:
            return  # _look warns
        if array.shape != self._leading or array.dtype.kind not in "biuf":
            if self._leading:
                each = f" for each of {self._leading[0]} environments"
            wanted = f"it must be one {'bool' if is_end else 'number'}{each}"
            self.fail(method, f"returned {describe(value)} as {field}; {wanted}")

    def _look(self, method: str, observation: Any, numbers: list[Any]) -> None:
        """Looks at the numbers of one environment."""
        parts = parts_of(self.space)
        arrays = flatten(map_nested(lambda _, x: np.asarray(x), parts, observation))
        if self._leading:
            self.number = (self.number + 1) % self._leading[0]
            arrays = [x[self.number] for x in arrays]
            numbers = [np.asarray(x)[self.number] for x in numbers]
        for (place, leaf), array in zip(self._leaves, arrays, strict=True):
            if isinstance(leaf, spaces.Box):
                self._look_at_box(place, leaf, array)
            elif not leaf.contains(array.astype(leaf.dtype)):
                seen = f"returned {array.tolist()} as {place}"
                self.fail(method, f"{seen}, but {leaf} is declared")
        for field, x in zip(_NUMBERS[1:], numbers[1:], strict=False):
            if x is None or x not in (0, 1):
                self.warn(field, f"step() returned {field}={x}, read as {bool(x)}")

    def _look_at_box(self, place: str, box: spaces.Box, array: np.ndarray) -> None:
        if box.dtype.kind == "f" and array.dtype.kind in "iu":
            self.warn(
                f"integers in {place}",
                f"{place} holds integers ({array.dtype}), but the space declares "
                f"{box.dtype}. Check the scale of the values",
            )
        for wrong, what in suspects(box, array):
            if wrong.any():
                at = tuple(np.argwhere(wrong)[0])
                where = f" at {[int(i) for i in at]}" if at else ""
                bounds = f"the bounds are {box.low[at]} to {box.high[at]}"
                text = f"{place} holds {array[at]}{where}, {what}; {bounds}"
                self.warn(f"{place}: {what}", text)


class Categories:
    """The parts of a space that count categories: networks can't read others."""

    def __init__(self, space: spaces.Space) -> None:
        kinds = spaces.Discrete | spaces.MultiDiscrete
        self._parts = [
            (i, place, leaf, leaf.start + getattr(leaf, "nvec", getattr(leaf, "n", 0)))
            for i, (place, leaf) in enumerate(leaves_of(space))
            if isinstance(leaf, kinds)
        ]

    def check(self, arrays: Nested) -> None:
        """Raises ValueError if one of these values is not a category of its space."""
        flat = flatten(arrays) if self._parts else []
        for i, place, leaf, end in self._parts:
            if ((flat[i] < leaf.start) | (flat[i] >= end)).any():
                seen = f"{flat[i].tolist()} as {place}"
                raise ValueError(f"{seen}, but {leaf} is declared")


def suspects(box: spaces.Box, array: np.ndarray) -> Iterator[tuple[np.ndarray, str]]:
    """Which values [*shape] may spoil training: bool [*shape], and why.

    A value is far outside its bounds if its distance is more than the width of the
    bounds. If one bound is infinite, it is the size of the other, at least 1.
    """
    if box.dtype.kind == "f":
        yield ~np.isfinite(array), "which is not finite"
    if ((array >= box.low) & (array <= box.high)).all():
        return  # mostly
    low, high = box.low.astype(np.float64), box.high.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        width = high - low
        lone = np.maximum(1.0, np.where(np.isfinite(low), np.abs(low), np.abs(high)))
        margin = np.where(np.isfinite(width), width, lone)
        outside = (array < low - margin) | (array > high + margin)
    yield outside, "far outside its bounds"


def read(
    space: spaces.Space,
    value: Any,
    leading: tuple[int, ...] = (),
    place: tuple[Any, ...] = (),
) -> Nested:
    """The value as arrays of the space's dtypes, nested as the space.

    Keys that the space lacks are left out. A MultiBinary may come in any dtype.

    Args:
      leading: dimensions of each array in front of its space's.
      place: keys that lead from the observation to the value.

    Raises:
      ValueError: it has another structure or shape, or a dtype that can't become the
        declared one. The message begins with what was seen.
    """
    shape, why = space.shape, ""
    if (
        isinstance(value, np.ndarray)
        and shape is not None
        and value.dtype == space.dtype
        and value.shape == leading + shape
    ):
        return value  # mostly
    if isinstance(space, spaces.Dict):
        if isinstance(value, Mapping) and space.spaces.keys() <= value.keys():
            return {
                key: read(part, value[key], leading, (*place, key))
                for key, part in space.spaces.items()
            }
    elif isinstance(space, spaces.Tuple):
        if isinstance(value, tuple | list) and len(value) == len(space.spaces):
            return tuple(
                read(part, x, leading, (*place, i))
                for i, (part, x) in enumerate(zip(space.spaces, value, strict=True))
            )
    else:
        try:
            array = np.asarray(value)
        except Exception as error:  # rows of unequal length, a tensor with gradient
            array, why = np.empty(0, object), f". NumPy can't read it: {error}"
        if array.shape == leading + (shape or ()):
            fits = np.can_cast(array.dtype, space.dtype or object, "same_kind")
            is_bits = isinstance(space, spaces.MultiBinary)
            if fits or (is_bits and np.isin(array, (0, 1)).all()):
                cast = array.astype(space.dtype, copy=False)
                are_integers = {array.dtype.kind, cast.dtype.kind} <= {"i", "u"}
                if not are_integers or np.array_equal(cast, array):
                    return cast
                why = f". Among them is {array[cast != array][0]}"
    if leading:
        why = f", for each of {leading[0]} environments{why}"
    name = "".join(["observation", *(f"[{key!r}]" for key in place)])
    raise ValueError(f"{describe(value)} as {name}, but {space} is declared{why}")


def raised_by_call(error: BaseException) -> bool:
    """Whether the call itself failed, and not the environment's own code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    caller = frames[-1].f_globals.get("__name__", "") if frames else ""
    return caller in _CALLERS or caller.startswith(_OTHER_CALLERS)


def own_context() -> Callable[..., Any]:
    """Calls functions in a context of their own: np.seterr() has no effect outside."""
    return contextvars.copy_context().run


def describe(value: Any) -> str:
    """Describes a value in a few words: type, or dtype and shape."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} values"
    if isinstance(value, Mapping):
        return f"a dict of {sorted(map(str, value))}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, bool | int | float | str | np.generic) or value is None:
        return f"{value!r}"
    return f"a value of type {type(value).__module__}.{type(value).__qualname__}"


def parts_of(space: spaces.Space) -> Nested:
    """The leaves of a space, nested as an observation of it."""
    if isinstance(space, spaces.Dict):
        return {key: parts_of(part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(parts_of, space.spaces))
    return space


def leaves_of(space: spaces.Space) -> list[tuple[str, spaces.Space]]:
    """The leaves of a nested space, each with its place."""
    return list(with_places(parts_of(space), "observation"))
