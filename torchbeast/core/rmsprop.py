"""RMSProp as in TensorFlow."""

from collections.abc import Iterable
from typing import Any

import torch


class RMSProp(torch.optim.Optimizer):
    """RMSProp as in TensorFlow, for which the published settings were tuned.

        square = α square + (1 - α) g²        from 1
        buffer = momentum buffer + lr g / sqrt(square + ε)
        weight = weight - buffer

    torch.optim.RMSprop starts from square = 0 and adds ε outside the root. So its first
    steps are ten times the learning rate, which can kill every unit of the first layer.
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
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
        return loss
