"""Batches that mix online and replayed rollouts, for LASER; see episodes.py."""

import math
from typing import Any

import numpy as np
import torch

from torchbeast.base import ranks
from torchbeast.base.nested import Nested, map_nested
from torchbeast.core.distributions import ActionDistribution, Categorical
from torchbeast.core.finite import ENVIRONMENT_IS_THE_CAUSE, find_cause
from torchbeast.core.means import Mean, mean
from torchbeast.core.rollout import State
from torchbeast.extras.replay.episodes import Reader, Replay
from torchbeast.extras.replay.memory import make_replay

NUM_SAMPLES = 64  # for the mean over a policy that has no sum


class Mixer:
    """Stores the batches of a learner and adds replayed columns to them.

    initial_state: the recurrent state of a new episode, with B = 1.
    """

    def __init__(self, replay: Replay, flags: Any, initial_state: State) -> None:
        self.replay, self._flags, self._initial_state = replay, flags, initial_state
        self._started = False
        self._due = 0.0  # replayed columns
        self.replayed_steps = 0
        self._readers: list[Reader] = []  # of the replayed columns of the last batch
        self._last: tuple[dict[str, Nested], State] | None = None  # these columns

    def add(self, batch: dict[str, Nested], step: int) -> bool:
        """Stores a batch. Returns whether all learners may learn.

        They may once each replay has had learn_start steps, or has been full:
        unfinished episodes may keep it below learn_start.

        Raises:
          FloatingPointError: no loss can use the batch. It is not stored, so that a
            resumed run does not get it from the replay.
        """
        stored = {name: batch[name] for name in self.replay.fields}
        rows = map_nested(lambda x: x.cpu().numpy(), stored)
        cause = find_cause(batch)
        # Logits of masked actions are -inf.
        if ENVIRONMENT_IS_THE_CAUSE in cause or np.isnan(rows["policy_logits"]).any():
            raise FloatingPointError(f"the batch at step {step} is not finite. {cause}")
        self.replay.add(rows, step)
        enough = self.replay.size >= self._flags.learn_start or self.replay.was_full
        self._started = self._started or enough
        return not ranks.highest(not (self._started and self.replay.size > 0))

    def mix(
        self, batch: dict[str, Nested], state: State
    ) -> tuple[dict[str, Nested], State]:
        """Adds replayed columns, replay_ratio for each one of the batch [T + 1, B].

        Returns:
          The batch [T + 1, B + n] with the fields `valid` [T + 1, B + n] and
          `replayed` [B + n], bool; the state before row 0.
        """
        B, device = batch["done"].shape[1], batch["done"].device
        self._due += self._flags.replay_ratio * B
        n = int(self._due + 1e-9)
        self._due -= n
        self._readers, self._last = [], None
        if n == 0:
            return batch, state
        rows, self._readers = self.replay.read(n)
        self.replayed_steps += rows["done"][1:].size

        def join(*columns: torch.Tensor) -> torch.Tensor:
            return torch.cat(columns, dim=1)

        def move(x: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(x).to(device, non_blocking=True)

        states = [reader.state or self._initial_state for reader in self._readers]
        self._last = map_nested(move, rows), map_nested(join, *states)
        online = {"valid": torch.ones_like(batch["done"]), **batch}
        online = {name: online[name] for name in rows}
        mixed, state = map_nested(join, (online, state), self._last)
        return {**mixed, "replayed": torch.arange(B + n, device=device) >= B}, state

    @torch.no_grad()
    def carry_states(self, model: Any) -> None:
        """Computes the states before the next unrolls with the model's new weights."""
        if self._last is None or not self._initial_state:
            return
        rows, state = self._last
        before_last = map_nested(lambda x: x[:-1], rows)
        _, state = model(before_last, state)
        for i, reader in enumerate(self._readers):
            reader.state = tuple(x[:, i : i + 1].clone() for x in state)

    def columns(self, step: int) -> dict[str, float | None]:
        """Columns of logs.csv about the replay."""
        ages = [step - x.episode.stored_at for x in self._readers if x.episode]
        return {
            "replayed_steps": self.replayed_steps,
            "replay_fill": self.replay.size / self.replay.capacity,
            "replay_age": sum(ages) / len(ages) if ages else None,
            "replay_lost": self.replay.num_lost,
        }

    @staticmethod
    def reject(
        batch: dict[str, Any],
        outputs: dict[str, torch.Tensor],
        valid: torch.Tensor,
        distribution: Any,
        flags: Any,
    ) -> tuple[torch.Tensor, dict[str, Mean]]:
        """Replayed steps too far off policy don't count. Arguments: see impala_loss.

        Returns:
          The steps that count, [T, B] bool; columns.
        """
        logits = outputs["policy_logits"][:-1].detach(), batch["policy_logits"][:-1]
        kl = implied_kl(distribution, *logits, flags.clip_rho)
        rejected = kl > flags.kl_threshold
        replayed = valid & batch["replayed"]
        columns = {"frac_rejected": mean(rejected, replayed)}
        return valid & ~(replayed & rejected), columns


def make_mixer(learner: Any) -> Mixer:
    """The mixer of a Learner, with a new replay."""
    replay = make_replay(learner.flags, learner.row_spec)
    return Mixer(replay, learner.flags, learner.model.initial_state(1))


def implied_kl(
    distribution: ActionDistribution,
    target: torch.Tensor,
    behavior: torch.Tensor,
    clip_rho: float,
) -> torch.Tensor:
    """KL(π ‖ π̃) [...] in nats, where π̃ ∝ min(ρ̄ μ, π) is what V-trace evaluates.

    With X = max(0, log π - log μ - log ρ̄), it is E_π[X] + log E_π[exp(-X)] (section
    4.1). Of a Categorical the means are exact, else they are over samples of π.

    Args:
      target, behavior: logits [..., num_logits] of π and μ.
      clip_rho: ρ̄; inf gives 0.
    """
    if isinstance(distribution, Categorical):
        log_target = target.log_softmax(-1)
        log_ratio = log_target - behavior.log_softmax(-1)
        excess = (log_ratio - math.log(clip_rho)).clamp(min=0)
        # An action that is masked adds nothing.
        excess = excess.masked_fill(log_target == -math.inf, 0)
        implied = (log_target - excess).logsumexp(-1)  # in the log, as below
        return (log_target.exp() * excess).sum(-1) + implied
    many = target.expand(NUM_SAMPLES, *target.shape)
    actions = distribution.sample(many)
    log_ratio = distribution.log_prob(many, actions) - distribution.log_prob(
        behavior.expand(many.shape), actions
    )
    excess = (log_ratio - math.log(clip_rho)).clamp(min=0)
    # In the log, because the ratio of two narrow policies leaves float32's range.
    return excess.mean(0) + excess.neg().logsumexp(0) - math.log(len(excess))
