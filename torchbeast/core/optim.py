"""The optimizer and its schedule. Edit them here, and only here."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR


class RMSProp(torch.optim.Optimizer):
    """RMSProp as TensorFlow computes it, for which the published settings are meant.

        square = α square + (1 - α) g²        from 1
        buffer = momentum buffer + lr g / sqrt(square + ε)
        weight = weight - buffer

    torch.optim.RMSprop begins with square = 0 and adds ε behind the root. Its first
    steps are then ten times the learning rate, which can kill every unit of the first
    layer before the agent has learned anything.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float,
        alpha: float = 0.99,
        eps: float = 0.01,
        momentum: float = 0.0,
    ) -> None:
        settings = {"lr": lr, "alpha": alpha, "eps": eps, "momentum": momentum}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # no closure
        for group in self.param_groups:
            for weight in group["params"]:
                gradient = weight.grad
                if gradient is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["square"] = torch.ones_like(weight)
                    state["buffer"] = torch.zeros_like(weight)
                square = state["square"]
                square.mul_(group["alpha"])
                square.addcmul_(gradient, gradient, value=1 - group["alpha"])
                root = (square + group["eps"]).sqrt_()
                if group["momentum"]:
                    buffer = state["buffer"].mul_(group["momentum"])
                    buffer.addcdiv_(gradient, root, value=group["lr"])
                    weight.sub_(buffer)
                else:
                    weight.addcdiv_(gradient, root, value=-group["lr"])


def make_optimizer(
    model: torch.nn.Module, flags: Any
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """RMSProp whose learning rate falls linearly to 0 over flags.total_steps.

    The scheduler counts updates; one update consumes batch_size · unroll_length steps.
    """
    optimizer = RMSProp(
        model.parameters(),
        lr=flags.learning_rate,
        momentum=flags.momentum,
        eps=flags.epsilon,
        alpha=flags.alpha,
    )

    def share_left(update: int) -> float:
        step = update * flags.batch_size * flags.unroll_length
        return 1.0 - min(step, flags.total_steps) / flags.total_steps

    return optimizer, LambdaLR(optimizer, share_left)
