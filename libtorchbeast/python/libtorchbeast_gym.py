"""Environments and spaces of Gym and Gymnasium, for the module libtorchbeast.

It imports this module when it serves environments, or tells what others serve. Neither
package is imported here: spaces are known by the names of their classes.
"""

import inspect
import json
import math
import operator
import traceback
from functools import partial
from typing import Any, NoReturn

import numpy as np

# By their numbers in proto/torchbeast.proto. Those of byte orders other than the
# machine's are none of these.
DTYPES = [
    "bool",
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64"),
]
KINDS = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Tuple", "Dict")
STANDARD_FIELDS = {"observation", "reward", "done", "episode_step", "episode_return"}
MAX_BOUNDS = 8192  # a Box with more elements is sent with its outermost bounds


class UnusableError(Exception):
    """The environment can't be served, now or later."""


# --- Environments ---------------------------------------------------------------------


def adapt(env: Any) -> Any:
    """An object with num_envs, initial() and step(): `env`, or a Single.

    Raises:
      UnusableError: it is no environment.
    """
    if any(kind.__name__ == "VectorEnv" for kind in type(env).__mro__):
        raise UnusableError(
            "Gymnasium's vector environments are served through an object with "
            "num_envs, initial() and step(), see Server's docstring; "
            "torchbeast.envs.environment.Environment is one"
        )
    if hasattr(env, "initial") and hasattr(env, "num_envs"):
        return env
    for method in ("reset", "step"):
        if not hasattr(env, method):
            raise UnusableError(
                f"env_class() must give an environment, and {env!r} has no {method}()"
            )
    return Single(env)


class Single:
    """A single environment as E = 1; its rows lack the dimension E."""

    num_envs = 1

    def __init__(self, env: Any):
        self.env = env
        self.observation_space = getattr(env, "observation_space", None)
        self.action_space = getattr(env, "action_space", None)
        self.first_seed: dict[str, int] = {}  # the first reset()'s
        self.row: dict[str, Any] = {
            "reward": np.zeros((), np.float32),
            "done": np.ones((), bool),
            "episode_step": np.zeros((), np.int64),
            "episode_return": np.zeros((), np.float32),
        }
        self.total = 0.0  # the episode's return

    def begin_stream(self, seed: int, stream: int) -> None:
        if hasattr(self.env, "begin_stream"):
            return self.env.begin_stream(seed, stream)
        (word,) = np.random.SeedSequence([seed, stream]).generate_state(1)
        made = int(word) >> 1  # some environments take 31 bits only
        try:
            takes_seed = "seed" in inspect.signature(self.env.reset).parameters
        except (TypeError, ValueError):  # written in C: nothing to inspect
            takes_seed = False
        if takes_seed:
            self.first_seed = {"seed": made}
        elif hasattr(self.env, "seed"):
            self.env.seed(made)
        return None

    def initial(self) -> dict[str, Any]:
        return {"observation": self._reset(), **self.row}

    def step(self, actions: Any) -> dict[str, Any]:
        row = self.row
        if row["done"]:
            row["episode_step"][()] = 0
            self.total = 0.0
        if self.action_space is None:
            action = actions[0]
        else:
            action = to_action(self.action_space, actions)
        result = self.env.step(action)
        if not isinstance(result, tuple) or len(result) not in (4, 5):
            size = len(result) if isinstance(result, tuple) else 0
            raise ValueError(
                "step() must return (observation, reward, done, info) or (observation, "
                "reward, terminated, truncated, info), not "
                + (f"a tuple of {size}" if size else repr(type(result)))
            )
        observation, reward, *ends, _ = result
        # Unlike float(), this refuses text.
        value = _to("reward", "number", reward, lambda x: math.ldexp(x, 0))
        names = ["done"] if len(ends) == 1 else ["terminated", "truncated"]
        done = any(_to(*x, bool) for x in zip(names, ["bool"] * 2, ends, strict=False))
        self.total += value
        row["reward"][()] = value
        row["done"][()] = done
        row["episode_step"] += 1
        row["episode_return"][()] = self.total
        return {"observation": self._reset() if done else observation, **row}

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()

    def _reset(self) -> Any:
        """The observation alone, whether an info comes with it or not."""
        seed, self.first_seed = self.first_seed, {}
        result = self.env.reset(**seed)
        space: Any = self.observation_space
        is_pair = isinstance(result, tuple) and len(result) == 2
        if not is_pair or not isinstance(result[1], dict):
            return result
        if hasattr(space, "spaces") and space.contains(result):
            return result
        return result[0]


