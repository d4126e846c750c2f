"""An environment owns its process and the main thread, also in a server."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from gymnasium import spaces
from servers import Run, play_first
from test_env_process import check_flood, check_selfish
from watched_runs import wait_until

import libtorchbeast

POLYBEAST = "torchbeast.polybeast"


def test_a_selfish_environment(tmp_path):
    more = {"num_servers": 1, "pipes_basename": "unix:pipe"}  # a relative path
    check_selfish(tmp_path, POLYBEAST, **more)


def test_a_flood_of_output_without_a_reader(tmp_path):
    check_flood(tmp_path, module=POLYBEAST, num_servers=1)


# --- The main thread of a server ------------------------------------------------------


class Placed:
    """Notes in which threads it lives."""

    action_space = spaces.Discrete(2)

    def __init__(self, places):
        self.places = places
        self.note()

    def note(self):
        self.places.add(threading.get_ident())

    def reset(self):
        self.note()
        return np.zeros(2)

    def step(self, action):
        self.note()
        return np.zeros(2), 1.0, False, {}

    def close(self):
        self.note()


def test_a_server_hosts_one_stream_at_a_time(tmp_path):
    """In the thread that calls run(); others have threads of their own."""
    lives = []

    def make():
        lives.append(set())
        return Placed(lives[-1])

    address = f"unix:{tmp_path}/socket"
    server = libtorchbeast.Server(make, address)
    server.start(here=True)

    def use():
        try:
            libtorchbeast.probe(address)
            with Run([address], play_first) as first:
                next(iter(first.queue))
                with Run([address], play_first) as second:
                    next(iter(second.queue))
            wait_until(lambda: server.stats()["num_streams"] == 0, "both have left")
            with Run([address], play_first) as third:
                next(iter(third.queue))
        finally:
            server.stop()

    with ThreadPoolExecutor(1) as threads:
        used = threads.submit(use)
        server.run()
        used.result(timeout=30)
    here = {threading.get_ident()}
    assert lives[0] == lives[1] == lives[3] == here
    assert len(lives[2]) == 1
    assert not lives[2] & here
