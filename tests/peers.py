"""Peers that speak torchbeast.proto with grpcio: good ones, and what nobody can use."""

import contextlib
import itertools
import queue
import sys
import threading

import numpy as np
import pytest

grpc = pytest.importorskip("grpc", reason="needs grpcio and grpcio-tools")
protobuf_message = pytest.importorskip("google.protobuf.message")

E = 3  # environments of a peer
INF, NAN = float("inf"), float("nan")
SECONDS = 300  # for what takes a moment on an idle machine


# --- Good peers -----------------------------------------------------------------------

FIELDS = {
    "last_action": np.int64,
    "game_return": np.float32,
    "game_step": np.int64,
    "game_over": np.bool_,
    "truncated": np.bool_,
    "mask": np.float32,  # its own, and of any value
}


def make_hello(wire, stream_id=b""):
    """A dict of all kinds of observation; actions 0 to 4."""
    observation = {
        "box": wire.Space(box=wire.Space.Box(dtype=wire.FLOAT32, shape=[4])),
        "binary": wire.Space(multi_binary=wire.Space.MultiBinary(shape=[2])),
        "choice": wire.Space(discrete=wire.Space.Discrete(n=6, start=1)),
        "choices": wire.Space(multi_discrete=wire.Space.MultiDiscrete(n=[3, 2])),
    }
    dtypes = {np.bool_: wire.BOOL, np.int64: wire.INT64, np.float32: wire.FLOAT32}
    return wire.EnvHello(
        version=3,
        environment="CartPole-v1",
        num_envs=E,
        observation_space=wire.Space(
            dict=wire.Space.Dict(keys=observation, values=observation.values())
        ),
        action_space=wire.Space(discrete=wire.Space.Discrete(n=5)),
        extra_fields=[
            wire.Field(name=name, dtype=dtypes[dtype]) for name, dtype in FIELDS.items()
        ],
        stream_id=stream_id,
    )


def make_row(step):
    """Row number `step` of E environments whose episodes have four steps."""
    done = step % 4 == 0
    return {
        "binary": np.ones((E, 2), np.int8),
        "box": np.random.default_rng(step).normal(size=(E, 4)).astype(np.float32),
        "choice": np.full(E, 1 + step % 6, np.int64),
        "choices": np.array([[2, 1]] * E, np.int64),
        "reward": np.full(E, step > 0, np.float32),
        "done": np.full(E, done),
        "episode_step": np.full(E, (step - 1) % 4 + 1 if step else 0, np.int64),
        "episode_return": np.full(E, (step - 1) % 4 + 1 if step else 0, np.float32),
        "last_action": np.full(E, step % 5, np.int64),
        "game_return": np.zeros(E, np.float32),
        "game_step": np.zeros(E, np.int64),
        "game_over": np.full(E, done),
        "truncated": np.zeros(E, bool),
        "mask": np.full(E, -np.inf, np.float32),
    }


def encode_row(wire, row, final=()):
    step = wire.EnvStep(
        arrays=b"".join(x.tobytes() for x in row.values()),
        final_observation=b"".join(x.tobytes() for x in final),
    )
    return wire.EnvMessage(step=step).SerializeToString()


def answering(message, action):
    """A step with the number of the action that it answers; all else as it is."""
    wire = sys.modules["torchbeast_pb2"]
    try:
        parsed = wire.EnvMessage.FromString(message)
    except protobuf_message.DecodeError:
        return message
    if not parsed.HasField("step"):
        return message
    parsed.step.action_number = wire.AgentMessage.FromString(action).action.number
    return parsed.SerializeToString()


class Peer:
    """Joins a learner; `messages` are sent one by one, each after the next answer."""

    def __init__(self, address):
        self.channel = grpc.insecure_channel(address)
        self.outgoing = queue.SimpleQueue()
        method = self.channel.stream_stream("/torchbeast.wire.Learner/Join")
        self.call = method(iter(self.outgoing.get, None), timeout=SECONDS)

    def send(self, message):
        self.outgoing.put(message)

    def play(self, messages):
        """Until the learner ends the stream, or there are no more messages."""
        action = next(self.call)  # the learner's hello
        with contextlib.suppress(grpc.RpcError, StopIteration):
            for message in messages:
                self.send(answering(message, action))
                if not message.startswith(b"\x0a"):  # all but hellos are answered
                    action = next(self.call)

    def status(self):
        """How the learner has ended the stream: code and text."""
        with contextlib.suppress(grpc.RpcError):
            for _ in self.call:
                pass
        return self.call.code().name, self.call.details()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.outgoing.put(None)
        self.call.cancel()
        self.channel.close()


def good_messages(wire, stream_id=b""):
    hello = make_hello(wire, stream_id)
    yield wire.EnvMessage(hello=hello).SerializeToString()
    for step in itertools.count():
        yield encode_row(wire, make_row(step))


@contextlib.contextmanager
def playing(address, wire, messages=good_messages):
    """Environments that have joined, in a thread; they dial again, if need be."""
    is_over = threading.Event()

    def play():
        while not is_over.wait(0.1):
            with Peer(address) as peer, contextlib.suppress(grpc.RpcError):
                peers.append(peer)
                peer.play(messages(wire))
                peer.status()

    peers = []
    thread = threading.Thread(target=play)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        while thread.is_alive():
            for peer in peers:
                peer.call.cancel()
            thread.join(0.1)


