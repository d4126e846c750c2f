"""The fields of a row that come from the environment; a fork adds EXTRA_FIELDS."""

import dataclasses
from typing import Any, Literal

import numpy as np

from torchbeast.envs.values import InvalidEnvironmentError, fit

GAME_OVER = "torchbeast.game_over"  # in an info: False if only an episode has ended


@dataclasses.dataclass(frozen=True)
class ExtraField:
    """A field of every row, taken from the environment's info. It describes

    "step"         the step that led to the row, like the reward: a cost, or the
                   lives left. Zero in the first row of a run.
    "observation"  the observation in the row: a goal, or a task number. If an
                   episode begins with it, taken from the info of reset().
    """

    shape: tuple[int, ...]  # of one environment's value
    dtype: Any  # NumPy's
    of: Literal["step", "observation"]


# What each environment's row has besides, results of the step that led to the row.
FIELDS: dict[str, Any] = {
    "reward": np.float32,
    "done": np.bool_,
    "truncated": np.bool_,
    "episode_return": np.float32,
    "episode_step": np.int64,
    "game_return": np.float32,
    "game_step": np.int64,
    "game_over": np.bool_,
}

# What the learner adds to a batch; and all names that other fields can't have.
LEARNER_FIELDS = {"valid", "replayed", "intrinsic_reward", "intrinsic_discount"}
TAKEN = {"observation", "last_action", *FIELDS, *LEARNER_FIELDS}

# Declare fields here and nowhere else. A field is zero if the info lacks it. Examples:
# {"lives": ExtraField((), np.int64, of="step")}
# {"goal": ExtraField((2,), np.float32, of="observation")}
EXTRA_FIELDS: dict[str, ExtraField] = {}


def final_name(name: str) -> str:
    """The field's name in rows for its value at the end of truncated episodes."""
    return f"final_{name}"


def as_declared(name: str, seen: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The value as EXTRA_FIELDS declares it. Raises InvalidEnvironmentError."""
    field = EXTRA_FIELDS[name]
    if (value := fit(seen, shape, field.dtype)) is None:
        raise InvalidEnvironmentError(
            f"EXTRA_FIELDS declares {name!r} as {field}, but info holds {seen!r:.80}"
        )
    return value


def select(info: dict[str, Any]) -> dict[str, np.ndarray]:
    """EXTRA_FIELDS of one environment's info. Raises InvalidEnvironmentError."""
    fields = EXTRA_FIELDS.items()
    return {k: as_declared(k, info[k], x.shape) for k, x in fields if k in info}


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
    values = np.zeros((len(sources[0][1]), *field.shape), field.dtype)
    for infos, valid in sources:
        # infos["_name"] is Gymnasium's mask of the environments that gave `name`.
        if name in infos and (valid := valid & infos.get(f"_{name}", True)).any():
            given = np.asarray(infos[name])[valid]
            values[valid] = as_declared(name, given, values[valid].shape)
    return values
