"""libtorchbeast.DynamicBatcher."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from libtorchbeast import AsyncError, DynamicBatcher

A = 7


@pytest.fixture
def threads():
    with ThreadPoolExecutor(32) as pool:
        yield pool


def entry(value, width=1):
    """[1, width, 2] of `value`."""
    return np.full((1, width, 2), value, np.float32)


def serve(batcher, answer):
    """Answer every batch in a thread of its own."""

    def run():
        for batch in batcher:
            batch.set_outputs(answer(batch.get_inputs()))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_everybody_gets_the_own_part(threads):
    batcher = DynamicBatcher(minimum_batch_size=4, timeout_ms=20)
    sizes = []

    def answer(inputs):
        x = inputs["x"]
        sizes.append(x.shape[1])
        return (x * 10, {"first": x[..., 0].long()})

    thread = serve(batcher, answer)
    widths = [1 + i % 3 for i in range(40)]
    inputs = [
        entry(i, width) + np.arange(width)[:, None] for i, width in enumerate(widths)
    ]
    futures = [threads.submit(batcher.compute, {"x": x}) for x in inputs]
    for x, future in zip(inputs, futures, strict=True):
        ten, rest = future.result(timeout=30)
        assert isinstance(ten, torch.Tensor)
        np.testing.assert_array_equal(ten, 10 * x)
        np.testing.assert_array_equal(rest["first"], x[..., 0].astype(np.int64))
    batcher.close()
    thread.join(timeout=10)
    assert sum(sizes) == sum(widths)


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


def test_faulty_inputs_are_the_callers_error():
    batcher = DynamicBatcher()
    with pytest.raises(ValueError, match=r'\["x"\].*no dimension 1'):
        batcher.compute({"x": np.zeros(3)})
    with pytest.raises(TypeError, match=r"\[0\].*str"):
        batcher.compute(["x"])
    assert batcher.size() == 0
