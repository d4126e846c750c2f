import pytest
import torch


@pytest.fixture(autouse=True)
def repeatable():
    """Small tensors, few cores: one thread is fastest. Every test has its own seed."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
