"""A run whose CPU stands in for a GPU: an update is finished after the next has begun.

`python -m ahead ...` is MonoBeast, or the module named by VARIANT. With a GPU all is
the same, but for streams and pinned memory, which a CPU lacks. FAULT_FILE says when
a loss becomes NaN, see faulty.py.
"""

import contextlib
import importlib
import os
import sys
import time

import torch

from torchbeast import learner
from torchbeast.base import devices
from torchbeast.runs.run import Run

devices.works_ahead = lambda device: True
impala_loss, fetch, updating = learner.impala_loss, devices.fetch, Run.updating
late = 0  # updates that were not finished when they had begun


def slow_fetch(row):
    """As with a GPU, whose results take some time."""
    wait = fetch(row)

    def wait_longer():
        time.sleep(0.005)
        return wait()

    return wait_longer


@contextlib.contextmanager
def counted_updating(run):
    global late
    with updating(run) as wanted:
        yield wanted
    late += len(run._begun)


devices.fetch, Run.updating = slow_fetch, counted_updating


def loss_that_fails(*arguments, **more):
    from faulty import wanted_fault

    losses, columns = impala_loss(*arguments, **more)
    if wanted_fault() == "nan_loss":
        losses["pg_loss"] *= torch.nan
    return losses, columns


learner.impala_loss = loss_that_fails

if __name__ == "__main__":
    variant = importlib.import_module(os.environ.get("VARIANT", "torchbeast.monobeast"))
    status = variant.main()
    sys.stdout.write(f"{late} updates were finished late.\n")
    sys.exit(status)
