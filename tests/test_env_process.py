"""An environment owns its process: whatever it changes there, the run is not affected.

tests/selfish.py has the environment that changes everything.
"""

import contextlib
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import runs
import torch
from gymnasium import spaces
from servers import Run
from watched_runs import wait_until

import libtorchbeast
from torchbeast import monobeast

TINY = {**runs.SMALL, "num_actors": 1, "envs_per_actor": 2, "total_steps": 100}
POLYBEAST = "torchbeast.polybeast"


@pytest.mark.parametrize("module", ["torchbeast.monobeast", POLYBEAST])
def test_a_selfish_environment(tmp_path, module):
    """It trains, ends and is filmed; close() raises, which is said."""
    flags = {**TINY, "env": "selfish:Environment", "normalize_observations": True}
    if module == POLYBEAST:
        flags |= {"num_servers": 1, "pipes_basename": "unix:pipe"}  # a relative path
    words = runs.command("runs", "a", module=module, **flags)
    output = runs.run_words(words, folder=tmp_path)
    rows = runs.read_logs(tmp_path / "runs", "a")
    assert float(rows[-1]["step"]) == 100
    assert "AssertionError" not in output
    assert "RuntimeError: the display is gone" in output
    assert "Traceback" in output
    assert not (tmp_path / "own" / "runs").exists()

    test = {"mode": "test", "num_test_episodes": 2, "video": "a.mp4"}
    output = runs.run_words(
        runs.command("runs", "a", module=module, **test), folder=tmp_path
    )
    assert "2 games" in output
    assert (tmp_path / "a.mp4").stat().st_size > 0


def test_settings_of_pytorch_are_kept_apart():
    """Those of an environment stay in effect for it, and have none on the actor."""
    from torchbeast.local.actors import TorchSettings

    around = TorchSettings()
    for _ in range(2):
        with around:
            torch.set_default_dtype(torch.float64)
            torch.set_default_device("meta")
        assert torch.empty(0).dtype == torch.float32
        assert torch.empty(0).device.type == "cpu"
        with around:
            assert torch.empty(0).dtype == torch.float64
            assert torch.empty(0).device.type == "meta"
    with contextlib.suppress(ZeroDivisionError), around:
        torch.set_default_dtype(torch.float16)
        _ = 1 / 0
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("module", ["torchbeast.monobeast", POLYBEAST])
def test_a_flood_of_output_without_a_reader(tmp_path, module):
    flags = {**TINY, "module": module, "env": "noisy:Environment"}
    (tmp_path / "noisy.py").write_text(NOISY)
    if module == POLYBEAST:
        flags["num_servers"] = 1
    process = subprocess.Popen(
        runs.command(tmp_path, "a", **flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**runs.environment(), "PYTHONPATH": f"{runs.ROOT}/tests:{tmp_path}"},
    )
    while b"flood" not in process.stdout.readline():
        pass
    process.stdout.close()
    assert process.wait(100) == 0
    assert float(runs.read_logs(tmp_path, "a")[-1]["step"]) == 100


NOISY = """
import sys
import faulty

class Environment(faulty.Environment):
    def step(self, action):
        print("flood" * 999)
        print("flood" * 999, file=sys.stderr, flush=True)
        sys.stdout.buffer.write(b"flood" * 999)
        return super().step(action)
"""


def test_main_in_another_thread(tmp_path, caplog):
    """It trains, and says that signals can't stop it."""
    words = runs.command(tmp_path, "a", **TINY)[3:]
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(monobeast.main, words).result(timeout=100) == 0
    assert "This is not the main thread" in caplog.text
    assert float(runs.read_logs(tmp_path, "a")[-1]["step"]) == 100


@pytest.mark.parametrize("module", ["torchbeast.monobeast", POLYBEAST])
def test_a_script_that_calls_main_when_it_is_imported(tmp_path, module):
    words = runs.command(tmp_path, "a", module=module, **TINY)
    script = tmp_path / "script.py"
    lines = "import sys", f"import {module}", f"sys.exit({module}.main(sys.argv[1:]))"
    script.write_text("\n".join(lines))
    output = runs.run_words([words[0], str(script), *words[3:]], status=1)
    assert "put the call under `if __name__ == '__main__':`" in output
    assert "Traceback" not in output


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


def act(inputs):
    _, state = inputs
    return (torch.zeros(1, 1, dtype=torch.int64),), state


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
            with Run([address], act) as first:
                next(iter(first.queue))
                with Run([address], act) as second:
                    next(iter(second.queue))
            wait_until(lambda: server.stats()["num_streams"] == 0, "both have left")
            with Run([address], act) as third:
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


def test_a_client_lives_in_the_thread_that_calls_run(tmp_path):
    places = set()
    address = f"unix:{tmp_path}/socket"
    client = libtorchbeast.Client(lambda: Placed(places), address)

    def use():
        try:
            listener = libtorchbeast.Listener(address)
            listener.start()
            with Run([], act, listener=listener) as run:
                next(iter(run.queue))
                client.stop()
        finally:
            client.stop()

    with ThreadPoolExecutor(1) as threads:
        used = threads.submit(use)
        client.run(here=True)
        used.result(timeout=30)
    assert places == {threading.get_ident()}