# --- Hellos ---------------------------------------------------------------------------


def box(dtype, shape, low=(), high=()):
    return lambda w: w.Space(
        box=w.Space.Box(dtype=getattr(w, dtype), shape=shape, low=low, high=high)
    )


def discrete(n, start=0):
    return lambda w: w.Space(discrete=w.Space.Discrete(n=n, start=start))


def tuple_of(*items):
    return lambda w: w.Space(tuple=w.Space.Tuple(items=[item(w) for item in items]))


# What is wrong, and what the refusal says. tests/cpp/stream_spec_test.cc has them all.
OBSERVATIONS = {
    "low above high": (box("FLOAT32", [2], [1], [0]), "low must be at most high"),
    "NaN as bound": (box("FLOAT32", [2], [NAN], [1]), "low must be at most high"),
    "below uint8": (box("UINT8", [2], [-1], [255]), "numbers of uint8"),
    "Box of 2**60": (box("UINT8", [2**60]), "1152921504606846976 elements in"),
    "n below 0": (discrete(-5), "n is -5, must be 1 or more"),
    "start + n": (discrete(2, 2**63 - 1), "exceed -2^53 to 2^53"),
    "no kind": (lambda w: w.Space(), "a space without a kind"),
}
ACTIONS = {
    "Tuple": (tuple_of(discrete(2)), "no policy for the action space Tuple"),
    "n of 2**17": (discrete(2**17), "together may be at most 65536"),
    "none": (None, "action_space is missing"),
}
FIELDS_OF_ANOTHER_KIND = {
    "truncated": ("INT64", [], "must be bool []"),
    "last_action": ("FLOAT32", [], "must be int64 []"),
    "reward": ("FLOAT32", [], "the name is taken"),
    "mask": ("FLOAT32", [], "the name is taken"),
    "huge": ("FLOAT64", [2**26], "larger than a message"),
}
NUMBERS = {
    "version": (1, "speaks version 1 of the protocol"),
    "num_envs": (0, "num_envs is 0"),
    "stream_id": (b"x" * 65, "65 bytes, at most 64"),
    "environment": ("Pong-v5", "Pong-v5"),
}


def unusable_hellos(wire):
    """(What is wrong, hello, what the refusal says)."""
    for name, (space, words) in OBSERVATIONS.items():
        hello = make_hello(wire)
        hello.observation_space.CopyFrom(space(wire))
        yield f"observation: {name}", hello, words
    for name, (space, words) in ACTIONS.items():
        hello = make_hello(wire)
        del hello.extra_fields[0]  # last_action
        hello.ClearField("action_space")
        if space:
            hello.action_space.CopyFrom(space(wire))
        yield f"action: {name}", hello, words
    for name, (dtype, shape, words) in FIELDS_OF_ANOTHER_KIND.items():
        hello = make_hello(wire)
        if name in FIELDS and name != "mask":
            del hello.extra_fields[list(FIELDS).index(name)]
        hello.extra_fields.add(name=name, dtype=getattr(wire, dtype), shape=shape)
        yield f"field: {name}", hello, words
    for name, (value, words) in NUMBERS.items():
        hello = make_hello(wire)
        setattr(hello, name, value)
        yield f"{name}: {str(value)[:20]}", hello, words


def bad_rows(wire):
    """(What is wrong, message, what the refusal says)."""
    for name, value, words in (
        ("box", NAN, '["box"]: nan in environment 1, element 0; allowed are finite'),
        ("reward", NAN, "reward: nan in environment 1; allowed are finite"),
        ("reward", -INF, "reward: -inf"),
        ("choice", 0, '["choice"]: 0 in environment 1; allowed are 1 to 6'),
        ("choice", 2**62, '["choice"]: 4611686018427387904'),
        ("binary", 2, '["binary"]: 2'),
        ("last_action", 5, "last_action: 5 in environment 1; allowed are 0 to 4"),
        ("episode_step", -1, "episode_step: -1"),
        ("game_return", INF, "game_return: inf"),
    ):
        row = make_row(2)
        row[name][1] = value
        yield f"{name} {value}", encode_row(wire, row), words
    row = make_row(2)
    row["truncated"][1] = row["done"][1] = True
    yield "missing", encode_row(wire, row), "final_observation is missing"
    observation = [row[k].copy() for k in ("binary", "box", "choice", "choices")]
    # Of what was not truncated the final observation may be anything.
    observation[2][:] = 99
    words = 'final_observation: observation["choice"]: 99 in environment 1'
    yield "final_observation", encode_row(wire, row, observation), words
    row = make_row(2) | {"box": np.zeros((E, 5), np.float32)}
    yield "shape", encode_row(wire, row), "step: 267 bytes"
    row = make_row(2)
    row["done"] = np.full(E, 2, np.uint8)
    yield "bool", encode_row(wire, row), "is neither 0 nor 1"
    yield "garbage", b"\xff" * 1000, "malformed"
    hello = wire.EnvMessage(hello=make_hello(wire)).SerializeToString()
    yield "hello", hello, "a second hello"
