"""A transformer as the recurrent core: --core examples.transformer:TransformerCore.

docs/forking/transformer.md explains it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from torchbeast.core.rollout import State


class AttentionLayer(nn.Module):
    """One layer of TransformerCore: attention, then an MLP; at first the identity."""

    def __init__(self, size: int, heads: int, memory: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(size)
        self.queries = nn.Linear(size, size)
        self.keys_values = nn.Linear(size, 2 * size)
        self.distances = nn.Parameter(torch.zeros(heads, memory + 1))
        self.join = nn.Linear(size, size)
        self.norm_mlp = nn.LayerNorm(size)
        self.expand = nn.Linear(size, 2 * size)
        self.shrink = nn.Linear(2 * size, size)
        for last in (self.join, self.shrink):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(
        self, rows: torch.Tensor, distance: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """Rows [B, N + T, D] of memory and rollout -> rows [B, T, D] of the rollout.

        Args:
          distance: [T, N + T] int64, from a row of the rollout back to each row.
          visible: [B, T, N + T] bool, what each row of the rollout attends to.
        """

        def split(x: torch.Tensor) -> torch.Tensor:  # [B, rows, D] -> [B, H, rows, D/H]
            return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        T = len(distance)
        normed = self.norm(rows)
        queries = self.queries(normed[:, -T:])
        keys, values = self.keys_values(normed).chunk(2, dim=-1)
        # A number per head and distance shows where a row is: [H, T, N + T].
        bias = self.distances[:, distance.clamp(0, self.distances.shape[1] - 1)]
        bias = bias.masked_fill(~visible.unsqueeze(1), -torch.inf)  # [B, H, T, N + T]
        attended = F.scaled_dot_product_attention(
            split(queries), split(keys), split(values), attn_mask=bias
        )
        x = rows[:, -T:] + self.join(attended.transpose(1, 2).flatten(2))
        return x + self.shrink(F.relu(self.expand(self.norm_mlp(x))))


class TransformerCore(nn.Module):
    """Causal self-attention over the rows of one episode (Parisotto et al. 2020).

    Each layer attends to a row itself and to the MEMORY rows before it. The state is
    what each layer got for these (Dai et al. 2019). No row attends to another episode.
    """

    LAYERS, HEADS, MEMORY, SIZE = 2, 4, 32, 128

    def __init__(self, size: int, *sizes: int) -> None:  # its sizes are above
        super().__init__()
        self.hidden_size = self.SIZE
        self.project = nn.Linear(size, self.SIZE)
        self.layers = nn.ModuleList(
            AttentionLayer(self.SIZE, self.HEADS, self.MEMORY)
            for _ in range(self.LAYERS)
        )
        self.norm = nn.LayerNorm(self.SIZE)

    def state_sizes(self, batch_size: int) -> list[tuple[int, ...]]:
        """Of the rows in memory, the oldest first; and 1 for those of the episode."""
        N = self.MEMORY
        return [(self.LAYERS, batch_size, N * self.SIZE), (1, batch_size, N)]

    def unroll(
        self, x: torch.Tensor, done: torch.Tensor, state: State
    ) -> tuple[torch.Tensor, State]:
        """x [T, B, D], done [T, B] -> features [T, B, SIZE], and the new state."""
        N, T = self.MEMORY, len(x)
        memory, used = state
        # The number of each row's episode: 0 in memory, -1 where memory is empty.
        episode = done.long().cumsum(0).T  # [B, T]
        episodes = torch.cat([used[0].long() - 1, episode], dim=1)  # [B, N + T]
        place = torch.arange(N + T, device=x.device)
        distance = place[N:, None] - place  # [T, N + T]
        visible = (distance >= 0) & (distance <= N)
        visible = visible & (episode[:, :, None] == episodes[:, None, :])
        keep = (episodes[:, -N:] == episode[:, -1:]).float()  # [B, N]
        x = self.project(x).transpose(0, 1)  # [B, T, SIZE]
        new_memory = []
        for layer, old in zip(self.layers, memory, strict=True):
            rows = torch.cat([old.unflatten(-1, (N, -1)), x], dim=1)  # [B, N + T, SIZE]
            new_memory.append((rows[:, -N:] * keep.unsqueeze(-1)).flatten(1))
            x = layer(rows, distance, visible)
        x = self.norm(x).transpose(0, 1)
        return x, (torch.stack(new_memory), keep.unsqueeze(0))