def _to(field: str, wanted: str, value: Any, convert: Any) -> Any:
    try:
        return convert(value)
    except Exception as error:
        raise ValueError(
            f"step() returned {value!r} as {field}, which must be one {wanted} "
            f"({type(error).__name__}: {error})"
        ) from None


def to_action(space: Any, actions: Any) -> Any:
    """What the policy wrote, [1, ...], as an environment with this space wants it.

    Integers get the space's start, floats are clipped into its bounds, as
    torchbeast.envs.environment does it. An int for Discrete, else an array of the
    space's dtype.

    Raises:
      ValueError: an integer is out of range.
    """
    kind = _kind(space, "")
    if kind == "Tuple":
        return tuple(map(to_action, space.spaces, actions))
    if kind == "Dict":
        return {key: to_action(space.spaces[key], actions[key]) for key in actions}
    values = actions[0]
    if kind == "Discrete":
        _check_choices(values, space.n, space)
        return int(values) + int(getattr(space, "start", 0))
    if kind == "MultiDiscrete":
        _check_choices(values, np.asarray(space.nvec), space)
        values = values + getattr(space, "start", 0)
    elif kind == "Box" and values.dtype == np.float32:
        values = np.clip(values, space.low, space.high)
    return values if kind == "MultiBinary" else np.asarray(values, space.dtype)


def _check_choices(values: Any, n: Any, space: Any) -> None:
    for value, most in zip(np.ravel(values), np.ravel(n), strict=False):
        if not 0 <= value < most:
            raise ValueError(
                f"the action {value} is out of range, allowed are 0 to {most - 1} for "
                f"{space}"
            )


# --- Rows and errors ------------------------------------------------------------------


def cast(value: Any, dtype: Any, to_bool: bool) -> Any:
    """The value as a C-contiguous array of `dtype`; or a text: what it is instead.

    Casts must be safe or of the same kind, in NumPy's words, and integers must fit.
    With to_bool, integers may become bools.
    """
    array = np.asarray(value)
    is_integer = array.dtype.kind in "iu"
    are_integers = is_integer and dtype.kind in "iu"
    is_list = are_integers and not isinstance(value, np.ndarray)
    may_cast = is_list or (to_bool and is_integer)
    if not may_cast and not np.can_cast(array.dtype, dtype, "same_kind"):
        return f"{array.dtype}, which cannot become {dtype} without loss"
    result = np.array(array, dtype, order="C")
    is_safe = not are_integers or np.can_cast(array.dtype, dtype, "safe")
    if is_safe or np.array_equal(result, array):
        return result
    return f"{array.dtype} with values outside of {dtype}"


def describe(*error: Any) -> bytes:
    """An exception, as sys.exc_info() has it: as Python prints it, in UTF-8."""
    text = "".join(traceback.format_exception(*error)).replace("\0", "\\0")
    return text.encode("utf-8", "backslashreplace")


# --- Hellos ---------------------------------------------------------------------------


