"""The module libtorchbeast: arrays in and out, importing, threads."""

import gc
import subprocess
import sys
import textwrap
import weakref

import numpy as np
import pytest
import runs
import torch

from libtorchbeast import BatchingQueue, ClosedBatchingQueue, DynamicBatcher

DTYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64"),
    *("int64", "float16", "float32", "float64"),
]


def through(*items, batch_dim=0):
    """What a queue makes of items."""
    queue = BatchingQueue(batch_dim, minimum_batch_size=len(items))
    for item in items:
        queue.enqueue(item)
    return next(queue)


def run_python(code, **kwargs):
    """A process that runs `code` and has not imported torch."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=runs.patience(60),
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        **kwargs,
    )


# --- Arrays ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_goes_through(name):
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(name)
    for item in (array, torch.from_numpy(array)):
        joined = through(item, item)
        assert joined.dtype == getattr(torch, name)
        np.testing.assert_array_equal(joined.numpy(), np.concatenate([array, array]))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.swapaxes(0, 2),
        lambda x: x[1:, 1:, 1:],
        lambda x: x[:, :1].expand(3, 4, 5) if isinstance(x, torch.Tensor) else x[:, :1],
    ],
)
def test_any_strides(view):
    array = np.arange(60).reshape(3, 4, 5)
    for x in (view(array), view(torch.from_numpy(array))):
        np.testing.assert_array_equal(through(x, x), np.concatenate([x, x]))


def test_negative_strides_foreign_byte_order_and_read_only_memory():
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    np.testing.assert_array_equal(through(array[::-1, ::-1]), array[::-1, ::-1])
    result = through(array.astype(">i4"))
    assert result.dtype == torch.int32
    np.testing.assert_array_equal(result, array)
    array.flags.writeable = False
    through(array)[0] = 9
    assert array[0, 0] == 0


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_contiguous_memory_is_shared(make):
    item = make((3, 4))
    result = through(item)
    result[1, 2] = 5
    assert item[1, 2] == 5


def test_gradients_are_detached():
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    result = through(parameter)
    assert not result.requires_grad
    assert result.data_ptr() == parameter.data_ptr()


@pytest.mark.parametrize(
    ("leaf", "error", "match"),
    [
        (torch.zeros(2, device="meta"), ValueError, r"device meta.*\.cpu\(\)"),
        (torch.zeros(2, dtype=torch.bfloat16), ValueError, r"bfloat16.*\.float\(\)"),
        (np.zeros(2, np.complex64), ValueError, "complex64.*allowed are bool"),
        (np.array([{}]), ValueError, "object"),
        (np.zeros((1,) * 9), ValueError, "more than 8 dimensions"),
        (1.0, TypeError, "torch tensor or a NumPy array, not float"),
        ({1, 2}, TypeError, "set"),
    ],
)
def test_leaves_that_cannot_be_shared(leaf, error, match):
    with pytest.raises(error, match=rf'\[1\]\["x"\].*({match})'):
        BatchingQueue().enqueue((np.zeros((1, 1)), {"x": leaf}))


def test_tuples_lists_and_dicts():
    x = np.zeros((1, 1))
    result = through({"b": [x, (x, [])], "a": {"é": x}})
    assert list(result) == ["a", "b"]
    assert type(result["b"]) is type(result["b"][1]) is tuple
    assert result["b"][1][1] == ()
    assert list(result["a"]) == ["é"]


def test_without_torch_arrays_come_out():
    done = run_python(
        """
        import sys, libtorchbeast, numpy as np
        queue = libtorchbeast.BatchingQueue()
        x = np.arange(6, dtype=np.uint16).reshape(2, 3)
        queue.enqueue([x])
        (y,) = next(queue)
        assert type(y) is np.ndarray and y.dtype == np.uint16, y
        assert np.shares_memory(x, y)
        assert "torch" not in sys.modules
        import torch
        queue.enqueue([x])
        (y,) = next(queue)
        assert type(y) is torch.Tensor, type(y)
        """
    )
    assert done.returncode == 0, done.stderr


# --- Memory ---------------------------------------------------------------------------


def test_references_end_with_the_batch():
    class Array(np.ndarray):
        pass

    item = np.zeros((1, 4)).view(Array)
    gone = weakref.ref(item)
    references = sys.getrefcount(item)
    queue = BatchingQueue(minimum_batch_size=2)
    queue.enqueue((item, item))
    assert sys.getrefcount(item) == references + 2
    queue.enqueue((item, item))
    batch = next(queue)
    assert sys.getrefcount(item) == references  # the batch is a copy
    queue.enqueue(item)
    queue.close()
    assert sys.getrefcount(item) == references
    del batch

    queue = BatchingQueue()
    queue.enqueue(item)
    batch = next(queue)  # shared
    del item
    gc.collect()
    assert gone() is not None
    del batch
    queue.size()  # any call lets go of what has been dropped
    while gone() is not None:
        pass


def test_errors_keep_no_references():
    item = np.zeros((1, 4))
    references = sys.getrefcount(item)
    queue = BatchingQueue()
    for _ in range(10):
        with pytest.raises(TypeError):
            queue.enqueue((item, [item, "x"]))
        with pytest.raises(ValueError, match="4 entries"):
            queue.enqueue((np.zeros((1, 2)), item))
    batcher = DynamicBatcher()
    batcher.close()
    for _ in range(10):
        with pytest.raises(ClosedBatchingQueue):
            batcher.compute(item)
    assert sys.getrefcount(item) == references
