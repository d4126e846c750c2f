"""Rollouts: the fields of a row, and batches of them.

A rollout of one environment has T + 1 rows, with T the unroll length. Row 0 is the last
row of the previous rollout. A row joins outputs of the environment and of the agent:

    environment   observation, last_action, FIELDS and EXTRA_FIELDS; see
                  envs/extra_fields.py
    agent         action, truncation_value, policy_version, and all that the model
                  outputs while acting: policy_logits, baseline; see acting.act_step

If done[t], row t is the first of a new episode, and reward[t] and the returns belong to
the last episode. If truncated[t], truncation_value[t] is the agent's value of that
episode's real last observation; else it is 0. policy_version counts the updates of the
weights that acted.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from torchbeast.base import devices
from torchbeast.base.nested import Nested, map_nested
from torchbeast.core.distributions import ActionDistribution
from torchbeast.envs.extra_fields import EXTRA_FIELDS, FIELDS, final_name
from torchbeast.envs.values import FrameStack, agent_is_present, parts_of

# Models compute in float32, and torch can't index with wide unsigned integers.
STORED_AS = {"float64": "float32", "uint16": "int32"}
STORED_AS |= {"uint32": "int64", "uint64": "int64"}

# Fields of row t that are results of the step that led to row t. The others belong to
# the step from row t: what the agent saw and did.
RESULTS = {
    *(*FIELDS, "last_action", "truncation_value"),
    *(name for name, x in EXTRA_FIELDS.items() if x.of == "step"),
}

# Recurrent state of a model: tensors [layers, batch, ...].
State = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Spec:
    """One field of one row: shape without time and batch, and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_stack: bool = False  # the first dimension counts frames, see envs/values.py


@functools.cache
def to_torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype that stores a NumPy dtype, see STORED_AS."""
    name = np.dtype(dtype).name
    return torch.from_numpy(np.empty(0, STORED_AS.get(name, name))).dtype


def observation_spec(space: spaces.Space) -> Nested:
    """Specs in the structure of an observation space."""

    def spec(leaf: spaces.Space) -> Spec:
        dtype = to_torch_dtype(leaf.dtype)
        return Spec(tuple(leaf.shape or ()), dtype, isinstance(leaf, FrameStack))

    return map_nested(spec, parts_of(space))


def env_fields(
    observation_space: spaces.Space, distribution: ActionDistribution
) -> dict[str, Nested]:
    """Shape, without [T, B], and dtype of the fields that come from the environment."""
    fields: dict[str, Nested] = {
        "observation": observation_spec(observation_space),
        "last_action": Spec(distribution.action_shape, distribution.action_dtype),
    }
    fields |= {k: Spec((), to_torch_dtype(dtype)) for k, dtype in FIELDS.items()}
    for k, field in EXTRA_FIELDS.items():
        fields[k] = Spec(tuple(field.shape), to_torch_dtype(field.dtype))
    return fields


def example_rows(
    observation_space: spaces.Space, distribution: ActionDistribution
) -> dict[str, Nested]:
    """Zeros [1, 1, ...], for a forward pass that shows the shapes of the outputs."""

    def zeros(spec: Spec) -> torch.Tensor:
        return torch.zeros(1, 1, *spec.shape, dtype=spec.dtype)

    def lowest(leaf: spaces.Space) -> torch.Tensor:
        # As int64, because torch can't add uint16, uint32 and uint64.
        start = np.asarray(getattr(leaf, "start", 0), np.int64)
        return zeros(observation_spec(leaf)) + torch.as_tensor(start)

    rows = map_nested(zeros, env_fields(observation_space, distribution))
    return {**rows, "observation": map_nested(lowest, parts_of(observation_space))}


def show_final_fields(row: dict[str, Nested]) -> dict[str, Nested]:
    """Takes the final_... fields away. In final rows they replace the EXTRA_FIELDS.

    These have truncated and not done, see `act_step`.
    """
    shown = dict(row)
    for name in EXTRA_FIELDS:
        if (final := shown.pop(final_name(name), None)) is not None:
            ended = row["truncated"] & ~row["done"]
            ended = ended.reshape(*ended.shape, *[1] * (final.dim() - ended.dim()))
            shown[name] = torch.where(ended, final, row[name])
    return shown


def valid_steps(batch: dict[str, Nested]) -> torch.Tensor:
    """From which rows [T + 1, B] bool the steps count for the loss."""
    valid = batch.get("valid", torch.ones_like(batch["done"]))
    return valid & agent_is_present(batch.get("observation"))


def not_replayed(batch: dict[str, Nested], valid: torch.Tensor) -> torch.Tensor:
    """Of steps [T, B] bool, those that are new and not replayed."""
    return valid & ~batch.get("replayed", torch.zeros_like(valid))


def minibatches(
    batch: dict[str, Nested], initial_state: State, count: int
) -> Iterator[tuple[dict[str, Nested], State]]:
    """Splits a batch [T + 1, B, ...] at random into parts of about B / count."""
    if count == 1:
        yield batch, initial_state
        return
    for part in torch.randperm(batch["done"].shape[1]).tensor_split(count):
        index = devices.move(part, batch["done"].device)
        yield map_nested(lambda x, index=index: x[:, index], (batch, initial_state))
