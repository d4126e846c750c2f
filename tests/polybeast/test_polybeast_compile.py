"""--compile in PolyBeast, whose inference gets batches of many sizes."""

import pytest
import runs
import torch

from torchbeast.polybeast.acting import pad

pytestmark = pytest.mark.timeout(900)  # compiling takes a minute on a busy machine


def test_padding_repeats_the_first_environment():
    rows = {"done": torch.tensor([[True, False, False]]), "x": torch.rand(1, 3, 2)}
    state = (torch.rand(2, 3, 5),)
    padded, (padded_state,) = pad((rows, state), 4)
    assert padded["done"].tolist() == [[True, False, False, True]]
    for x, y in ((rows["x"], padded["x"]), (state[0], padded_state)):
        assert torch.equal(y[:, :3], x)
        assert torch.equal(y[:, 3], x[:, 0])
    assert torch.equal(pad(rows, 3)["x"], rows["x"])


@pytest.mark.xdist_group("compile")
def test_a_run_of_polybeast_compiles(tmp_path):
    """Its batches have one to three streams."""
    flags = {**runs.SMALL, "compile": "default", "num_actors": 3, "num_servers": 3}
    flags |= {"module": "torchbeast.polybeast", "envs_per_actor": 1, "use_lstm": True}
    flags |= {"pipes_basename": f"unix:{tmp_path}/pipe", "actor_timeout": 600}
    output = runs.run(tmp_path, "a", timeout=800, **flags)
    assert "Finished at step 600" in output
    rows = runs.read_logs(tmp_path, "a")
    assert len(rows) == 60
    # The compiled policy that acts is that of the learner.
    assert sorted(float(row["policy_lag"]) for row in rows)[30] < 20
