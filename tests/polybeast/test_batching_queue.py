"""libtorchbeast.BatchingQueue."""

import threading

import numpy as np
import pytest
import torch

from libtorchbeast import BatchingQueue

T, B, A = 5, 6, 7


def leaf(value, width=1, shape=(T, 2)):
    """[T, width, 2] of `value`."""
    return np.full((shape[0], width, *shape[1:]), value, np.float32)


def test_joins_along_the_batch_dimension():
    queue = BatchingQueue(batch_dim=1, minimum_batch_size=B, maximum_batch_size=B)
    items = [torch.randn(T, 1 + i % 2, A) for i in range(4)]
    for item in items:
        queue.enqueue({"b": (item, [item[..., 0].to(torch.float64)]), "a": item.int()})
    assert queue.size() == 4
    batch = next(queue)
    joined = torch.cat(items, 1)
    assert list(batch) == ["a", "b"]
    assert type(batch["b"]) is tuple
    assert type(batch["b"][1]) is tuple
    torch.testing.assert_close(batch["a"], joined.int(), rtol=0, atol=0)
    torch.testing.assert_close(batch["b"][0], joined, rtol=0, atol=0)
    torch.testing.assert_close(
        batch["b"][1][0], joined[..., 0].to(torch.float64), rtol=0, atol=0
    )
    assert queue.size() == 0


def test_items_without_a_batch_are_value_errors_that_name_the_place():
    queue = BatchingQueue(batch_dim=1)
    with pytest.raises(ValueError, match="without any array"):
        queue.enqueue(((), {"a": []}))
    with pytest.raises(ValueError, match=r'\[1\]\["x"\].*no dimension 1'):
        queue.enqueue((leaf(0), {"x": np.zeros(3)}))
    with pytest.raises(ValueError, match=r"the root.*no dimension 1"):
        queue.enqueue(torch.tensor(1.0))


def test_enqueue_on_a_full_queue_lets_other_threads_consume():
    queue = BatchingQueue(maximum_queue_size=1)
    consumed = []

    def consume():
        while len(consumed) < 50:
            # An item that waits for room may be in a batch already.
            consumed.extend(next(queue)[0, :, 0].tolist())

    consumer = threading.Thread(target=consume)
    consumer.start()
    for i in range(50):
        queue.enqueue(leaf(i))
    consumer.join(timeout=30)
    assert consumed == list(range(50))


class TestAllocator:
    def test_batches_are_made_in_its_memory(self):
        blocks = []

        def allocate(num_bytes):
            blocks.append(torch.zeros(num_bytes + 8, dtype=torch.uint8))
            return blocks[-1]

        queue = BatchingQueue(minimum_batch_size=2, allocator=allocate)
        for round_ in range(3):
            queue.enqueue(leaf(round_))
            queue.enqueue(leaf(7))
            batch = next(queue)
            assert batch.data_ptr() == blocks[0].data_ptr()
            assert batch[0, :, 0].tolist() == [round_, 7]
            del batch
        assert len(blocks) == 1

    @pytest.mark.parametrize(
        ("allocator", "error", "match"),
        [
            (lambda n: bytearray(n - 1), ValueError, "bytes.*needed"),
            (bytes, ValueError, "read-only"),
            (lambda n: None, TypeError, "bytes-like"),
            (lambda n: memoryview(bytearray(n + 8))[1:], ValueError, "aligned"),
            (lambda n: 1 // 0, ZeroDivisionError, "division"),
        ],
    )
    def test_its_errors(self, allocator, error, match):
        queue = BatchingQueue(allocator=allocator)
        queue.enqueue(leaf(0))
        with pytest.raises(error, match=match):
            next(queue)
