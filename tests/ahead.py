"""A run whose CPU stands in for a GPU: an update is finished after the next has begun.

`python -m ahead ...` is MonoBeast, or the module named by VARIANT. With a GPU all is
the same, but for streams and pinned memory, which a CPU lacks. FAULT_FILE says when
a loss becomes NaN, see faulty.py.
"""

import importlib
import os
import sys

import torch

from torchbeast import learner
from torchbeast.base import devices

devices.works_ahead = lambda device: True
impala_loss = learner.impala_loss


def loss_that_fails(*arguments):
    from faulty import wanted_fault

    loss, columns = impala_loss(*arguments)
    if wanted_fault() == "nan_loss":
        loss = loss * torch.nan
        columns |= {"total_loss": loss.detach()}
    return loss, columns


learner.impala_loss = loss_that_fails

if __name__ == "__main__":
    variant = importlib.import_module(os.environ.get("VARIANT", "torchbeast.monobeast"))
    sys.exit(variant.main())
