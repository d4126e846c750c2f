"""The optimizer and the schedule of its learning rate."""

import math
import warnings
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from torchbeast.flags import Flags


def schedule(progress: float, kind: str) -> float:
    """The factor of --learning_rate after this share of the run, from 0 to 1."""
    if kind == "constant":
        return 1.0
    if kind == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - progress


def make_optimizer(
    model: torch.nn.Module, flags: Flags, steps_per_batch: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """The optimizer and its schedule, which counts batches of steps_per_batch steps."""
    weights = model.parameters()
    more: dict[str, Any] = {"lr": flags.learning_rate, "eps": flags.epsilon}
    optimizer: torch.optim.Optimizer
    if flags.optimizer == "adam":
        # On a CPU one pass over the weights, also if a checkpoint did not have it.
        own: Any = {"fused": next(model.parameters()).device.type == "cpu" or None}
        optimizer = torch.optim.Adam(weights, **more, **own)
        optimizer.register_load_state_dict_pre_hook(
            lambda _, x: x | {"param_groups": [y | own for y in x["param_groups"]]}
        )
    else:
        more |= {"momentum": flags.momentum, "alpha": flags.alpha}
        optimizer = RMSProp(weights, **more, outside=flags.epsilon_outside_root)

    def factor(batch: int) -> float:
        progress = min(1.0, batch * steps_per_batch / flags.total_steps)
        return schedule(progress, flags.learning_rate_schedule)

    return optimizer, LambdaLR(optimizer, factor)


def advance(scheduler: LambdaLR, batches: int) -> None:
    """Advances the schedule, whose factor follows from the number of batches alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of batches without an update
        if batches:
            scheduler.last_epoch += batches - 1
            scheduler.step()


class RMSProp(torch.optim.Optimizer):
    """RMSProp as in TensorFlow, for which the published settings were tuned.

        square = α square + (1 - α) g²        from 1
        buffer = momentum buffer + lr g / sqrt(square + ε)
        weight = weight - buffer

    torch.optim.RMSprop starts from square = 0 and adds ε outside the root. So its first
    steps are ten times the learning rate, which can kill every unit of the first layer.

    Args:
      outside: add ε outside the root: lr g / (sqrt(square) + ε).
      settings: lr, alpha, eps and momentum.
    """

    def __init__(self, params: Any, outside: bool, **settings: float) -> None:
        self.outside = outside
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step. Takes no closure."""
        for group in self.param_groups:
            for weight in group["params"]:
                if (gradient := weight.grad) is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["square"] = torch.ones_like(weight)
                    state["buffer"] = torch.zeros_like(weight)
                square = state["square"].mul_(group["alpha"])
                square.addcmul_(gradient, gradient, value=1 - group["alpha"])
                if self.outside:
                    root = square.sqrt().add_(group["eps"])
                else:
                    root = (square + group["eps"]).sqrt_()
                if group["momentum"]:
                    buffer = state["buffer"].mul_(group["momentum"])
                    buffer.addcdiv_(gradient, root, value=group["lr"])
                    weight.sub_(buffer)
                else:
                    weight.addcdiv_(gradient, root, value=-group["lr"])
