"""MonoBeast whose actors act with weights that are exactly LAG updates old.

    python benchmarks/lagged.py --lag 5 --sync --preset classic-control ...

Needs --sync, and rounds of one update: --num_actors times --envs_per_actor equals
--batch_size, and --updates_per_batch is 1. The column policy_lag shows the lag. A
resumed run begins without one.
"""

import collections
import copy
import sys
from collections.abc import Mapping
from unittest import mock

import torch

from torchbeast import monobeast
from torchbeast.core.weights import SharedWeights


def delay(lag: int) -> type[SharedWeights]:
    """SharedWeights that publish the weights of `lag` publications ago."""

    class LaggedWeights(SharedWeights):
        def publish(
            self, weights: Mapping[str, torch.Tensor], policy_version: int
        ) -> bool:
            if not hasattr(self, "kept"):
                self.kept: collections.deque = collections.deque(maxlen=lag + 1)
            self.kept.append((copy.deepcopy(weights), policy_version))
            return super().publish(*self.kept[0])

    return LaggedWeights


def main() -> int:
    words = sys.argv[1:]
    place = words.index("--lag")
    lag = int(words[place + 1])
    del words[place : place + 2]
    with mock.patch.object(monobeast, "SharedWeights", delay(lag)):
        return monobeast.main(words)


if __name__ == "__main__":
    sys.exit(main())
