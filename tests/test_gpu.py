"""Runs and updates on a GPU, in both variants, beside those of the CPU."""

import pytest
import runs
import test_learner
import torch

from torchbeast.base.nested import map_nested
from torchbeast.learner import learn

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(400),
]

MONOBEAST, POLYBEAST = "torchbeast.monobeast", "torchbeast.polybeast"
KINDS = {
    "plain": {},
    "lstm": {"use_lstm": True, "precision": "bf16", "num_learner_threads": 2},
    "adam": {
        **{"optimizer": "adam", "clip_ratio": 0.2, "normalize_advantages": True},
        **{"updates_per_batch": 2, "minibatches": 2},
    },
    "normalized": {"normalize_observations": True, "normalize_rewards": True},
    "replay": {"replay_size": 500, "replay_ratio": 1.5, "learn_start": 100},
    "compiled": {"compile": "default", "actor_timeout": 300},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", [MONOBEAST, POLYBEAST])
def test_a_run(tmp_path, variant, kind):
    """It learns on the GPU, and a later start goes on from its checkpoint."""
    flags = {**runs.SMALL, "module": variant, **KINDS[kind]}
    if variant == POLYBEAST:
        flags |= {"num_servers": 2, "envs_per_actor": 2}  # batches of whole streams
        flags |= {"pipes_basename": f"unix:{tmp_path}/pipe"}
    output = runs.run(tmp_path, "gpu", timeout=300, **flags)
    assert "Finished at step 600" in output
    runs.run(tmp_path, "gpu", timeout=300, **{**flags, "total_steps": 900})
    rows = runs.read_logs(tmp_path, "gpu")
    assert float(rows[-1]["step"]) == 900
    losses = [float(row["total_loss"]) for row in rows if row["total_loss"]]
    assert losses
    assert max(map(abs, losses)) < 1e6
    saved = torch.load(tmp_path / "gpu" / "model.tar", weights_only=True)
    devices = {x.device.type for x in saved["model_state_dict"].values()}
    assert devices == {"cuda"}


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--use_lstm",),
        ("--optimizer", "adam", "--clip_ratio", "0.2", "--normalize_advantages"),
    ],
    ids=["plain", "lstm", "adam"],
)
def test_an_update_equals_that_of_the_cpu(argv):
    cpu = test_learner.make_learner(*argv)
    gpu = test_learner.make_learner("--no-disable_cuda", *argv)
    assert gpu.device.type == "cuda"
    gpu.model.load_state_dict(cpu.model.state_dict())
    batch = test_learner.make_batch(cpu)
    for _ in range(4):
        row = learn(cpu, *batch).finish()
        other = learn(gpu, *map_nested(lambda x: x.to(gpu.device), batch)).finish()
        for name in ("total_loss", "grad_norm", "entropy"):
            assert other[name] == pytest.approx(row[name], rel=1e-3, abs=1e-4), name
    for x, y in zip(cpu.model.parameters(), gpu.model.parameters(), strict=True):
        torch.testing.assert_close(x, y.cpu(), rtol=1e-3, atol=1e-5)
