"""--compile in PolyBeast, whose inference gets batches of many sizes."""

import pytest
import runs

pytestmark = pytest.mark.timeout(900)  # compiling takes a minute on a busy machine


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
