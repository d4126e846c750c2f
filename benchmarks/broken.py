"""MonoBeast with a fault in its learner, to see whether a check finds it.

    python benchmarks/broken.py FAULT --preset classic-control ...

FAULT is one of: lambda (the targets ignore λ, as with --trace_decay 0), rho (ρ̄ is 0.1
for the values), bootstrap (the value after a rollout's last step counts as 0).
"""

import inspect
import sys
from typing import Any
from unittest import mock

import torch

from torchbeast import monobeast
from torchbeast.core import vtrace

FAULTS = ("lambda", "rho", "bootstrap")
SOUND = vtrace.from_importance_weights


def broken(fault: str) -> Any:
    """vtrace.from_importance_weights with a fault."""

    def from_importance_weights(*args: Any, **more: Any) -> Any:
        given = inspect.signature(SOUND).bind(*args, **more).arguments
        if fault == "lambda":
            given["trace_decay"] = 0.0
        elif fault == "rho":
            given["clip_rho_threshold"] = 0.1
        else:
            given["bootstrap_value"] = torch.zeros_like(given["bootstrap_value"])
        return SOUND(**given)

    return from_importance_weights


def main() -> int:
    fault, *words = sys.argv[1:] or [""]
    if fault not in FAULTS:
        sys.exit(__doc__)
    with mock.patch.object(vtrace, "from_importance_weights", broken(fault)):
        return monobeast.main(words)


if __name__ == "__main__":
    sys.exit(main())