def begin_hello(env: Any) -> str:
    """What adapt()'s result tells before its first row, as JSON of an EnvHello.

    See proto/torchbeast.proto. A policy writes integers that count from 0 whatever the
    action space's start, and floats that are float32.

    Raises:
      UnusableError: names the place of a space that can't be sent.
    """
    hello: dict[str, Any] = {"numEnvs": operator.index(env.num_envs)}
    if (space := getattr(env, "action_space", None)) is not None:
        hello["actionSpace"] = _to_dict(True, space, "")
    elif not isinstance(env, Single):
        raise UnusableError(
            f"the environment {env!r} has no action_space. Give it one, such as "
            "gymnasium.spaces.Discrete(n), so that the learner knows what actions to "
            "send"
        )
    if not _shows_space(env):
        hello["observationSpace"] = _to_dict(False, env.observation_space, "")
    return json.dumps(hello)


def finish_hello(env: Any, row: dict[str, Any]) -> str:
    """What the first row adds: extra fields, and the space if there is none.

    That is a Box without bounds for each array and number.

    Raises:
      UnusableError: names the place of what can't be sent.
    """
    hello: dict[str, Any] = {"extraFields": []}
    if _shows_space(env):
        hello["observationSpace"] = _of_observation(row["observation"], "")
    _check_keys(row, "")
    for name in sorted(row.keys() - STANDARD_FIELDS):
        value, place = np.asarray(row[name]), f'["{name}"]'
        dtype = _dtype(value.dtype, place)
        if value.shape[:1] != (env.num_envs,):
            _refuse(
                place,
                f"the environment gave {value.dtype} {list(value.shape)}, but every "
                f"field has the num_envs, {env.num_envs}, as its first dimension",
            )
        if name == "truncated":
            dtype = 1 + DTYPES.index("bool")
        field = {"name": name, "dtype": dtype, "shape": value.shape[1:]}
        hello["extraFields"].append(field)
    return json.dumps(hello)


def _shows_space(env: Any) -> bool:
    """Whether the first observation shows dtypes and shapes."""
    return isinstance(env, Single) and env.observation_space is None


# --- Spaces ---------------------------------------------------------------------------


def hello_from_json(text: str) -> dict[str, Any]:
    """What probe() tells of an EnvHello."""
    hello = json.loads(text)
    fields = {
        x["name"]: {"dtype": DTYPES[x["dtype"] - 1], "shape": _shape(x)}
        for x in hello.get("extraFields", ())
    }
    settings = {x["name"]: x.get("value", "") for x in hello.get("settings", ())}
    return {
        "name": hello.get("environment", ""),
        "num_envs": int(hello["numEnvs"]),
        "observation_space": _from_dict(hello.get("observationSpace", {})),
        "action_space": _from_dict(hello.get("actionSpace", {})),
        "extra_fields": fields,
        "settings": settings,
    }


def _shape(value: dict[str, Any]) -> tuple[int, ...]:
    return tuple(map(int, value.get("shape", ())))  # JSON has 64 bits as text


def _refuse(place: str, why: str) -> NoReturn:
    raise UnusableError(f"at {place or 'the root'}: {why}")


def _kind(space: Any, place: str) -> str:
    for base in type(space).__mro__:
        if base.__name__ in KINDS:
            return base.__name__
    _refuse(
        place,
        f"the space {space} is none of Box, Discrete, MultiDiscrete, MultiBinary, and "
        "Tuple and Dict of those. Wrap the environment so that it has such a space",
    )


def _dtype(dtype: Any, place: str) -> int:
    dtype = np.dtype(dtype)
    if not dtype.isnative or dtype.name not in DTYPES:
        _refuse(
            place,
            f"the dtype {dtype} cannot be sent; bool, and the usual integers and "
            "floats of native byte order can",
        )
    return 1 + DTYPES.index(dtype.name)


def _check_keys(items: Any, place: str) -> None:
    for key in items:
        if not isinstance(key, str):
            name = f"{key!r} ({type(key).__name__})"
            _refuse(place, f"the keys of a dict must be str, not {name}")


