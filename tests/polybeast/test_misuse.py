"""libtorchbeast in Python, used wrongly: an exception, and never the process's end."""

import numpy as np
import pytest
import torch

import libtorchbeast

CLASSES = {
    "ActorPool": "close",
    "Batch": "get_inputs",
    "BatchingQueue": "size",
    "Client": "stop",
    "DynamicBatcher": "size",
    "Listener": "close",
    "Server": "stop",
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_method_before_init(name):
    cls = getattr(libtorchbeast, name)
    with pytest.raises(TypeError, match="before __init__"):
        getattr(cls.__new__(cls), CLASSES[name])()


class Lying(torch.Tensor):
    def numpy(self):
        return "no array"


class AlwaysWithGradient(torch.Tensor):
    requires_grad = True

    def numpy(self):
        raise RuntimeError("call detach() first")

    def detach(self):
        return self


@pytest.mark.parametrize("cls", [Lying, AlwaysWithGradient])
def test_a_tensor_whose_methods_lie(cls):
    queue = libtorchbeast.BatchingQueue(batch_dim=0)
    with pytest.raises((TypeError, ValueError), match=r"numpy|cannot be shared"):
        queue.enqueue(torch.zeros(2, 3).as_subclass(cls))
    queue.enqueue(np.zeros((2, 3)))
    assert queue.size() == 1
