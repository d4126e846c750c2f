"""Fields that a fork adds to every row, taken from the environment's info."""

import dataclasses
from typing import Any, Literal

import numpy as np

from torchbeast.envs.values import InvalidEnvironmentError

GAME_OVER = "torchbeast.game_over"  # in an info: False if only an episode has ended


@dataclasses.dataclass(frozen=True)
class ExtraField:
    """A field of every row, taken from the environment's info.

    If an episode ends, the row holds the first observation of the next one. So a field
    declares what it describes:

        "step"         the step that led to the row, like the reward. For example a
                       cost, or the lives left. Taken from the info of step(). Zero in
                       the first row of a run.
        "observation"  the observation in the row. For example a goal, a task number or
                       a mask. Taken from the info of reset() if the observation is the
                       first of an episode, else from that of step().
    """

    shape: tuple[int, ...]  # of one environment's value
    dtype: Any  # NumPy's
    of: Literal["step", "observation"]

    def __post_init__(self) -> None:
        if self.of not in ("step", "observation"):
            raise ValueError(f'of must be "step" or "observation", got {self.of!r}')


# Declare fields here and nowhere else. A field is zero if the info lacks it. Examples:
# {"lives": ExtraField((), np.int64, of="step")}
# {"goal": ExtraField((2,), np.float32, of="observation")}
EXTRA_FIELDS: dict[str, ExtraField] = {}


def final_name(name: str) -> str:
    """The field's name in rows for its value at the end of truncated episodes."""
    return f"final_{name}"


# The names of a row's other fields, and of those that a batch has besides.
TAKEN = frozenset(
    {
        *("observation", "reward", "done", "truncated", "last_action"),
        *("episode_return", "episode_step", "game_return", "game_step", "game_over"),
        *("action", "policy_logits", "baseline", "truncation_value", "policy_version"),
        *("valid", "replayed", "intrinsic_reward", "intrinsic_discount"),
    }
)


def check_names() -> None:
    """Raises InvalidEnvironmentError if a name of EXTRA_FIELDS is taken."""
    finals = {final_name(name) for name in EXTRA_FIELDS}
    if wrong := sorted(EXTRA_FIELDS.keys() & (TAKEN | finals)):
        raise InvalidEnvironmentError(
            f"EXTRA_FIELDS declares {', '.join(wrong)}, which another field of a row "
            f"is named. These names are taken: {', '.join(sorted(TAKEN | finals))}. "
            "Give the value another name in the environment's info and in EXTRA_FIELDS"
        )


def select(info: dict[str, Any]) -> dict[str, np.ndarray]:
    """EXTRA_FIELDS of one environment's info. Raises InvalidEnvironmentError."""
    selected = {}
    for name, field in EXTRA_FIELDS.items():
        if name in info:
            selected[name] = as_declared(name, info[name], field.shape)
    return selected


def as_declared(name: str, seen: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The value as EXTRA_FIELDS declares it. Raises InvalidEnvironmentError."""
    array, dtype = np.asarray(seen), np.dtype(EXTRA_FIELDS[name].dtype)
    if array.dtype.hasobject and array.ndim:  # so Gymnasium gives np.bool_
        array = np.array(array.tolist())
    value = array.astype(dtype if array.dtype.kind in "biuf" else "O")
    keeps = value.dtype.kind == "f" or (value == array).all()
    if array.shape != shape or value.dtype != dtype or not keeps:
        raise InvalidEnvironmentError(
            f"EXTRA_FIELDS declares {name!r} as {dtype} of shape "
            f"{EXTRA_FIELDS[name].shape}, but info holds {seen!r:.80}"
        )
    return value


def make_fields(
    infos: dict[str, Any], done: np.ndarray, truncated: np.ndarray
) -> dict[str, np.ndarray]:
    """The fields [E, ...] of one row, from the infos of a vector environment."""
    # If a step ended an episode, infos are those of the reset that followed.
    ended = infos.get("final_info", {})
    fields = {}
    for name, field in EXTRA_FIELDS.items():
        if field.of == "step":
            fields[name] = gather(name, (infos, ~done), (ended, done))
        else:
            fields[name] = gather(name, (infos, np.ones_like(done)))
            fields[final_name(name)] = gather(name, (ended, truncated))
    return fields


def gather(name: str, *sources: tuple[dict[str, Any], np.ndarray]) -> np.ndarray:
    """Joins values [E, ...] from infos, each with a mask [E] of the valid ones."""
    field = EXTRA_FIELDS[name]
    num_envs = len(sources[0][1])
    values = np.zeros((num_envs, *field.shape), field.dtype)
    for infos, valid in sources:
        # infos["_name"] is Gymnasium's mask of the environments that gave `name`.
        if name in infos and (valid := valid & infos.get(f"_{name}", True)).any():
            given = np.asarray(infos[name])
            if given.shape[:1] != valid.shape:
                raise InvalidEnvironmentError(
                    f"EXTRA_FIELDS declares {name!r}, so info must hold a value for "
                    f"each of {num_envs} environments, not {infos[name]!r:.80}"
                )
            values[valid] = as_declared(name, given[valid], values[valid].shape)
    return values
