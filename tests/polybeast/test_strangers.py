"""Peers that have not shown the token, and hellos that cost more than they say."""

import json
import threading

import pytest
import servers
from test_attacks import HTTP2, MIB, assert_goes_on, attack, learn

from libtorchbeast import Client, Security

__all__ = ["learn"]  # a fixture


@pytest.fixture
def play():
    """A function that plays in a thread at a learner's address, with a token."""
    started = []

    def start(address, token):
        client = Client(servers.Coded, address, security=Security(token=token))
        thread = threading.Thread(target=client.run)
        thread.start()
        started.append((client, thread))
        assert_goes_on(client)
        return client

    yield start
    for client, thread in started:
        client.stop()
        thread.join()


# Sends what belongs to no stream until the learner closes the connection.
FLOOD = (
    HTTP2
    + r"""
address, count = sys.argv[1], int(sys.argv[2])
FRAMES = {
    "WINDOW_UPDATE": frame(8, 0, 0, struct.pack(">I", 1)),
    "PRIORITY": frame(2, 0, 1, struct.pack(">IB", 0, 1)),
    "SETTINGS": frame(4, 0, 0, struct.pack(">HI", 0x99, 1)),
}

def flood(sent):
    with connect(address) as peer:
        try:
            while True:
                peer.sendall(1000 * sent)
        except OSError:
            pass

start = time.monotonic()
for sent in FRAMES.values():
    threads = [threading.Thread(target=flood, args=[sent]) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(time.monotonic() - start)
"""
)


def test_what_belongs_to_no_stream_is_bounded(learn, play):
    learner = learn("127.0.0.1:0", token="secret")
    client = play(learner.address, "secret")
    assert float(attack(FLOOD, learner.address, 4)) < 15
    assert_goes_on(client)


# A refused call now and then, which keeps a connection from being idle.
CALLS = (
    HTTP2
    + r"""
address, method = sys.argv[1], "/torchbeast.wire.Learner/Join"
with connect(address) as peer:
    start = time.monotonic()
    peer.settimeout(0.6)
    stream = 1
    try:
        while time.monotonic() < start + 30:
            peer.sendall(frame(1, 5, stream, headers(method)))
            stream += 2
            end = time.monotonic() + 0.6
            while time.monotonic() < end:
                try:
                    if not peer.recv(4096):
                        raise ConnectionResetError
                except TimeoutError:
                    break
    except ConnectionError:
        pass
    print(time.monotonic() - start)
"""
)


def test_a_connection_without_the_token_has_a_deadline(learn):
    learner = learn("127.0.0.1:0", token="secret", hello_timeout_s=1.0)
    assert float(attack(CALLS, learner.address)) < 6
    learner.assert_takes_environments(security=Security(token="secret"))


# Says its hello on `count` streams at once; prints how they end.
HELLOS = """
import struct, sys, threading
import grpc

address, kind, count = sys.argv[1], sys.argv[2], int(sys.argv[3])

def varint(n):
    return bytes([n & 127 | 128]) + varint(n >> 7) if n > 127 else bytes([n])

def field(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data

def number(number, value):
    return varint(number << 3) + varint(value)

def hello(i):
    size = 16_000
    box = number(1, 12) + field(2, varint(size))
    if kind == "bounds":
        low = (i + k * 1e-3 for k in range(size))
        box += field(3, struct.pack(f"<{size}d", *low)) + field(4, struct.pack(
            f"<{size}d", *[1e9] * size))
    more = field(6, b"") * 130_000 if kind == "fields" else b""
    action = field(2, number(1, 2))
    whole = number(1, 3) + number(3, 1) + field(4, field(1, box)) + field(5, action)
    return field(1, whole + more)

def join(message):
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream("/torchbeast.wire.Learner/Join")
        try:
            list(call(iter([message]), timeout=30))
        except grpc.RpcError as error:
            print(error.code().name, error.details()[:200].replace("\\n", " "))

messages = [hello(i) for i in range(count)]
threads = [threading.Thread(target=join, args=[x]) for x in messages]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize(
    ("kind", "said", "most"),
    [("bounds", "differs from", 50), ("fields", "130000 extra fields", 100)],
)
def test_a_large_hello_takes_little_memory(learn, play, kind, said, most):
    """Hellos of 256 KB, of which each differs from the run's and from the others."""
    pytest.importorskip("grpc")
    learner = learn("127.0.0.1:0")
    client = play(learner.address, None)  # the run settles for its hello
    before = learner.memory()
    lines = attack(HELLOS, learner.address, kind, 8).splitlines()
    assert len(lines) == 8
    assert all(said in line for line in lines), json.dumps(lines)
    assert learner.memory() - before < most * MIB
    assert_goes_on(client)
