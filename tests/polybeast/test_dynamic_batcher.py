"""libtorchbeast.DynamicBatcher."""

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from libtorchbeast import AsyncError, DynamicBatcher

A = 7


@pytest.fixture
def threads():
    with ThreadPoolExecutor(32) as pool:
        yield pool


def entry(value, width=1):
    """[1, width, 2] of `value`."""
    return np.full((1, width, 2), value, np.float32)


@pytest.mark.parametrize("wrong", [entry(0, 4), (entry(0, 3), {"x": entry(0, 2)}), ()])
def test_wrong_outputs_can_be_corrected(threads, wrong):
    batcher = DynamicBatcher(minimum_batch_size=3)
    future = threads.submit(batcher.compute, entry(1, 3))
    batch = next(batcher)
    with pytest.raises(ValueError, match=r"dimension|without any array|entries"):
        batch.set_outputs(wrong)
    assert not future.done()
    batch.set_outputs(entry(5, 3))
    assert future.result(timeout=10).tolist() == entry(5, 3).tolist()


def test_a_batch_dropped_unanswered(threads):
    batcher = DynamicBatcher(minimum_batch_size=2)
    futures = [threads.submit(batcher.compute, entry(i)) for i in range(2)]
    batch = next(batcher)
    del batch
    gc.collect()
    for future in futures:
        with pytest.raises(AsyncError, match="dropped"):
            future.result(timeout=10)
    assert issubclass(AsyncError, RuntimeError)