def _nest(items: Any, place: str, convert: Any) -> dict[str, Any]:
    """A Tuple or Dict of convert(child, its place)."""
    if not hasattr(items, "items"):
        values = [convert(x, f"{place}[{i}]") for i, x in enumerate(items)]
        return {"tuple": {"items": values}}
    _check_keys(items, place)
    values = [convert(x, f'{place}["{key}"]') for key, x in items.items()]
    return {"dict": {"keys": list(items), "values": values}}


def _to_dict(is_action: bool, space: Any, place: str) -> dict[str, Any]:
    kind = _kind(space, place)
    if kind in ("Tuple", "Dict"):
        return _nest(space.spaces, place, partial(_to_dict, is_action))
    if kind == "Discrete":
        n, start = operator.index(space.n), operator.index(getattr(space, "start", 0))
        return {"discrete": {"n": n, "start": start}}
    if kind == "MultiDiscrete":
        if np.ndim(space.nvec) != 1:
            _refuse(
                place,
                f"a MultiDiscrete with more than one dimension, {space}. Wrap the "
                "environment to make it flat",
            )
        start = np.ravel(getattr(space, "start", ())).tolist()
        return {"multiDiscrete": {"n": np.ravel(space.nvec).tolist(), "start": start}}
    shape = [operator.index(n) for n in space.shape]
    if kind == "MultiBinary":
        return {"multiBinary": {"shape": shape}}
    dtype = _dtype(space.dtype, place)
    if is_action and np.dtype(space.dtype).kind == "f":
        dtype = 1 + DTYPES.index("float32")
    low, high = _bounds(space.low, -np.inf), _bounds(space.high, np.inf)
    return {"box": {"dtype": dtype, "shape": shape, "low": low, "high": high}}


def _bounds(values: Any, none: float) -> list[Any]:
    """None if all are `none`, one if all are equal or they are too many."""
    values = np.ravel(np.asarray(values, np.float64))
    if values.size > MAX_BOUNDS:
        values = np.array([values.min() if none < 0 else values.max()])
    elif values.size > 0 and (values == values[0]).all():
        values = values[:1]
    if (values == none).all():
        return []
    # JSON has no other numbers.
    names = {math.inf: "Infinity", -math.inf: "-Infinity"}
    return ["NaN" if x != x else names.get(x, x) for x in values.tolist()]


def _of_observation(value: Any, place: str) -> dict[str, Any]:
    if isinstance(value, (tuple, list, dict)):
        return _nest(value, place, _of_observation)
    array = np.asarray(value)
    return {"box": {"dtype": _dtype(array.dtype, place), "shape": array.shape}}


def _from_dict(space: dict[str, Any]) -> dict[str, Any] | None:
    if not space:
        return None
    ((kind, fields),) = space.items()
    shape = _shape(fields)
    if kind == "box":
        found = {"dtype": DTYPES[fields["dtype"] - 1], "shape": shape}
        for name in ("low", "high"):
            bounds = [float(x) for x in fields.get(name, ())]
            found[name] = bounds[0] if len(bounds) == 1 else None
            if len(bounds) > 1:
                found[name] = np.array(bounds).reshape(shape)
        return {"type": "Box", **found}
    if kind == "discrete":
        n, start = int(fields["n"]), int(fields.get("start", 0))
        return {"type": "Discrete", "n": n, "start": start}
    if kind == "multiDiscrete":
        ns = tuple(map(int, fields["n"]))
        starts = tuple(map(int, fields.get("start", [0] * len(ns))))
        return {"type": "MultiDiscrete", "n": ns, "start": starts}
    if kind == "multiBinary":
        return {"type": "MultiBinary", "shape": shape}
    if kind == "tuple":
        items = tuple(map(_from_dict, fields.get("items", ())))
        return {"type": "Tuple", "spaces": items}
    values = map(_from_dict, fields.get("values", ()))
    return {
        "type": "Dict",
        "spaces": dict(zip(fields.get("keys", ()), values, strict=False)),
    }
