"""Acting: `act_step` is one decision of the model, in actors and in evaluations."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchbeast.base import devices
from torchbeast.base.errors import UserError
from torchbeast.base.nested import Nested, flatten, map_nested
from torchbeast.core import rollout
from torchbeast.core.rollout import State
from torchbeast.envs.extra_fields import TAKEN

# A torchbeast.model.Net. Nothing in core imports it, so that a fork can replace it.
Net = Any
# Chooses actions from policy logits, for example a distribution's `sample` or `mode`.
Choose = Callable[[torch.Tensor], torch.Tensor]


class ModelError(UserError, ValueError):
    """The model returns something else than docs/your_network.md says."""


def prepare_to_act(model: Net, compiler: str | None = None) -> Net:
    """Prepares a model to act; `compiler` is a mode of torch.compile."""
    model.eval()
    device = next(model.parameters()).device
    if device.type == "cpu":
        bf16 = model.bf16 and devices.fast_bf16(device)
        model.encoders_to(torch.bfloat16 if bf16 else torch.float32)
    if compiler:
        model.compile(mode=compiler)
    return model


def to_tensors(row: Nested) -> Nested:
    """Arrays [E, ...] to tensors [1, E, ...], in the dtypes that a learner gets."""

    def convert(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x).unsqueeze(0).to(rollout.to_torch_dtype(x.dtype))

    return map_nested(convert, row)


@torch.inference_mode()
def act_step(
    model: Net,
    env_row: dict[str, Nested],
    state: State,
    choose: Choose,
    policy_version: int = 0,
    final_observation: Nested = None,
) -> tuple[dict[str, Nested], State]:
    """One decision for n environments.

    Args:
      env_row: environment outputs [1, n, ...], see rollout.env_fields.
      state: the recurrent state before the row.
      choose: maps policy logits [1, n, P] to actions [1, n, ...].
      final_observation: if this step truncated episodes, the real last observations
        [1, n, ...], valid where env_row["truncated"].

    Returns:
      The agent's fields of the row [1, n, ...]: action, truncation_value,
      policy_version and the model's outputs; and the recurrent state after the row.
    """
    shown = rollout.show_final_fields(env_row)
    outputs, next_state = model(shown, state, acting=True)
    truncation_value = torch.zeros_like(outputs["baseline"])  # [1, n, C...]
    if final_observation is not None:
        # The ends of the old episodes as rows: same states, no resets.
        ends = env_row["truncated"][0].nonzero().squeeze(1)
        last = {**env_row, "observation": final_observation}
        last, old = map_nested(lambda x: x.index_select(1, ends), (last, tuple(state)))
        last["done"] = torch.zeros_like(last["done"])
        # Not model(...): --compile would make code for each number of rows.
        value, _ = model.forward(rollout.show_final_fields(last), old, acting=True)
        truncation_value[:, ends] = value["baseline"]
    outputs["action"] = choose(outputs["policy_logits"])
    outputs["truncation_value"] = truncation_value
    outputs["policy_version"] = torch.full(env_row["done"].shape, policy_version)
    return outputs, next_state


def check_result(result: Any, state: State, num_logits: int) -> None:
    """Raises ModelError unless forward() of T = B = 1 returned (outputs, state)."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise ModelError("forward() of the model must return a tuple of two")
    outputs, after = result
    for name in ("policy_logits", "baseline", *outputs):
        shape = [1, 1, num_logits][: 3 if name == "policy_logits" else 2]
        for x in flatten(outputs.get(name)):
            found = list(getattr(x, "shape", ()))
            if found[: len(shape)] != shape:
                why = f"for T = B = 1 its shape must begin {shape}"
                raise ModelError(f"forward() returned {name} {found}; {why}")
    old, new = ([list(x.shape) for x in flatten(y)] for y in (state, after))
    if old != new:
        raise ModelError(f"forward() made a state {new}; initial_state() has {old}")


@torch.inference_mode()
def row_spec(model: Net) -> dict[str, Nested]:
    """Shape, without [T, B], and dtype of all fields of a row.

    Whatever the model outputs while acting is a field. Raises ModelError if an output
    has the name of a field of the environment, or a shape is wrong.
    """
    was_training = model.training
    model.eval()  # draw no random numbers
    spaces = model.observation_space, model.distribution
    environment = rollout.env_fields(*spaces)
    device = next(model.parameters()).device
    row = map_nested(lambda x: x.to(device), rollout.example_rows(*spaces))
    state = model.initial_state(1)
    result = model(rollout.show_final_fields(row), state, acting=True)
    check_result(result, state, model.distribution.num_logits)
    outputs, _ = act_step(model, row, state, model.distribution.mode)
    model.train(was_training)
    if twice := sorted((environment.keys() | TAKEN) & outputs.keys()):
        raise ModelError(f"the model outputs {', '.join(twice)}: the name is taken")
    agent = map_nested(lambda x: rollout.Spec(tuple(x.shape[2:]), x.dtype), outputs)
    return environment | agent
