"""--rollouts episode: cuts the learner's rollouts where episodes end."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torchbeast.base.flag import Group, flag
from torchbeast.base.nested import Nested, map_nested

if TYPE_CHECKING:
    import torch

    from torchbeast.core.rollout import State


# fmt: off
class Flags(Group):
    title = "episodes"
    rollouts: str = flag("fixed", "episode: cuts them where episodes end",
        choices=["fixed", "episode"])
# fmt: on


def cut_at_episodes(
    batch: dict[str, Nested], state: State
) -> tuple[dict[str, Nested], State]:
    """Splits rollouts [T + 1, B, ...] where episodes end: one episode per part.

    A part has T + 1 rows, too, and its steps keep their t. The row after the last step
    is the first of the next episode, as before. The other rows are padding: zeros, but
    the part's first observation, because zero may not be in the space.

    Returns:
      Rollouts [T + 1, N, ...], N >= B, with the field `valid` [T + 1, N] bool, the rows
      of the part's episode; the state [layers, N, ...] before row 0.
    """
    import torch

    begins = batch["done"].clone()
    begins[0] = True
    episode = begins.cumsum(0)  # [T + 1, B]: its number in the rollout
    columns, begin = begins[:-1].T.nonzero().unbind(1)  # row T alone has no step
    inside = episode[:, columns] == episode[begin, columns]  # [T + 1, N]
    t = torch.arange(len(begins), device=begins.device).unsqueeze(1)
    kept = inside | (t == begin + inside.sum(0))

    def keep(name: str, x: torch.Tensor) -> torch.Tensor:
        rows = kept.reshape(*kept.shape, *[1] * (x.dim() - 2))
        other = x[begin, columns] if name == "observation" else x.new_zeros(())
        return torch.where(rows, x[:, columns], other)

    fields = batch.keys() - {"replayed", "valid"}
    cut = {k: map_nested(functools.partial(keep, k), batch[k]) for k in fields}
    if "replayed" in batch:
        cut["replayed"] = batch["replayed"][columns]
    valid = batch.get("valid", torch.ones_like(batch["done"]))[:, columns]
    return {**cut, "valid": valid & inside}, tuple(x[:, columns] for x in state)
