"""MonoBeast that measures how far each batch moves the policy, and why.

    python benchmarks/policy_moves.py --preset minatar --xpid moves ...

Adds the column `kl_batch` to logs.csv: the mean over the batch's steps of KL(before ‖
after), in nats, where before and after are the policies before and after all updates
from the batch. At the end it goes back to the state before the batch that moved the
policy most (after the first tenth of the run), repeats its updates with other flags,
and prints a row for each: what the policy would have done then.

Needs a Discrete action space, no minibatches, no replay and no recurrent core.
"""

import argparse
import copy
import math
import sys
from typing import Any
from unittest import mock

import torch

from torchbeast import learner as learning
from torchbeast import monobeast

# Flags that differ when the updates are repeated. clip_pg_rho 0 makes all advantages 0.
TRIALS: dict[str, dict[str, Any]] = {
    "as it was": {},
    "one update": {"updates_per_batch": 1},
    "two updates": {"updates_per_batch": 2},
    "--clip_ratio 0.2": {"clip_ratio": 0.2},
    "no policy gradient": {"clip_pg_rho": 0.0},
    "no value loss": {"baseline_cost": 0.0},
    "no entropy bonus": {"entropy_cost": 0.0},
    "half the learning rate": {"learning_rate": 0.5},  # of what it was
}


class Moves:
    """Wraps learn(); keeps the state before the batch that moved the policy most."""

    def __init__(self) -> None:
        self.learn = monobeast.learn
        self.largest = 0.0
        self.kept: dict[str, Any] = {}
        self.learner: Any = None

    def __call__(self, learner: Any, batch: Any, state: Any) -> learning.Update:
        flags, self.learner = learner.flags, learner
        assert flags.minibatches == 1
        assert not learner.mixer
        assert not state  # no core
        before = policy(learner, batch)
        parts = {"model": learner.model, "optimizer": learner.optimizer}
        saved = {k: copy.deepcopy(part.state_dict()) for k, part in parts.items()}
        step = learner.step
        update = self.learn(learner, batch, state)
        kl = mean_kl(before, policy(learner, batch))
        if kl > self.largest and step > flags.total_steps / 10:
            self.largest = kl
            lag = learner.num_updates - batch["policy_version"][:-1].double().mean() - 1
            self.kept = {"batch": batch, "saved": saved, "step": learner.step}
            self.kept["policy_lag"] = float(lag)
        return update._replace(finish=lambda: {**update.finish(), "kl_batch": kl})

    def repeat(self) -> str:
        """A Markdown table of what each of TRIALS does to the policy."""
        learner, batch = self.learner, self.kept["batch"]
        flags = learner.flags
        lines = [
            f"Step {self.kept['step']:,}, policy lag {self.kept['policy_lag']:.1f}. "
            "After each update:",
            "",
            "| updates | KL | entropy (before: first) | gradient norm | value loss |",
            "|---|---|---|---|---|",
        ]
        for name, changes in TRIALS.items():
            for part, state in self.kept["saved"].items():
                getattr(learner, part).load_state_dict(copy.deepcopy(state))
            changes = dict(changes)
            factor = changes.pop("learning_rate", 1.0)
            for group in learner.optimizer.param_groups:
                group["lr"] *= factor
            learner.flags = flags.replace(**changes)
            before = policy(learner, batch)
            kls, norms, losses, entropies = [], [], [], [mean_entropy(before)]
            for _ in range(learner.flags.updates_per_batch):
                columns = learning.update(learner, batch, (), is_last=True)()
                now = policy(learner, batch)
                kls.append(f"{mean_kl(before, now):.3f}")
                entropies.append(mean_entropy(now))
                norms.append(f"{columns['grad_norm']:.0f}")
                losses.append(f"{columns['baseline_loss']:.0f}")
            shown = [f"{x:.2f}" for x in entropies]
            cells = [name, *(", ".join(x) for x in (kls, shown, norms, losses))]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)


def policy(learner: Any, batch: Any) -> torch.Tensor:
    """Log-probabilities [T, B, A] of the learner's policy for a batch's steps."""
    with torch.no_grad():
        outputs, _ = learner.model(batch)
    return outputs["policy_logits"][:-1].log_softmax(-1)


def mean_kl(before: torch.Tensor, after: torch.Tensor) -> float:
    return float((before.exp() * (before - after)).sum(-1).mean())


def mean_entropy(log_probs: torch.Tensor) -> float:
    return float(-(log_probs.exp() * log_probs).sum(-1).mean())


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        parser = argparse.ArgumentParser(
            description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.parse_args(["--help"])
    moves = Moves()
    with mock.patch.object(monobeast, "learn", moves):
        status = monobeast.main(sys.argv[1:])
    if math.isfinite(moves.largest) and moves.kept:
        print(moves.repeat(), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
