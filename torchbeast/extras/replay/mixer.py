"""Batches that mix online and replayed rollouts, for LASER; see episodes.py."""

from typing import Any

import numpy as np
import torch

from torchbeast.base import ranks
from torchbeast.base.nested import Nested, flatten, map_nested
from torchbeast.core.finite import TOO_LARGE, bounds_rewards, find_cause
from torchbeast.core.means import Mean, mean
from torchbeast.core.rollout import State
from torchbeast.extras.replay.episodes import Reader, Replay
from torchbeast.extras.replay.implied_kl import implied_kl
from torchbeast.extras.replay.memory import make_replay


class Mixer:
    """Stores the batches of a learner and adds replayed columns to them.

    Args:
      flags: replay_ratio, learn_start, reward_clipping, normalize_rewards,
        normalize_observations.
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

        It may learn once the replay has had learn_start steps, or has been full:
        unfinished episodes may keep it below learn_start.

        Raises:
          FloatingPointError: the batch has values that no loss can use. It is not
            stored, so that a resumed run does not get them from the replay.
        """
        stored = {name: batch[name] for name in self.replay.fields}
        arrays = map_nested(lambda x: x.cpu().numpy(), stored)
        if not self._is_usable(arrays):
            cause = find_cause(batch, bounds_rewards(self._flags))
            raise FloatingPointError(
                f"the batch at step {step} is not finite, and is not stored. {cause}"
            )
        self.replay.add(arrays, step)
        enough = self.replay.size >= self._flags.learn_start or self.replay.was_full
        self._started = self._started or enough
        return not ranks.highest(not (self._started and self.replay.size > 0))

    def _is_usable(self, rows: dict[str, Nested]) -> bool:
        """Whether the rows have no value that would make the loss NaN."""
        # Logits of masked actions are -inf.
        bounded = {"policy_logits": True, "truncation_value": False}
        bounded["reward"] = bounds_rewards(self._flags)
        bounded["observation"] = self._flags.normalize_observations
        return all(
            not np.isnan(x).any()
            if is_bounded
            else (np.abs(x) <= min(TOO_LARGE, np.finfo(x.dtype).max)).all()
            for name, is_bounded in bounded.items()
            for x in flatten(rows[name])
            if x.dtype.kind == "f"
        )

    def num_missing(self) -> int:
        """How many steps all replays need before the run may learn."""
        start = self._flags.learn_start
        number = 0 if self._started else max(0, start - self.replay.size)
        return number * ranks.size()

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
        replayed = map_nested(
            lambda x: torch.from_numpy(x).to(device, non_blocking=True), rows
        )
        states = [reader.state or self._initial_state for reader in self._readers]
        replayed_state = map_nested(lambda *x: torch.cat(x, dim=1), *states)
        self._last = replayed, replayed_state
        online = {name: batch[name] for name in replayed if name != "valid"}
        online["valid"] = torch.ones_like(batch["done"])
        mixed, state = map_nested(
            lambda *x: torch.cat(x, dim=1), (online, state), self._last
        )
        is_replayed = torch.arange(B + n, device=device) >= B
        return {**mixed, "replayed": is_replayed}, state

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
        ages = [
            step - episode.stored_at
            for reader in self._readers
            if (episode := reader.episode) and episode.slots
        ]
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
        """Schmitt et al. 2019: replayed steps too far off policy don't count.

        Args:
          batch, outputs, valid, distribution: see impala_loss.
          flags: kl_threshold, clip_rho.

        Returns:
          The steps that count, [T, B] bool; columns.
        """
        logits = outputs["policy_logits"][:-1].detach(), batch["policy_logits"][:-1]
        kl = implied_kl(distribution, *logits, flags.clip_rho)
        rejected = kl > flags.kl_threshold
        replayed = valid & batch["replayed"]
        return valid & ~(replayed & rejected), {
            "frac_rejected": mean(rejected, replayed)
        }


def make_mixer(learner: Any) -> Mixer:
    """The mixer of a Learner, with a new replay."""
    replay = make_replay(learner.flags, learner.row_spec)
    return Mixer(replay, learner.flags, learner.model.initial_state(1))
