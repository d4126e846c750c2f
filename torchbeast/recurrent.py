"""Recurrent cores: from features and a state to features and the next state.

To try another core, write it here and add its name to CORES, and to --core in flags.py.
"""

import itertools
from typing import Any

import torch
from torch import nn

from torchbeast.core.rollout import State


class RecurrentCore:
    """What the cores of Net share. Another core needs hidden_size and these methods."""

    num_states = 1  # tensors in the state

    def state_sizes(self: Any, batch_size: int) -> list[tuple[int, ...]]:
        """Of the state before an episode: [layers, B, size] per tensor."""
        size = (self.num_layers, batch_size, self.hidden_size)
        return [size] * self.num_states

    def unroll(
        self: Any, x: torch.Tensor, done: torch.Tensor, state: State
    ) -> tuple[torch.Tensor, State]:
        """Runs over x [T, B, D]; zeroes the state where an episode begins.

        It cuts the rows at those where any episode begins. Within a piece no state is
        reset, so that one call processes a piece.

        Returns:
          features [T, B, hidden_size], and the last state.
        """
        begins = [0, *(done[1:].any(dim=1).nonzero().flatten() + 1).tolist(), len(x)]
        outputs = []
        for first, last in itertools.pairwise(begins):
            keep = (~done[first]).to(x.dtype).view(1, -1, 1)
            state = tuple(keep * tensor for tensor in state)
            y, after = self(x[first:last], state if len(state) > 1 else state[0])
            state = after if isinstance(after, tuple) else (after,)
            outputs.append(y)
        return torch.cat(outputs), state

    @torch.no_grad()
    def remember(self: Any, forget_bias: float) -> None:
        """Adds to the bias of the gate that keeps the state, as new weights need it.

        It is the second gate: the LSTM's forget gate (Gers et al. 2000), the GRU's
        update gate.
        """
        gate = slice(self.hidden_size, 2 * self.hidden_size)
        for layer in range(self.num_layers):
            getattr(self, f"bias_ih_l{layer}")[gate] += forget_bias


class LSTMCore(RecurrentCore, nn.LSTM):
    num_states = 2


class GRUCore(RecurrentCore, nn.GRU):
    pass


CORES: dict[str, Any] = {"lstm": LSTMCore, "gru": GRUCore}
