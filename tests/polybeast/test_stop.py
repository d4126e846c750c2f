"""Environments that hang, or stop their own server: the process ends all the same."""

import os
import signal
import subprocess
import sys
import time

import pytest
import runs
from servers import Run, play_first

from libtorchbeast import Listener

PREPARE = """
import sys, threading, time
import numpy as np
import libtorchbeast
from gymnasium import spaces

class Env:
    action_space = spaces.Discrete(2)
    def __init__(self):
        self.steps = 0
        hang("env_class")
    def reset(self, *, seed=None):
        hang("reset")
        return np.zeros(3)
    def step(self, action):
        self.steps += 1
        if self.steps == 3:
            hang("step")
        return np.zeros(3), 1.0, False, {}
    def close(self):
        hang("close")

class OldGym(Env):
    def reset(self):
        return np.zeros(3)
    def seed(self, seed):
        hang("seed")

def hang(method):
    if method == where:
        print("hangs", flush=True)
        if how == "sleeps":
            time.sleep(1e6)
        while how == "spins":
            pass
        if how == "stops":
            end(60)
            print("stopped", flush=True)

def end(timeout):
    began = time.monotonic()
    there.stop(timeout)
    print("stop took", time.monotonic() - began, flush=True)

address, where, how = sys.argv[1:]
env_class = OldGym if where == "seed" else Env
"""
SERVER = """
there = libtorchbeast.Server(env_class, address)
there.start()
print("ready", flush=True)
"""
ENDS = {
    # From outside, with a limit.
    "stop": SERVER + "sys.stdin.readline(); end(0.3)",
    # The end of the process alone.
    "exit": SERVER + "sys.stdin.readline()",
    # While another thread is in run(); and the limit of the first call counts.
    "run": SERVER
    + """
threading.Timer(0.1, lambda: (sys.stdin.readline(), end(0.3), end(60))).start()
there.run()
""",
    # Not at all, from here.
    "no": SERVER + "there.run()",
    # In the main thread.
    "here": SERVER.replace("start()", "start(here=True)") + "there.run()",
    "client here": """
there = libtorchbeast.Client(Env, address, maximum_downtime_s=None)
def tell():
    while not there.stats()["last_error"]:
        time.sleep(0.01)
    print("dials", flush=True)
threading.Thread(target=tell, daemon=True).start()
print("ready", flush=True)
there.run(here=True)
""",
    "client": """
there = libtorchbeast.Client(Env, address)
threading.Thread(target=lambda: (sys.stdin.readline(), end(0.3))).start()
print("ready", flush=True)
there.run()
""",
}


class Process:
    """A server or client whose environment hangs."""

    def __init__(self, address, end, where, how):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREPARE + ENDS[end], address, where, how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.expect("ready")

    def expect(self, line):
        found = self.process.stdout.readline().strip()
        assert found == line, (found, self.process.stderr.read())

    def end(self):
        """Lets it end. Returns what it wrote, and the seconds until it had ended."""
        began = time.monotonic()
        out, errors = self.process.communicate("\n", timeout=runs.patience(60))
        assert self.process.returncode == 0, errors
        return out, errors, time.monotonic() - began

    def interrupt(self):
        """Ctrl-C, which must end it with KeyboardInterrupt."""
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=runs.patience(15))
        assert self.process.returncode == -signal.SIGINT, errors

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize(
    ("end", "where", "how"),
    [
        ("stop", "step", "sleeps"),
        ("stop", "env_class", "sleeps"),
        ("exit", "seed", "spins"),
        ("run", "step", "sleeps"),
    ],
)
def test_a_server_leaves_environments_behind_that_hang(end, where, how, tmp_path):
    path = tmp_path / "socket"
    with (
        Process(f"unix:{path}", end, where, how) as process,
        Run([f"unix:{path}"], play_first, seed=1) as run,
    ):
        process.expect("hangs")
        out, errors, seconds = process.end()
        method = "reset" if where == "seed" else where  # seeding is a part of it
        assert f"{method}() for " in errors
        assert "has not returned" in errors
        assert errors.count("\n") == 1
        assert seconds < runs.patience(15)
        assert out.count("stop took") == {"stop": 1, "exit": 0, "run": 2}[end]
        assert not path.exists()
        assert run.pool.stats()["num_env_failures"] == 0


@pytest.mark.parametrize("how", ["sleeps", "spins"])
def test_a_client_leaves_its_environment_behind_if_it_hangs(how, tmp_path):
    listener = Listener(f"unix:{tmp_path}/socket")
    listener.start()
    with (
        Run([], play_first, listener=listener),
        Process(listener.address, "client", "step", how) as process,
    ):
        process.expect("hangs")
        _, errors, seconds = process.end()
        assert "step() has not returned" in errors
        assert seconds < runs.patience(15)
    listener.close()


@pytest.mark.parametrize("end", ["no", "here"])
def test_an_environment_stops_its_server(end, tmp_path):
    address = f"unix:{tmp_path}/socket"
    with Process(address, end, "step", "stops") as process, Run([address], play_first):
        process.expect("hangs")
        began = time.monotonic()
        process.process.wait(timeout=60)
        # It was not waited for.
        assert time.monotonic() - began < runs.patience(30)
        assert process.process.stdout.read().count("stopped") == 1
        assert process.process.stderr.read() == ""


@pytest.mark.parametrize("end", ["here", "client here"])
def test_ctrl_c_during_a_step_ends_the_main_thread(end, tmp_path):
    address = f"unix:{tmp_path}/socket"
    listener = Listener(address) if end == "client here" else None
    if listener:
        listener.start()
    with (
        Process(address, end, "step", "sleeps") as process,
        Run([] if listener else [address], play_first, listener=listener),
    ):
        process.expect("hangs")
        process.interrupt()
    if listener:
        listener.close()
