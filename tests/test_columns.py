"""What a fork returns for logs.csv, and how it names fields of a row."""

import os

import numpy as np
import pytest
import runs
import torch

from torchbeast.core.columns import ColumnError, spread


def test_numbers_and_vectors_are_columns():
    row = {
        "a": 3,
        "b": None,
        "c": np.float32(0.5),
        "d": torch.tensor(2),
        "e": torch.tensor([1.5, 2.5]),
        "f": np.array([7]),
        "g": [True, 0.25],
        "h": np.zeros(0),
    }
    expected = {"a": 3, "b": None, "c": 0.5, "d": 2, "e_0": 1.5, "e_1": 2.5}
    assert spread(row) == {**expected, "f_0": 7, "g_0": True, "g_1": 0.25}


@pytest.mark.parametrize(
    "value", ["text", torch.zeros(2, 3), {"a": 1}, [None, [1]], object(), 1j]
)
def test_what_is_no_column(value):
    with pytest.raises(ColumnError, match=r"the column mine(_\d)? of logs\.csv"):
        spread({"mine": value})


def test_two_columns_of_a_name():
    with pytest.raises(ColumnError, match="two columns named x_0"):
        spread({"x_0": 1, "x": [2]})


# A fork that runs in MonoBeast: the processes of the actors import it, too.
FORK = """
import sys
import numpy as np, torch
from torchbeast import learner, model, monobeast
from torchbeast.envs.extra_fields import EXTRA_FIELDS, ExtraField

loss, count = learner.impala_loss, learner.count_batch

def impala_loss(*arguments, **more):
    losses, stats = loss(*arguments, **more)
    many = torch.tensor([2**24 + 1, 3])  # float32 does not have the first
    plain = {"plain": 0.25, "heads": [1, torch.pi], "unknown": None}
    return losses, stats | plain | {"many": many, "yes": many.max() > 0}

def count_batch(*arguments, **options):
    mine = {"seen": np.arange(3), "mine": torch.tensor(1.5)}
    return count(*arguments, **options) | mine

class Net(model.Net):
    def auxiliary_losses(self, *arguments):
        return {"constant_loss": 2}

learner.impala_loss, learner.count_batch, model.Net = impala_loss, count_batch, Net
if __name__ == "__main__":
    sys.exit(monobeast.main())
"""


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """Writes the module fork."""
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return lambda text: (tmp_path / "fork.py").write_text(text)


FLAGS = {**runs.SMALL, "module": "fork", "total_steps": 40}


def test_the_columns_of_a_fork(fork, tmp_path):
    fork(FORK)
    runs.run(tmp_path, "a", **FLAGS)
    rows = runs.read_logs(tmp_path, "a")
    assert len(rows) == 4
    for row in rows:
        found = [row[name] for name in ("plain", "heads_0", "constant_loss", "mine")]
        assert [float(x) for x in found] == [0.25, 1, 2, 1.5]
        assert float(row["heads_1"]) == pytest.approx(torch.pi)
        assert [row[f"seen_{i}"] for i in range(3)] == ["0", "1", "2"]
        assert row["unknown"] == ""
        assert [int(row[f"many_{i}"]) for i in range(2)] == [2**24 + 1, 3]
        assert row["yes"] == "1"
        total = sum(float(row[f"{x}_loss"]) for x in ("pg", "baseline", "entropy"))
        assert float(row["total_loss"]) == pytest.approx(total + 2, rel=1e-5)


def test_a_field_of_the_name_of_another_ends_the_run_with_one_message(fork, tmp_path):
    field = 'EXTRA_FIELDS["valid"] = ExtraField((), np.bool_, of="step")\n'
    fork(FORK.replace("if __name__", field + "if __name__"))
    output = runs.run(tmp_path, "a", **FLAGS, status=1)
    assert "InvalidEnvironmentError: EXTRA_FIELDS declares valid" in output
    assert "Traceback" not in output
