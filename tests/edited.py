"""The edits of a fork, made at import: fields of the info, a model with Dropout.

`python -m edited ...` runs MonoBeast with them, or the module that VARIANT names.
The observations of --env environments:Goals have the expected values of the fields, and
the model raises if they differ.
"""

import importlib
import os
import sys

import numpy as np

from torchbeast.envs.extra_fields import EXTRA_FIELDS, ExtraField

EXTRA_FIELDS["goal"] = ExtraField((), np.float64, of="observation")
EXTRA_FIELDS["count"] = ExtraField((), np.int64, of="step")


def edit_model() -> None:
    import torch
    from torch import nn

    from torchbeast import model

    class VectorEncoder(model.VectorEncoder):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.layers = nn.Sequential(nn.Dropout(0.5), *self.layers)

    class Net(model.Net):
        def forward(self, rows, state=(), acting=False):
            shown = rows["observation"][..., 0] == rows["goal"]
            # The agent may ask for the value of final observations. Then the other rows
            # of the batch have no meaning.
            ended = rows["truncated"] & ~rows["done"]
            if not (shown | (ended.any() & ~ended)).all():
                raise ValueError(f"goals of other episodes: {rows}")
            return super().forward(rows, state, acting)

        def auxiliary_losses(self, batch, outputs, targets, valid, flags, progress):
            if not torch.equal(batch["count"], batch["episode_step"]):
                raise ValueError(f"counts of other episodes: {batch}")
            if not self.training:
                raise ValueError("the learner's model is in eval mode")
            if not 0 <= progress < 1:
                raise ValueError(f"progress {progress}")
            starts = batch["done"] & (batch["episode_step"] > 0)
            if targets.vs.shape != valid.shape or flags.unroll_length != len(valid):
                raise ValueError(f"targets {targets.vs.shape}, valid {valid.shape}")
            return {"starts": starts[1:].sum().float()}

    model.VectorEncoder = VectorEncoder
    model.Net = Net


# Environment servers import this file, too, without torch.
if __name__ == "__main__" or "torch" in sys.modules:
    edit_model()

if __name__ == "__main__":
    variant = importlib.import_module(os.environ.get("VARIANT", "torchbeast.monobeast"))
    sys.exit(variant.main())
