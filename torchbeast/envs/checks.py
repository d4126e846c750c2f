"""Checks what environments return: from their first calls, and later from a sample.

A value that can't be stored is an error. A value that may spoil training is a warning.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from torchbeast.base.errors import UserError
from torchbeast.base.nested import Nested, flatten, map_nested, with_places

FIRST_CALLS = 10  # checked calls of each environment at its start
CLOSE = "close"  # key of the warning that close() has raised
CHECK_EVERY = 1009  # later, one call of so many; prime, so that it hits all time steps

# The modules that call an environment's methods.
_CALLERS = (
    *("torchbeast.envs.", "gymnasium.wrappers", "gymnasium.core"),
    "gymnasium.envs.registration",
)


class InvalidEnvironmentError(UserError, ValueError):
    """An environment breaks a rule; the message names it."""


class UnsupportedSpaceError(UserError, ValueError):
    """Buffers can't hold this observation space, or no policy has this action space."""


class Checker:
    """Checks what one environment returns.

    Args:
      name: --env, for messages.
      observation_space: what the environment declares.
      warn: called with a key and a message for each suspect value.
    """

    def __init__(
        self,
        name: str,
        observation_space: spaces.Space,
        warn: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self.space = observation_space
        self._warn = warn
        self._leaves = [
            (place, leaf, far_bounds(leaf) if isinstance(leaf, spaces.Box) else None)
            for place, leaf in leaves_of(observation_space)
        ]
        self._calls = 0  # checked calls

    def until_next(self) -> int:
        """The number of calls to skip before the next check."""
        return 0 if self._calls < FIRST_CALLS else CHECK_EVERY - 1

    def call(self, method: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls reset() or step() and checks what it returns.

        Raises:
          InvalidEnvironmentError: the method takes other arguments, returns another
            number of values, or a value that can't be stored.
        """
        try:
            result = function(*args, **kwargs)
        except InvalidEnvironmentError:
            raise
        except (TypeError, ValueError) as error:
            if not raised_by_call(error):
                raise  # an error inside the environment
            self._fail(
                f"{method}() does not follow Gymnasium's API: {error}. {_API[method]}"
            )
        self.check(method, result)
        return result

    def check(
        self, method: str, result: Any, num_envs: int | None = None, number: int = 0
    ) -> None:
        """Checks what reset() or step() has returned.

        Args:
          num_envs: None; or, for a vector environment, the number of its environments.
          number: the one of them to check.

        Raises:
          InvalidEnvironmentError: see `call`.
        """
        self._calls += 1
        count = 2 if method == "reset" else 5
        if not isinstance(result, tuple) or len(result) != count:
            self._fail(f"{method}() returned {describe(result)}. {_API[method]}")
        *values, info = result
        if not isinstance(info, dict):
            self._fail(
                f"{method}() returned {describe(info)} as info; it must be a dict. "
                f"{_API[method]}"
            )
        if num_envs is not None:
            for x in flatten(values):
                if not isinstance(x, np.ndarray) or x.shape[:1] != (num_envs,):
                    self._fail(
                        f"{method}() of a vector environment returned {describe(x)}; "
                        f"it must be an array with {num_envs} entries, one per "
                        "environment"
                    )
            values = map_nested(lambda x: x[number], values)
        if method == "reset":
            self._check_reset(*values)
        else:
            self._check_step(*values)

    def admit(self, method: str, result: Any, num_envs: int | None = None) -> Any:
        """Returns what reset() or step() returned, in a form that can be stored.

        Every call passes here: if structure, shapes and dtypes fit, it takes a few
        microseconds.

        Args:
          num_envs: as in `check`.

        Raises:
          InvalidEnvironmentError: see `call`.
        """
        count = 2 if method == "reset" else 5
        leading = () if num_envs is None else (num_envs,)
        if isinstance(result, tuple) and len(result) == count:
            numbers = result[1:-1] if leading else result[1:-1][:1]
            if all(_is_number(x, leading) for x in numbers):
                for _ in mismatches(self.space, result[0], leading):
                    break
                else:
                    return result
        for number in range(num_envs or 1):
            self.check(method, result, num_envs, number)
        # Such as bits that are 0.0 and 1.0.
        observation = map_nested(
            lambda leaf, x: np.asarray(x).astype(leaf.dtype),
            parts_of(self.space),
            result[0],
        )
        return observation, *result[1:]

    def _fail(self, message: str) -> None:
        raise InvalidEnvironmentError(f"--env {self.name}: {message}") from None

    def warn(self, key: str, message: str) -> None:
        self._warn(key, f"--env {self.name}: {message}")

    def _check_reset(self, observation: Any) -> None:
        is_leaf = not isinstance(self.space, spaces.Dict | spaces.Tuple)
        if is_leaf and isinstance(observation, tuple):
            self._fail(
                f"reset() returned {describe(observation)}, but the observation is "
                f"declared as {self.space}. {_API['reset']}"
            )
        self._check_observation("reset", observation)

    def _check_step(
        self, observation: Any, reward: Any, terminated: Any, truncated: Any
    ) -> None:
        self._check_observation("step", observation)
        if not _is_number(reward):
            self._fail(
                f"step() returned {describe(reward)} as reward; it must be one number"
            )
        for field, value in (("terminated", terminated), ("truncated", truncated)):
            if isinstance(value, bool | np.bool_):
                continue
            if value is None:
                self.warn(field, f"step() returned {field}=None, read as False")
            elif not _is_number(value):
                self._fail(
                    f"step() returned {describe(value)} as {field}; it must be one bool"
                )
            elif value not in (0, 1):
                self.warn(field, f"step() returned {field}={value}, read as True")

    def _check_observation(self, method: str, observation: Any) -> None:
        for place, space, value, *words in mismatches(self.space, observation):
            is_bits = isinstance(space, spaces.MultiBinary)
            if not (is_bits and space.contains(as_array(value)[0])):  # of any dtype
                self._refuse(method, place, space, *words)
        arrays = flatten(
            map_nested(lambda _, x: np.asarray(x), parts_of(self.space), observation)
        )
        for (place, leaf, far), array in zip(self._leaves, arrays, strict=True):
            if isinstance(leaf, spaces.Box):
                self._check_values(array, leaf, far, place)
            elif not leaf.contains(array.astype(leaf.dtype)):
                is_bits = isinstance(leaf, spaces.MultiBinary)
                wanted = "zeros and ones" if is_bits else "integers inside the space"
                self._refuse(method, place, leaf, str(array.tolist()), wanted)

    def _refuse(
        self,
        method: str,
        place: str,
        space: spaces.Space,
        seen: str,
        wanted: str,
        hint: str = "",
    ) -> None:
        self._fail(
            f"{method}() returned {seen} as {place}, but {wanted} is declared by "
            f"observation_space: {space}{hint}"
        )

    def _check_values(
        self,
        array: np.ndarray,
        space: spaces.Box,
        far: tuple[np.ndarray, np.ndarray] | None,
        place: str,
    ) -> None:
        is_float = space.dtype.kind == "f"
        if is_float and array.dtype.kind in "iu":
            self.warn(
                f"integers in {place}",
                f"{place} holds integers ({array.dtype}), but the space declares "
                f"{space.dtype}. Check the scale of the values",
            )
        if is_float and not np.isfinite(array).all():
            self._warn_of(array, ~np.isfinite(array), place, "which is not finite")
        if far is not None:
            with np.errstate(invalid="ignore"):
                outside = (array < far[0]) | (array > far[1])
            if outside.any():
                at = tuple(np.argwhere(outside)[0])
                own = f"{space.low[at]} to {space.high[at]}"
                self._warn_of(array, outside, place, f"far outside its bounds, {own}")

    def _warn_of(
        self, array: np.ndarray, wrong: np.ndarray, place: str, what: str
    ) -> None:
        at = tuple(np.argwhere(wrong)[0])
        where = f" at {[int(i) for i in at]}" if at else ""
        kind = what.partition(",")[0]
        self.warn(f"{place}: {kind}", f"{place} holds {array[at]}{where}, {what}")


_API = {
    "reset": (
        "reset(seed=None, options=None) must return two values: observation, info. An "
        "environment of the old Gym API is adapted if --env names its class: "
        "package.module:Class"
    ),
    "step": (
        "step(action) must return five values: observation, reward, terminated, "
        "truncated, info. An environment of the old Gym API is adapted if --env names "
        "its class: package.module:Class"
    ),
}


def raised_by_call(error: BaseException) -> bool:
    """Whether the call itself failed, and not the environment's own code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    caller = trace.tb_frame.f_globals.get("__name__", "") if trace else ""
    return caller.startswith(_CALLERS)


def close_quietly(close: Callable[[], Any], warn: Callable[[str, str], None]) -> None:
    """Calls an environment's close(). An error is only a warning: the run is over."""
    try:
        close()
    except (Exception, SystemExit):
        warn(CLOSE, f"close() raised:\n{traceback.format_exc()}")


def _is_number(value: Any, shape: tuple[int, ...] = ()) -> bool:
    """Whether it is a number, or an array of numbers of this shape."""
    if not shape and isinstance(value, float | int):
        return True
    if shape and not isinstance(value, np.ndarray):
        return False
    array, _ = as_array(value)
    return array.shape == shape and array.dtype.kind in "biuf"


def as_array(value: Any) -> tuple[np.ndarray, str]:
    """The value in NumPy, or an array of dtype object and why NumPy can't read it."""
    try:
        return np.asarray(value), ""
    except Exception as error:  # rows of unequal length, a tensor with gradient
        return np.empty((), object), f". NumPy can't read it: {error}"


def describe(value: Any) -> str:
    """Describes a value in a few words: type, or dtype and shape."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} values"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, bool | int | float | str | np.generic) or value is None:
        return f"{value!r}"
    return f"a value of type {type(value).__module__}.{type(value).__qualname__}"


def mismatches(
    space: spaces.Space,
    value: Any,
    leading: tuple[int, ...] = (),
    place: str = "observation",
) -> Iterator[tuple[str, spaces.Space, Any, str, str, str]]:
    """Where structure, shapes and dtypes are not a space's, nor can be cast safely.

    Args:
      leading: dimensions of each array in front of its space's. With some, other
        types than arrays do not fit.

    Yields:
      The place, its space, its value, what was seen, what is declared, a hint.
    """
    if (
        isinstance(value, np.ndarray)
        and space.shape is not None
        and value.shape == leading + space.shape
        and value.dtype == space.dtype
    ):
        return  # mostly
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping):
            yield place, space, value, describe(value), "a dict", ""
            return
        for key, part in space.spaces.items():
            if key in value:
                yield from mismatches(part, value[key], leading, f"{place}[{key!r}]")
            else:
                seen = f"a dict of {sorted(map(str, value))}"
                yield place, space, value, seen, repr(key), ""
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple | list) or len(value) != len(space.spaces):
            count = f"{len(space.spaces)} values"
            yield place, space, value, describe(value), count, ""
            return
        for i, (part, x) in enumerate(zip(space.spaces, value, strict=True)):
            yield from mismatches(part, x, leading, f"{place}[{i}]")
    else:
        shape = leading + (space.shape or ())
        array, hint = as_array(value)
        if array.shape != shape or hint or (leading and array is not value):
            if array.shape[1:] == shape and array.ndim:
                hint = (
                    ". If this is a vector environment, name a function with a "
                    "parameter num_envs that makes it, or give a single environment"
                )
            yield place, space, value, describe(value), f"shape {list(shape)}", hint
        elif not np.can_cast(array.dtype, space.dtype or object, "same_kind"):
            yield place, space, value, describe(value), str(space.dtype), ""


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


def far_bounds(space: spaces.Box) -> tuple[np.ndarray, np.ndarray] | None:
    """The limits below and above which a value counts as far outside its bounds.

    The distance is the width of the bounds. If one bound is infinite, it is the size of
    the other, at least 1. None if the dtype can't hold such values.
    """
    if space.dtype == np.bool_:
        return None
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    if space.dtype.kind in "iu":
        limits = np.iinfo(space.dtype.name)
        if (low <= limits.min).all() and (high >= limits.max).all():
            return None
    with np.errstate(invalid="ignore", over="ignore"):
        width = high - low
        lone = np.maximum(1.0, np.where(np.isfinite(low), np.abs(low), np.abs(high)))
        margin = np.where(np.isfinite(width), width, lone)
        return low - margin, high + margin
