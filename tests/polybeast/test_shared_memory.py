"""Streams on one machine, whose messages go through shared memory: how they end."""

import os
import signal
import threading
from pathlib import Path

from servers import Run, ServerProcess, play_first
from watched_runs import wait_until


def num_mappings(pid="self"):
    """Of shared memory: a process has one of each lane, and of the doorbell."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:torchbeast")


def take(run, count):
    for _ in range(count):
        next(iter(run.queue))


def test_a_killed_server_is_noticed_at_once_and_nothing_is_left(address):
    with ServerProcess("Forking", address) as server:
        own = num_mappings()
        with Run([address], play_first, step_timeout_s=600) as run:
            take(run, 3)
            before = num_mappings()
            # A stream that waits for room in the queue notices nothing.
            threading.Thread(target=lambda: [None for _ in run.queue]).start()
            server.kill()
            wait_until(lambda: run.pool.stats()["num_connected"] == 0, "noticed", 5)
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
        Run(addresses, play_first, step_timeout_s=1) as run,
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
