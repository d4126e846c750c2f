"""AMIGo, adversarially motivated intrinsic goals (Campero et al. 2021), for grids.

A teacher proposes a goal, a cell of the grid. The agent is rewarded if the content of
the cell changes: it steps on it, takes the object, opens the door. Then, and when the
episode ends, the teacher proposes the next goal. It is rewarded for goals that take at
least t* steps, and for the one with which the agent wins, and pays for all others. t*
rises by 1 when ten of its batches in a row have gone well.

The cells must be those of the whole grid: MiniGrid's FullyObsWrapper, MiniHack's chars.
In the agent's own view nearly all cells change with each move.

Differences: the policy sees the whole grid, too; the agent's reward does not fall with
the steps it takes; the teacher has no bonus for objects and no weights for goals of its
older networks; t* has no limit; goals are drawn by a hash of the observations so far,
so runs with --sync are equal, but in a test they follow from earlier games, too; the
last step of an episode reaches no goal, because its observation is in no rollout.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

from examples.exploration.common import Hash
from torchbeast.base import ranks
from torchbeast.core.observations import iterate_observation, iterate_space
from torchbeast.core.rollout import not_replayed
from torchbeast.envs.values import InvalidEnvironmentError
from torchbeast.extras.explorer.method import Explored, ExplorerActor, Method


class Cells(nn.Module):
    """Grids [N, H, W, C] of codes -> [N, size, H, W], the sum of a vector per code."""

    def __init__(self, grid: spaces.Box, size: int) -> None:
        super().__init__()
        self.codes, channels = int(grid.high.max()) + 1, grid.shape[-1]
        # On CPUs the gradient of an EmbeddingBag takes twice as long or more.
        self.embed = nn.Embedding(channels * self.codes, size)

    def forward(self, grid: torch.Tensor) -> torch.Tensor:
        channel = torch.arange(grid.shape[-1], device=grid.device)
        codes = grid.long() + self.codes * channel
        return self.embed(codes).sum(-2).movedim(-1, 1)


class Teacher(nn.Module):
    """Grids [N, H, W, C] -> logits of goals [N, H * W] and values [N]."""

    def __init__(self, grid: spaces.Box, size: int = 16) -> None:
        super().__init__()
        same = [nn.Conv2d(size, size, 3, padding=1) for _ in range(3)]
        layers = [x for layer in same for x in (layer, nn.ELU())]
        self.layers = nn.Sequential(Cells(grid, size), *layers)
        self.goal, self.value = nn.Conv2d(size, 1, 1), nn.Linear(size, 1)

    def forward(self, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layers(grid)
        return self.goal(x).flatten(1), self.value(x.mean((2, 3))).squeeze(-1)


class Goals(ExplorerActor):
    """Keeps the goal and draws the next one. Its state is the goal and a random key.

    Fields [T, B]: `goal`, the number of a cell; `goal_steps` since it was drawn, and
    `goal_grid` [T, B, H, W, C] of then; `goal_reached`, whether the step to this row
    has reached the goal of the row before.
    """

    def __init__(self, space: spaces.Space, size: int = 16) -> None:
        super().__init__()
        self.space = space
        leaves: list[Any] = iterate_space(space)
        grids = [
            i
            for i, x in enumerate(leaves)
            if x.dtype == np.uint8 and len(x.shape) in (2, 3)
        ]
        if not grids:
            raise InvalidEnvironmentError(
                f"AMIGo needs a grid [H, W, C] or [H, W] of bytes, got {space}. Give "
                "MiniGrid --wrapper minigrid.wrappers:FullyObsWrapper,"
                "minigrid.wrappers:ImgObsWrapper, and MiniHack the observation key "
                "chars"
            )
        self.place, grid = grids[0], leaves[grids[0]]
        if len(grid.shape) == 2:
            grid = spaces.Box(grid.low[..., None], grid.high[..., None], dtype=np.uint8)
        self.height, self.width = grid.shape[:2]
        self.shape, self.hash = grid.shape, Hash(space, 2**40)
        self.teacher = Teacher(grid)
        # The policy's: the grid with a mark at the goal.
        self.look = Cells(grid, size)
        layers = nn.Conv2d(size + 1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1)
        end = nn.ReLU(), nn.Flatten(), nn.LazyLinear(256)
        self.layers = nn.Sequential(*layers, *end)
        self.layers(torch.zeros(1, size + 1, self.height, self.width))  # finds its size

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        zeros = self.hash.factors.new_zeros(1, batch_size)  # int64
        grid = zeros.new_zeros(1, batch_size, *self.shape, dtype=torch.uint8)
        return zeros, zeros, zeros, grid

    def grid(self, rows: dict[str, Any]) -> torch.Tensor:
        x = iterate_observation(self.space, rows["observation"])[self.place]
        return x.unflatten(-1, self.shape[1:]) if x.dim() == 4 else x

    @torch.no_grad()
    def act(
        self, rows: dict[str, Any], state: tuple[torch.Tensor, ...]
    ) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        key, goal, steps, before = state  # [1, B, ...]
        grid, done = self.grid(rows), rows["done"]
        changed = (grid != before).any(-1).flatten(2)  # [1, B, H * W]
        reached = changed.gather(-1, goal.unsqueeze(-1)).squeeze(-1) & ~done
        key = (key ^ self.hash(rows["observation"])) * 6364136223846793005 + 1
        new = reached | done
        chance = ((key[new] >> 32) & (2**24 - 1)) / 2**24  # in [0, 1)
        sums = self.teacher(grid[new])[0].softmax(-1).cumsum(-1)
        drawn = (sums <= chance.unsqueeze(-1)).sum(-1).clamp(max=sums.shape[-1] - 1)
        goal = goal.masked_scatter(new, drawn)
        steps = (steps + 1).masked_fill(new, 0)
        before = torch.where(new.view(*new.shape, 1, 1, 1), grid, before)
        fields = {"goal": goal, "goal_steps": steps, "goal_grid": before}
        return {**fields, "goal_reached": reached}, (key, goal, steps, before)

    def features(self, rows: dict[str, Any]) -> torch.Tensor:
        goal = F.one_hot(rows["goal"].flatten(), self.height * self.width)
        mark = goal.view(-1, 1, self.height, self.width)
        x = self.look(self.grid(rows).flatten(0, 1))
        return self.layers(torch.cat([x, mark], 1)).relu()


class AMIGo(Method):
    """
    Args:
      scale: of the agent's reward.
      batch_size: goals per update of the teacher, at least.
      cost: what the teacher pays for each goal; one of t* steps or more returns 1.
      entropy_cost: of the teacher.
      least_steps: the first t*.
      good: the mean reward of a batch that went well.
    """

    actor: Goals
    least_steps: torch.Tensor  # float32, t*
    good_batches: torch.Tensor  # int64, in a row

    def __init__(
        self,
        observation_space: spaces.Space,
        distribution: Any,
        scale: float = 1.0,
        batch_size: int = 32,
        cost: float = 0.1,
        entropy_cost: float = 0.05,
        least_steps: float = 7,
        good: float = 0.1,
    ) -> None:
        super().__init__()
        self.scale, self.batch_size, self.cost = scale, batch_size, cost
        self.entropy_cost, self.good = entropy_cost, good
        self.actor = Goals(observation_space)
        self.register_buffer("least_steps", torch.tensor(float(least_steps)))
        self.register_buffer("good_batches", torch.zeros((), dtype=torch.int64))
        self.waiting: dict[str, torch.Tensor] = {}  # goals that the teacher learns from

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return self.waiting

    def set_extra_state(self, saved: dict[str, torch.Tensor]) -> None:
        # The checkpoint has those of rank 0. Goals of the others are lost at a resume.
        self.waiting = saved if ranks.rank() == 0 else {}

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.actor.teacher.parameters(), lr=0.001)

    def explore(self, rows: dict[str, Any], valid: torch.Tensor) -> Explored:
        done = rows["done"][1:]
        # A replay can show a part of an episode after the end of another one.
        reached = rows["goal_reached"][1:] & valid & ~done
        ended = not_replayed(rows, (reached | done) & valid)  # goals
        fields = {x: rows[f"goal_{x}"][:-1] for x in ("grid", "steps")}
        fields |= {"goal": rows["goal"][:-1], "reached": reached}
        fields["won"] = rows["reward"][1:] > 0
        for name, x in fields.items():
            new, old = x[ended], self.waiting.get(name, x[:0].flatten(0, 1))
            self.waiting[name] = torch.cat([old.to(new.device), new])
        columns = {
            "goals": ranks.total(ended.sum()),
            "goals_reached": ranks.total((ended & reached).sum()),
            "goal_least_steps": self.least_steps.clone(),
        }
        return Explored(self.scale * reached, None, self.teach(), columns)

    def teach(self) -> torch.Tensor | None:
        """The loss of the teacher, a sum over goals; None: too few have ended."""
        goals = self.waiting
        number = ranks.total(torch.tensor(len(goals["goal"])))
        if number < self.batch_size:
            return None
        self.waiting = {}
        far = goals["reached"] & (goals["steps"] + 1 >= self.least_steps)
        reward = far.float() - self.cost
        good = ranks.total(reward.sum()) >= self.good * number
        self.good_batches.copy_((self.good_batches + 1) * good)
        rises = self.good_batches == 10
        self.least_steps += rises
        self.good_batches *= ~rises
        reward = torch.where(goals["won"], 1.0, reward)
        logits, value = self.actor.teacher(goals["grid"])
        logits = logits.log_softmax(-1)
        chosen = logits.gather(-1, goals["goal"].unsqueeze(-1)).squeeze(-1)
        error = reward - value
        entropy = -(logits.exp() * logits).sum(-1)
        losses = -chosen * error.detach() + 0.5 * error.square()
        return (losses - self.entropy_cost * entropy).sum()
