"""libtorchbeast in processes that are interrupted, end or fork."""

import signal
import subprocess
import sys
import threading
import time

import pytest
import runs

PREPARE = """
import contextlib, sys, threading
import numpy as np
import libtorchbeast
from libtorchbeast import *

class Discrete:  # spaces are known by their names
    n = 3

class Env:
    action_space = Discrete()
    def reset(self):
        return np.zeros(3)
    def step(self, action):
        return np.zeros(3), 1.0, False, {}

address = "unix:" + sys.argv[1]
x = np.zeros((1, 1))
queue = BatchingQueue(minimum_batch_size=2, maximum_queue_size=2)
batcher = DynamicBatcher()

def answer():
    for batch in batcher:
        n = len(batch)
        batch.set_outputs(((np.zeros((1, n), np.int64),), ()))
"""

BLOCKING = {
    "dequeue": "next(queue)",
    "compute": "batcher.compute(x)",
    "pool_running": """
server = Server(Env, address)
server.start()
for f in (answer, lambda: list(queue)):
    threading.Thread(target=f, daemon=True).start()
ActorPool(4, queue, batcher, [address], ()).run()
""",
    "server": "Server(Env, address).run()",
    "server_of_an_idle_learner": """
Env.close = lambda self: print("closed")
server = Server(Env, address)
server.start(here=True)
pool = ActorPool(4, queue, batcher, [address], ())  # nobody answers
threading.Thread(target=pool.run, daemon=True).start()
server.run()
""",
    "probe": """
import socket
silent = socket.socket(socket.AF_UNIX)
silent.bind(sys.argv[1] + ".silent")
silent.listen()
probe(address + ".silent", 60)
""",
}


@pytest.fixture
def start():
    """Starts a process that runs PREPARE and `code`."""
    processes = []

    def run(code, path):
        process = subprocess.Popen(
            [sys.executable, "-c", PREPARE + code, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


@runs.needs_proc
@pytest.mark.parametrize("call", BLOCKING)
def test_ctrl_c_ends_a_blocking_call(call, start, tmp_path):
    code = BLOCKING[call].strip().splitlines()
    body = [*code[:-1], "print('ready', flush=True)", code[-1]]
    process = start("\n".join(body), tmp_path / "socket")
    assert process.stdout.readline() == "ready\n"
    # The interrupt works before the call as well, but here it is to be in it: asleep,
    # for some of the periods in which it looks for signals.
    asleep = 0
    while asleep < 15:
        with open(f"/proc/{process.pid}/stat") as file:
            asleep += file.read().rpartition(")")[2].split()[0] == "S"
        threading.Event().wait(0.02)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, errors = process.communicate(timeout=runs.patience(30))
    assert time.monotonic() - began < runs.patience(5)
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert ("closed" in out) == ("idle" in call)
    assert not (tmp_path / "socket").exists()


@pytest.mark.parametrize("call", BLOCKING)
def test_the_interpreter_ends_while_daemon_threads_block(call, start, tmp_path):
    *setup, last = BLOCKING[call].strip().splitlines()
    code = "\n".join(
        [
            *setup,
            "entered = threading.Event()",
            "def call():",
            "    entered.set()",
            "    with contextlib.suppress(Exception):",  # a server may be gone first
            f"        {last}",
            "threading.Thread(target=call, daemon=True).start()",
            "entered.wait()",
            *(["while batcher.stats()['num_batches'] < 9: pass"] * ("run" in call)),
        ]
    )
    process = start(code, tmp_path / "socket")
    _, errors = process.communicate(timeout=runs.patience(30))
    assert (process.returncode, errors) == (0, "")
    assert not (tmp_path / "socket").exists()


FORK_USES = {
    "enqueue": "queue.enqueue(np.zeros((1, 1)))",
    "a new queue": "BatchingQueue()",
    "probe": "probe(address)",
    "run": "pool.run()",
}


@pytest.mark.parametrize("use", FORK_USES)
def test_a_fork_is_refused(use, start, tmp_path):
    process = start(
        f"""
import os, signal
import numpy as np
server = Server(Env, address)
server.start()
pool = ActorPool(4, queue, batcher, [address], ())
probe(address)
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        {FORK_USES[use]}
    except RuntimeError as error:
        print(error, flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print(probe(address)["num_envs"])
""",
        tmp_path / "socket",
    )
    out, errors = process.communicate(timeout=runs.patience(60))
    assert process.returncode == 0, errors
    refusal, number = out.splitlines()
    assert "can't be used in a fork" in refusal
    assert "spawn" in refusal
    assert number == "1"
