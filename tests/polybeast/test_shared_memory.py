"""Streams on one machine, whose messages go through shared memory: how they end."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from servers import Run, ServerProcess
from watched_runs import wait_until

pytestmark = pytest.mark.timeout(120)


def zeros(inputs):
    (_, _, done, *_), _ = inputs
    return (torch.zeros(done.shape, dtype=torch.int64),), ()


def num_mappings(pid="self"):
    """Of shared memory: a process has one of each lane, and of the doorbell."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:torchbeast")


def take(run, count):
    for _ in range(count):
        next(iter(run.queue))


def test_a_stream_at_a_unix_socket_uses_it(address):
    own = num_mappings()
    with ServerProcess("Coded", address) as server:
        with Run([address, address], zeros) as run:
            wait_until(lambda: run.pool.stats()["num_connected"] == 2, "both")
            take(run, 5)
            # Two lanes, and the learner's doorbell twice.
            assert num_mappings(server.process.pid) == 4
            assert num_mappings() >= own + 2
        wait_until(lambda: num_mappings(server.process.pid) == 0, "nothing is left")
        # Only the doorbell stays, for the next pool.
        assert num_mappings() <= own + 1


def test_a_stream_over_tcp_does_not(address):
    own = num_mappings()
    with (
        ServerProcess("Coded", "127.0.0.1:0") as server,
        Run([server.address], zeros) as run,
    ):
        take(run, 5)
        assert num_mappings(server.process.pid) == 0
        assert num_mappings() == own


def test_a_killed_server_is_noticed_at_once_and_nothing_is_left(address):
    with ServerProcess("Coded", address) as server:
        own = num_mappings()
        with Run([address], zeros, step_timeout_s=60) as run:
            take(run, 3)
            before = num_mappings()
            # A stream that waits for room in the queue notices nothing.
            threading.Thread(target=lambda: [None for _ in run.queue]).start()
            server.kill()
            wait_until(lambda: run.pool.stats()["num_connected"] == 0, "noticed", 15)
            wait_until(lambda: num_mappings() < before, "it is unmapped")
            with ServerProcess("Coded", address):
                take(run, 20)
                assert run.pool.stats()["num_reconnects"] == 1
        assert num_mappings() <= own + 1


def test_a_stopped_server_costs_its_stream_only(tmp_path):
    addresses = [f"unix:{tmp_path}/{i}" for i in range(2)]
    with (
        ServerProcess("Coded", addresses[0]) as stopped,
        ServerProcess("Coded", addresses[1]),
        Run(addresses, zeros, step_timeout_s=1) as run,
    ):

        def has(count):
            take(run, 1)
            return run.pool.stats()["num_connected"] == count

        wait_until(lambda: has(2), "both")
        os.kill(stopped.process.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: has(1), "the other goes on")
            take(run, 10)
            assert "step timeout" in run.pool.stats()["last_error"]
        finally:
            os.kill(stopped.process.pid, signal.SIGCONT)
        wait_until(lambda: has(2), "it comes back")


def threads_with(number, address, most=10**9):
    """How many threads this process has while it plays so many streams.

    It waits until there are `most` at most.
    """

    def count():
        return len(os.listdir("/proc/self/task"))

    with ServerProcess("Counting", address), Run([address] * number, zeros) as run:
        take(run, 3 * number)
        wait_until(lambda: run.pool.stats()["num_connected"] == number, "all")
        time.sleep(0.3)  # those that have dialled are gone
        wait_until(lambda: count() <= most, f"{most} threads")
        return count()


def test_streams_take_no_thread_each(address):
    few = threads_with(4, address)
    threads_with(36, address, most=few + 2)
