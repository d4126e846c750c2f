"""Peers that mean harm: each is a process of its own, and so is the learner."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import servers
import watched_runs

from libtorchbeast import Client, Security

SECONDS = 60.0
MIB = 1 << 20


# --- The learner ----------------------------------------------------------------------


class Learner(servers.Process):
    def __init__(self, address, num_files=None, token=None, **arguments):
        listener = {"address": address, **arguments}
        super().__init__(listener=listener, num_files=num_files, token=token)

    def memory(self):
        """The most memory that it has had, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10

    def assert_takes_environments(self, **arguments):
        arguments = {"maximum_downtime_s": SECONDS, **arguments}
        Client(servers.Coded, self.address, **arguments).run(num_episodes=2)


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
        learner.kill()
        learner.stop()


def attack(code, *arguments):
    """Runs an attacker in a process of its own; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=watched_runs.patience(SECONDS),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- Memory ---------------------------------------------------------------------------

BOMB = """
import sys
import grpc

address, num_bytes, token = sys.argv[1], int(sys.argv[2]), sys.argv[3]
metadata = [("authorization", f"Bearer {token}")]
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


def test_a_message_that_inflates_is_refused(learn):
    pytest.importorskip("grpc")
    learner = learn(token="open-sesame")
    security = Security(token="open-sesame")
    learner.assert_takes_environments(security=security)
    before = learner.memory()
    assert "gzip" in attack(BOMB, learner.address, 100 * MIB, "open-sesame")
    assert learner.memory() - before < 32 * MIB
    learner.assert_takes_environments(security=security)
    assert learner.stop() == 0


# HTTP/2 by hand.
HTTP2 = r"""
import socket
import struct
import sys
import threading
import time

def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(
        ">I", stream) + payload

def text(value):
    return bytes([len(value)]) + value.encode()

def headers(method):
    return b"".join((
        b"\x83\x86\x04", text(method), b"\x01", text("learner"),
        b"\x0f\x10", text("application/grpc"), b"\x00", text("te"), text("trailers"),
    ))

def connect(address):
    host, _, port = address.rpartition(":")
    if host == "unix":
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(port)
    else:
        peer = socket.create_connection((host, int(port)))
    peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
    return peer
"""

# Each of its connections begins a message and never ends it.
FLOOD = (
    HTTP2
    + r"""
path, num_bytes, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

HEADERS = headers("/torchbeast.wire.Learner/Join")
PART = frame(0, 0, 1, bytes(16384))

def flood(sent, number):
    # The windows of the connection and of the stream.
    windows, initial = [65535, 65535], 65535
    with connect("unix:" + path) as peer:
        peer.sendall(frame(1, 4, 1, HEADERS))
        begin = b"\0" + struct.pack(">I", num_bytes + 16384)
        peer.sendall(frame(0, 0, 1, begin))
        windows = [window - len(begin) for window in windows]
        stream = peer.makefile("rb")
        while sent[number] < num_bytes:
            while min(windows) >= 16384 and sent[number] < num_bytes:
                peer.sendall(PART)
                windows = [window - 16384 for window in windows]
                sent[number] += 16384
            head = stream.read(9)
            if len(head) < 9:
                return
            payload = stream.read(int.from_bytes(head[:3], "big"))
            kind, flags, where = head[3], head[4], int.from_bytes(head[5:], "big")
            if kind == 8:
                windows[min(where, 1)] += int.from_bytes(payload, "big")
            elif kind == 4 and not flags:
                for i in range(0, len(payload), 6):
                    name, value = struct.unpack(">HI", payload[i : i + 6])
                    if name == 4:
                        windows[1] += value - initial
                        initial = value
                peer.sendall(frame(4, 1, 0, b""))
            elif kind == 6 and not flags:
                peer.sendall(frame(6, 1, 0, payload))
            elif kind in (3, 7) or (kind == 1 and flags & 1):  # the learner ends it
                return
        stream.read()  # until the learner has enough of it

def run(sent, number):
    try:
        flood(sent, number)
    except OSError:
        pass

sent = [0] * count
threads = [threading.Thread(target=run, args=(sent, i)) for i in range(count)]
for thread in threads:
    thread.daemon = True
for thread in threads:
    thread.start()
end, before = time.monotonic() + float(sys.argv[4]), -1
while any(t.is_alive() for t in threads) and time.monotonic() < end:
    if sum(sent) == before > 2**30:  # the learner reads no more
        break
    before = sum(sent)
    time.sleep(2)
print(sum(sent))
"""
)


