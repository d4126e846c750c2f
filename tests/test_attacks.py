"""Peers that mean harm: each is a process of its own, and so is the learner.

Run as a program this file is that learner: it listens, plays with whoever joins, and
ends with its standard input:

    python test_attacks.py '{"address": "unix:/tmp/socket"}'

Keys are arguments of libtorchbeast.Listener, and "num_files", a limit of descriptors.
"""

import json
import os
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import servers

from libtorchbeast import Client, Listener, WireError, probe

SECONDS = 60.0
MIB = 1 << 20


# --- The learner ----------------------------------------------------------------------


def play_first(inputs):
    (observation, *_), state = inputs
    return (np.zeros(observation.shape[:2], np.int64),), state


def main():
    arguments = json.loads(sys.argv[1])
    num_files = arguments.pop("num_files", None)
    if num_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
    listener = Listener(**arguments)
    listener.start()
    with servers.Run([], play_first, listener=listener, max_env_failures=1000) as run:
        drain = threading.Thread(target=lambda: [None for _ in run.queue])
        drain.start()
        sys.stdout.write(listener.address + "\n")
        sys.stdout.flush()
        sys.stdin.read()
        run.pool.close()
        drain.join()
    listener.close()


class Learner:
    def __init__(self, address, **arguments):
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps({"address": address, **arguments})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the learner did not start"

    def memory(self):
        """The most memory that it has had, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10

    def assert_takes_environments(self, **arguments):
        client = Client(
            servers.Coded, self.address, maximum_downtime_s=SECONDS, **arguments
        )
        client.run(num_episodes=2)

    def end(self):
        self.process.stdin.close()
        assert self.process.wait(SECONDS) == 0


@pytest.fixture
def learn(tmp_path):
    """A function that starts a learner, at a unix socket by default."""
    if not os.path.exists("/proc/self/status"):
        pytest.skip("reads /proc, which is Linux's")
    started = []

    def start(address=f"unix:{tmp_path}/learner", **arguments):
        started.append(Learner(address, **arguments))
        return started[-1]

    yield start
    for learner in started:
        learner.process.kill()
        learner.process.wait()
        learner.process.stdin.close()
        learner.process.stdout.close()


def attack(code, *arguments):
    """Runs an attacker in a process of its own; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- Memory ---------------------------------------------------------------------------

BOMB = """
import sys
import grpc

address, num_bytes, token = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
metadata = [("authorization", f"Bearer {t}") for t in token]
with grpc.insecure_channel(address) as channel:
    join = channel.stream_stream("/torchbeast.wire.Learner/Join")
    zeros = bytes(num_bytes)
    call = join(
        iter([zeros]), metadata=metadata, timeout=30, compression=grpc.Compression.Gzip
    )
    try:
        list(call)
    except grpc.RpcError as error:
        print(error.code().name, error.details())
"""


@pytest.mark.parametrize("token", [None, "open-sesame"])
def test_a_message_that_inflates_is_refused(learn, token):
    pytest.importorskip("grpc")
    learner = learn(token=token)
    security = {"token": token} if token else {}
    learner.assert_takes_environments(**security)
    before = learner.memory()
    said = attack(BOMB, learner.address, 250 * MIB, *security.values())
    assert "gzip" in said
    assert learner.memory() - before < 32 * MIB
    learner.assert_takes_environments(**security)
    learner.end()


COMPRESSING_SERVER = """
import concurrent.futures
import sys
import grpc

handler = grpc.stream_stream_rpc_method_handler(lambda requests, _: iter([bytes(9999)]))
with concurrent.futures.ThreadPoolExecutor() as threads:
    server = grpc.server(threads, compression=grpc.Compression.Gzip)
    server.add_generic_rpc_handlers([
        grpc.method_handlers_generic_handler(
            "torchbeast.wire.EnvServer", {"Stream": handler}
        )
    ])
    server.add_insecure_port(sys.argv[1])
    server.start()
    print("there", flush=True)
    sys.stdin.read()
    server.stop(None)
"""


def test_a_server_that_compresses_is_refused(tmp_path):
    pytest.importorskip("grpc")
    address = f"unix:{tmp_path}/server"
    command = [sys.executable, "-c", COMPRESSING_SERVER, address]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as server:
        assert server.stdout.readline() == b"there\n"
        with pytest.raises(WireError):  # gzip is no message
            probe(address, SECONDS)
        server.stdin.close()


if __name__ == "__main__":
    main()
