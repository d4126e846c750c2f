"""Rewards that the learner makes itself: --explorer MODULE:CLASS[JSON].

Such a class is a method: a torch module with networks of its own. The learner gives it
each batch and adds what it returns to the rewards. Six are in examples/exploration.
"""

import abc
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchbeast.base import devices, ranks
from torchbeast.base.errors import FlagError
from torchbeast.base.named import call_named, find_named
from torchbeast.base.nested import Nested
from torchbeast.core import means
from torchbeast.core.columns import join_columns, spread
from torchbeast.core.means import mean
from torchbeast.core.rollout import State, valid_steps


class ExplorerActor(torch.nn.Module):
    """The part of a method that acts: per-episode state, and fields of the row.

    It is part of the model, so that actors get its weights with those of the policy.
    """

    def initial_state(self, batch_size: int) -> State:
        """The state of new episodes: tensors [layers, B, ...]."""
        return ()

    def act(
        self, rows: dict[str, Nested], state: State
    ) -> tuple[dict[str, torch.Tensor], State]:
        """Computes fields [1, B, ...] of one row, before the policy acts on it.

        Args:
          rows: of the environment: observation, done, reward, last_action [1, B, ...].
          state: before the row. If done, it belongs to the episode before.

        Returns:
          Fields of the row, under new names, and the state after it.
        """
        return {}, state

    def features(self, rows: dict[str, Nested]) -> torch.Tensor:
        """What the policy gets of the fields: [T * B, D], of rows [T, B, ...]."""
        return rows["reward"].new_zeros(rows["reward"].numel(), 0)


class Explored(NamedTuple):
    """What a method returns for the T steps of a batch."""

    reward: torch.Tensor  # [T, B], detached, of the steps to rows 1 to T
    # [T, B], for a value head of its own; unused without one. If it is not 0 where an
    # episode ends, the value goes on into the next one.
    discount: torch.Tensor | None
    loss: torch.Tensor | None  # a sum over the steps that count, for its optimizer
    columns: dict[str, Any]  # of logs.csv, see impala_loss


class Method(torch.nn.Module, abc.ABC):
    """What a method has. It is made with (observation_space, distribution, **JSON).

    Attributes:
      value_head: its rewards have a value of their own. Otherwise they are added to
        those of the environment, and discounted like them.
      actor: the part of it that acts, or None.
    """

    value_head = False

    def __init__(self) -> None:
        super().__init__()
        self.actor: ExplorerActor | None = None  # a class attribute would hide it

    def make_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of its networks and its actor's; None: none."""
        weights = [x for x in self.parameters() if x.requires_grad]
        return torch.optim.Adam(weights, lr=1e-4) if weights else None

    @abc.abstractmethod
    def explore(self, rows: dict[str, Nested], valid: torch.Tensor) -> Explored:
        """Rewards, and what to learn, of rows [T + 1, B, ...].

        Args:
          rows: the batch, with replayed columns if there is a replay.
          valid: [T, B] bool, the steps that count.
        """


def make_method(explorer: str | None, *about: Any) -> Any:
    """Makes the Method that --explorer names; None without a name. Raises UserError."""
    if not explorer:
        return None
    kind, arguments = find_named("--explorer", explorer)
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        base = f"{Method.__module__}.Method"
        raise FlagError(f"--explorer {explorer} is no class with the base {base}")
    return call_named(f"--explorer {explorer}", kind, *about, **arguments)


class Explorer:
    """The learner's half: the method, whose actor is the model's, and its optimizer."""

    def __init__(self, flags: Any, model: Any, device: torch.device) -> None:
        about = model.observation_space, model.distribution
        self.method = make_method(flags.explorer, *about).to(device)
        self.method.actor = model.explorer
        self.optimizer = self.method.make_optimizer()
        self.max_norm = flags.grad_norm_clipping

    def state_dict(self) -> dict[str, Any]:
        optimizer = self.optimizer.state_dict() if self.optimizer else {}
        return {"method": self.method.state_dict(), "optimizer": optimizer}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.method.load_state_dict(saved["method"])
        if self.optimizer:  # its settings are those of --explorer now
            groups = self.optimizer.state_dict()["param_groups"]
            moments = {**saved["optimizer"], "param_groups": groups}
            self.optimizer.load_state_dict(moments)

    def explore(
        self, rows: dict[str, Nested]
    ) -> tuple[dict[str, Nested], Callable[[], dict[str, Any]]]:
        """Makes the rewards of a batch [T + 1, B, ...], and one update of the method.

        Returns:
          The batch with the field `intrinsic_reward` and, if there is a value head,
          `intrinsic_discount`, [T + 1, B]; row 0 is unused. And a function that waits
          for a GPU and returns columns.
        """
        valid = valid_steps(rows)[:-1]
        found = self.method.explore(rows, valid)
        for name, x in ("reward", found.reward), ("discount", found.discount):
            if x is not None and x.shape != valid.shape:
                shapes = f"{list(x.shape)}, not [T, B] = {list(valid.shape)}"
                raise ValueError(f"--explorer: the {name} has the shape {shapes}")
        columns: dict[str, Any] = {"mean_intrinsic_reward": mean(found.reward, valid)}
        sums = []
        if learns := self.optimizer is not None and found.loss is not None:
            columns |= {"explorer_loss": found.loss}
            columns |= {"explorer_grad_norm": self._gradient(found.loss)}
            sums = ["explorer_loss"]
        numbers = means.fetch(join_columns(columns, found.columns), sums)

        def check() -> dict[str, Any]:
            row = spread(numbers())
            if not all(math.isfinite(row[name] or 0) for name in columns):
                raise FloatingPointError(
                    f"rewards, loss or gradient of --explorer are not finite: {row}"
                )
            return row

        if not devices.works_ahead(found.reward.device):
            check()  # before the method changes
        if learns:
            self.optimizer.step()
            self.optimizer.zero_grad()  # the policy's update must not see them
        rows = rows | {"intrinsic_reward": pad(found.reward)}
        if self.method.value_head:
            rows["intrinsic_discount"] = pad(found.discount)
            # The method's value of a truncated episode's last observation is not used.
            rows["truncation_value"] = rows["truncation_value"][..., 0]
        return rows, check

    def _gradient(self, loss: torch.Tensor) -> torch.Tensor:
        """The gradient of all ranks, clipped; returns its norm before."""
        self.optimizer.zero_grad()
        loss.backward()
        weights = [x for group in self.optimizer.param_groups for x in group["params"]]
        ranks.add_gradients(weights)
        return torch.nn.utils.clip_grad_norm_(weights, self.max_norm)


def pad(x: torch.Tensor) -> torch.Tensor:
    """[T, B] of steps -> [T + 1, B], row t + 1 for step t."""
    return torch.nn.functional.pad(x, (0, 0, 1, 0))