def test_messages_of_many_streams_share_a_bound(learn):
    """Each is below the limit of one. The bound is 1 GiB; gRPC adds some overhead."""
    learner = learn()
    learner.assert_takes_environments()
    before = learner.memory()
    path = learner.address.removeprefix("unix:")
    sent = int(attack(FLOOD, path, 240 * MIB, 16, 50.0))
    assert sent > 1024 * MIB
    assert learner.memory() - before < 1536 * MIB
    learner.assert_takes_environments()
    assert learner.stop() == 0


# Opens many streams on one connection. With `reset` it ends each at once.
STREAMS = (
    HTTP2
    + r"""
address, count, resets = sys.argv[1:]
begin = headers("/torchbeast.wire.Learner/Join")
cancel = struct.pack(">I", 8)
said = b"".join(
    frame(1, 4, i, begin) + (frame(3, 0, i, cancel) if resets == "True" else b"")
    for i in range(1, 2 * int(count), 2)
)
with connect(address) as peer:
    peer.settimeout(30)
    try:
        peer.sendall(said)
        while peer.send(frame(6, 1, 0, bytes(8))):  # until the other side has enough
            threading.Event().wait(0.01)
    except OSError as error:
        print("closed", error)
"""
)


def attack_with_streams(pid, address, resets=True):
    """Returns the most threads that process `pid` had meanwhile."""
    command = [sys.executable, "-c", STREAMS, address, "20000", str(resets)]
    most = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attacker:
        while attacker.poll() is None:
            most = max(most, len(os.listdir(f"/proc/{pid}/task")))
            time.sleep(0.002)  # a sample
        assert "closed" in attacker.stdout.read()
    return most


def assert_goes_on(client):
    begin = client.stats()["num_steps"]
    watched_runs.wait_until(
        lambda: client.stats()["num_steps"] > begin + 100, "steps", SECONDS
    )
    assert client.stats()["num_reconnects"] == 0


@pytest.mark.parametrize(
    ("place", "token", "resets"),
    [
        ("127.0.0.1:0", "secret", True),
        ("127.0.0.1:0", None, False),
        ("unix:{}/learner", "secret", True),
    ],
)
def test_streams_of_strangers_take_few_threads(learn, tmp_path, place, token, resets):
    """20,000 on one connection. An honest stream plays on."""
    learner = learn(place.format(tmp_path), token=token)
    client = Client(servers.Coded, learner.address, security=Security(token=token))
    thread = threading.Thread(target=client.run)
    thread.start()
    try:
        assert_goes_on(client)
        before, pid = learner.memory(), learner.process.pid
        assert attack_with_streams(pid, learner.address, resets) < 100
        assert learner.memory() - before < 150 * MIB
        assert_goes_on(client)
        learner.assert_takes_environments(security=Security(token=token))
    finally:
        client.stop()
        thread.join()
    assert learner.stop() == 0


# --- Connections ----------------------------------------------------------------------


def connect(learner, say=b""):
    host, _, port = learner.address.rpartition(":")
    peer = socket.create_connection((host, int(port)), SECONDS)
    peer.sendall(say)
    return peer


def is_closed(peer):
    """Waits until the learner has closed the connection."""
    peer.settimeout(SECONDS)
    with contextlib.suppress(ConnectionError):
        while peer.recv(4096):
            pass
    return True


def num_files_of(learner):
    return len(os.listdir(f"/proc/{learner.process.pid}/fd"))


def test_more_connections_than_descriptors(learn):
    """All at once, and then none: the learner takes environments before and after."""
    learner = learn("127.0.0.1:0", num_files=256)
    learner.assert_takes_environments()
    before = num_files_of(learner)
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(connect(learner)) for _ in range(300)]
        assert is_closed(peers[-1])  # those that would take the last descriptors
        assert num_files_of(learner) < 256
    watched_runs.wait_until(
        lambda: num_files_of(learner) < before + 20, "closed", SECONDS
    )
    learner.assert_takes_environments()
    assert learner.stop() == 0


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")


def test_connections_without_a_stream_are_closed(learn):
    """Also such that have begun to speak HTTP/2 and answer nothing."""
    learner = learn("127.0.0.1:0", hello_timeout_s=1.0)
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        for say in (b"", PREFACE):
            peers = [stack.enter_context(connect(learner, say)) for _ in range(40)]
            assert all(map(is_closed, peers))
    assert time.monotonic() - start < 20
    learner.assert_takes_environments()
    assert learner.stop() == 0
