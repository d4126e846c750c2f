"""The optimizer and its schedule. Edit them here, and only here."""

from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR


def make_optimizer(
    model: torch.nn.Module, flags: Any
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """RMSProp whose learning rate falls linearly to 0 over flags.total_steps.

    The scheduler counts updates; one update consumes batch_size · unroll_length steps.
    """
    optimizer = torch.optim.RMSprop(
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
