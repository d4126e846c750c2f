"""--compile: torch.compile for the update and for acting learns the same."""

import pytest
import test_learner
import torch
from torch._dynamo.utils import counters

from torchbeast.base.errors import FlagError
from torchbeast.learner import learn

# Compiling takes a minute on a busy machine.
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

ARGV = (
    *("--clip_ratio", "0.2", "--normalize_advantages", "--trace_decay", "0.95"),
    *("--final_entropy_cost", "0.001", "--normalize_observations"),
)


@pytest.mark.xdist_group("compile")
def test_the_compiled_update_equals_the_other():
    """It is one piece of code, made once, though the progress of the run is new."""
    learner = test_learner.make_learner(*ARGV)
    compiled = test_learner.make_learner("--compile", "default", *ARGV)
    batch, state = test_learner.make_batch(learner)
    counters.clear()
    for _ in range(4):
        row, other = (
            learn(learner, batch, state).finish(),
            learn(compiled, batch, state).finish(),
        )
        for name, value in row.items():
            if name != "sps":
                assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name
    for x, y in zip(
        learner.model.parameters(), compiled.model.parameters(), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_a_missing_compiler_is_one_message(monkeypatch):
    torch.compiler.reset()  # what other tests have compiled
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "/nowhere/c++"))
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    with pytest.raises(FlagError, match=r"can't compile: .*/nowhere"):
        test_learner.make_learner("--compile", "default")
