"""libtorchbeast in Python, used wrongly: an exception, and never the process's end."""

import gc
import os
import time
import weakref

import numpy as np
import pytest
import torch
from certificates import Certificates

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


def test_what_proves_nothing(tmp_path):
    """gRPC would listen with most of these, or read without end."""
    made = Certificates(tmp_path)
    for name in ("one", "other"):
        made.make(name, "IP:127.0.0.1")
    one, other = made.identity("one"), made.identity("other")
    garbage, fifo = tmp_path / "garbage", tmp_path / "fifo"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
    os.mkfifo(fifo)
    for arguments, words in [
        ({**one, "tls_key": other["tls_key"]}, "key values mismatch"),
        ({"tls_cert": one["tls_key"], "tls_key": one["tls_cert"]}, "with tls_key"),
        ({**one, "tls_cert": garbage}, "with tls_key"),
        ({"tls_ca": garbage}, "tls_ca"),
        ({"tls_ca": "/dev/zero"}, "tls_ca /dev/zero must be a file of at most"),
        ({"tls_ca": fifo}, "must be a file"),
        ({"tls_ca": ""}, "cannot be read: No such file"),
        ({"tls_server_name": ""}, "tls_server_name is empty"),
        ({"token": ""}, "token is empty"),
    ]:
        with pytest.raises(ValueError, match=words):
            libtorchbeast.Security(**arguments)
    libtorchbeast.Security(**one, **made.ca())


def test_a_pool_on_a_closed_listener_ends():
    listener = libtorchbeast.Listener("127.0.0.1:0")
    queue, batcher = libtorchbeast.BatchingQueue(), libtorchbeast.DynamicBatcher()
    pool = libtorchbeast.ActorPool(5, queue, batcher, [], (), listener=listener)
    listener.close()
    begun = time.monotonic()
    pool.run()
    assert time.monotonic() - begun < 30  # not its maximum_downtime_s


class Owner:
    def call(self, *_): ...


def make_server(owner, address):
    server = libtorchbeast.Server(owner.call, address)
    server.start()
    return server


def make_pool(owner, address):
    owner.queue = libtorchbeast.BatchingQueue(allocator=owner.call)
    batcher = libtorchbeast.DynamicBatcher(allocator=owner.call)
    return libtorchbeast.ActorPool(5, owner.queue, batcher, [address], ())


def make_client(owner, address):
    return libtorchbeast.Client(owner.call, address)


@pytest.mark.parametrize("make", [make_server, make_pool, make_client])
def test_who_calls_its_owner_is_collected(make, tmp_path):
    owner = Owner()
    made = make(owner, f"unix:{tmp_path}/socket")
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is not None  # a pool uses its queue, too
    gone().made = made
    del made
    gc.collect()
    assert gone() is None
    assert not (tmp_path / "socket").exists()  # the server has stopped
