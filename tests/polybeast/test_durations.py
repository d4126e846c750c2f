"""Durations of libtorchbeast's classes: huge, infinite, and such that make no sense."""

import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gymnasium import spaces

from libtorchbeast import (
    ActorPool,
    BatchingQueue,
    Client,
    DynamicBatcher,
    Listener,
    Server,
    probe,
)

T = 4


class Slow:
    """Steps for longer than the pool's period of looking for streams that hang."""

    action_space = spaces.Discrete(2)

    def __init__(self):
        self.steps = 0

    def reset(self):
        return torch.zeros(3).numpy()

    def step(self, action):
        self.steps += 1
        time.sleep(0.25 if self.steps == 2 else 0)
        return self.reset(), 1.0, False, {}


@pytest.mark.parametrize("seconds", [1e10, math.inf])
def test_durations_that_never_pass(seconds, tmp_path):
    address, milliseconds = f"unix:{tmp_path}/server", 1000 * seconds
    server = Server(Slow, address)
    server.start()
    probe(address, seconds)
    queue = BatchingQueue(minimum_batch_size=2, timeout_ms=milliseconds)
    batcher = DynamicBatcher(minimum_batch_size=2, timeout_ms=milliseconds)
    limits = {"step_timeout_s": seconds, "maximum_downtime_s": seconds}
    pool = ActorPool(T, queue, batcher, [address] * 2, (), **limits)
    sizes = []

    def infer():
        for batch in batcher:
            sizes.append(len(batch))
            action = torch.zeros(1, len(batch), dtype=torch.int64)
            batch.set_outputs(((action,), ()))

    with ThreadPoolExecutor() as threads:
        running = [threads.submit(f) for f in (pool.run, infer)]
        for _ in range(3):
            next(queue)
        stats = pool.stats()
        pool.close()
        running[0].result(timeout=30)
        batcher.close()
        running[1].result(timeout=30)
    server.stop(seconds)
    assert (stats["num_connected"], stats["num_dropped_steps"]) == (2, 0), stats
    assert set(sizes) == {2}


def make_pool(**arguments):
    return ActorPool(
        T, BatchingQueue(), DynamicBatcher(), ["unix:/tmp/x"], (), **arguments
    )


CALLS = {
    "timeout_ms of BatchingQueue": BatchingQueue,
    "step_timeout_s of ActorPool": make_pool,
    "timeout_s of probe": lambda **x: probe("unix:/tmp/x", **x),
    "hello_timeout_s of Listener": lambda **x: Listener("unix:/tmp/x", **x),
    "maximum_downtime_s of Client": lambda **x: Client(Slow, "unix:/tmp/x", **x),
    "timeout_s of Server.stop": lambda **x: Server(Slow, "unix:/tmp/x").stop(**x),
}


@pytest.mark.parametrize("call", CALLS)
def test_durations_that_make_no_sense(call):
    name = call.split()[0]
    for value in (math.nan, -1, -math.inf):
        with pytest.raises(ValueError, match=f"^{name}={float(value)}.*at least 0"):
            CALLS[call](**{name: value})
