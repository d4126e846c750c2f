"""MonoBeast whose actors act with weights that are LAG updates old.

    python benchmarks/lagged.py --lag 5 --sync --preset classic-control ...
    python benchmarks/lagged.py --lag 0-10 --ess_step --sync ...

With --lag 0-10 the lag of each round is drawn from 0 to 10, each as likely, always in
the same order. Needs --sync, and rounds of one update: --num_actors times
--envs_per_actor equals --batch_size, and --updates_per_batch is 1. The column
policy_lag shows the lag. A resumed run begins without one.

--ess_step multiplies the learning rate of each update by the root of `ess`, the
effective sample size as a share of the steps that count (arXiv 2602.17616).
"""

import collections
import copy
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch

from torchbeast import learner, monobeast
from torchbeast.core import means
from torchbeast.core.weights import SharedWeights


def delay(low: int, high: int) -> type[SharedWeights]:
    """SharedWeights that publish the weights of `low` to `high` publications ago."""
    chance = random.Random(0)

    class LaggedWeights(SharedWeights):
        def publish(
            self, weights: Mapping[str, torch.Tensor], policy_version: int
        ) -> bool:
            if not hasattr(self, "kept"):
                self.kept: collections.deque = collections.deque(maxlen=high + 1)
            self.kept.append((copy.deepcopy(weights), policy_version))
            lag = min(chance.randint(low, high), len(self.kept) - 1)
            return super().publish(*self.kept[-1 - lag])

    return LaggedWeights


def scaled_by_ess(model_loss: Callable[..., Any]) -> Callable[..., Any]:
    """A model_loss that sets the learning rate of the update that follows."""

    def scaled(learner: Any, *arguments: Any) -> Any:
        loss, sums, columns = model_loss(learner, *arguments)
        ess = means.fetch({"ess": columns["ess"]}, ())()["ess"]
        rates = learner.scheduler.get_last_lr()
        for group, rate in zip(learner.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * float(0.0 if ess is None else ess) ** 0.5
        return loss, sums, columns

    return scaled


def main() -> int:
    words = sys.argv[1:]
    place = words.index("--lag")
    low, _, high = words[place + 1].partition("-")
    del words[place : place + 2]
    if "--ess_step" in words:
        words.remove("--ess_step")
        learner.model_loss = scaled_by_ess(learner.model_loss)
    lagged = delay(int(low), int(high or low))
    with mock.patch.object(monobeast, "SharedWeights", lagged):
        return monobeast.main(words)


if __name__ == "__main__":
    sys.exit(main())
