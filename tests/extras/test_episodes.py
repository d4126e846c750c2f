"""--rollouts episode: rollouts that are cut where episodes end."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from loss_cases import A, B, T, make_batch
from nets import make_rows
from test_loss_masks import joined

from torchbeast.extras.episodes import cut_at_episodes


def test_cut_rollouts_have_the_loss_of_the_whole_ones():
    batch, outputs = make_batch()
    tensors = {name: torch.as_tensor(x) for name, x in batch.items()}
    state = (torch.arange(B).view(1, B, 1).double(),)
    cut, cut_state = cut_at_episodes(tensors, state)
    columns = [0, 1, 1, 2, 2]
    assert cut["done"].shape == (T + 1, len(columns))
    assert cut_state[0].flatten().tolist() == columns
    # Each column has rows of one episode; see make_batch for the ends.
    rows = [cut["valid"][:, i].nonzero().flatten().tolist() for i in range(5)]
    assert rows == [[0, 1, 2, 3, 4, 5], [0, 1, 2], [3, 4, 5], [0, 1], [2, 3, 4, 5]]
    chosen = {name: x[:, columns] for name, x in outputs.items()}
    noise = np.random.default_rng(2).normal(size=chosen["baseline"].shape)
    padded = ~cut["valid"].numpy()
    chosen["baseline"] = chosen["baseline"] + noise * padded
    arrays = {name: x.numpy() for name, x in cut.items()}
    loss, stats, gradients = joined(arrays, chosen, arrays["valid"])
    expected, expected_stats, expected_gradients = joined(batch, outputs)
    assert loss == pytest.approx(expected)
    for name in expected_stats:
        assert stats[name].item() == pytest.approx(expected_stats[name].item()), name
    for name, x in gradients.items():
        assert not x[torch.as_tensor(padded)].any(), name
        whole = torch.zeros_like(expected_gradients[name])
        whole.index_add_(1, torch.tensor(columns), x)
        torch.testing.assert_close(whole, expected_gradients[name])


@pytest.mark.parametrize(
    "space",
    [spaces.Discrete(5, start=3), spaces.MultiDiscrete([3, 4], start=np.array([2, 7]))],
)
def test_cut_rollouts_have_observations_of_the_space(space):
    rows = make_rows(space, spaces.Discrete(A), rows=T + 1)
    rows["done"][2:4, 1] = True
    cut, _ = cut_at_episodes(rows, ())
    assert cut["done"].shape[1] > rows["done"].shape[1]
    for observation in cut["observation"].flatten(0, 1).numpy():
        assert observation in space
