"""A learner for the example clients, written from torchbeast.proto alone.

It looks at every message, and can lose connections when it wants to.
"""

import contextlib
import math
import queue
import threading
from concurrent import futures

import gymnasium
import numpy as np
import pytest

grpc = pytest.importorskip("grpc", reason="needs grpcio and grpcio-tools")

SECONDS = 90  # for what takes a moment on an idle machine


class Stream:
    """One call of Join."""

    def __init__(self, wire, requests, context):
        self.wire = wire
        self.context = context
        self.incoming = queue.SimpleQueue()
        self.outgoing = queue.SimpleQueue()
        self.status = None
        self.number = 10**6  # of the last action
        self.acted = False
        context.add_callback(lambda: self.outgoing.put(None))
        threading.Thread(target=self._read, args=(requests,), daemon=True).start()

    def _read(self, requests):
        with contextlib.suppress(grpc.RpcError):
            for message in requests:
                self.incoming.put(message)
        self.incoming.put(None)

    def receive(self, kind):
        """The next message, which must be of this kind; None: the end."""
        message = self.incoming.get(timeout=SECONDS)
        if message is None or kind is None:
            assert message is None, message
            assert kind is None, f"the stream has ended instead of a {kind}"
            return None
        assert message.WhichOneof("kind") == kind
        # What this file does not know would be kept, and counted.
        known = type(message)()
        known.CopyFrom(message)
        known.DiscardUnknownFields()
        assert known.ByteSize() == message.ByteSize()
        if kind == "step" and self.acted:
            assert message.step.action_number == self.number
        return getattr(message, kind)

    def hello(self, version=3, seeding=None):
        hello = self.wire.AgentHello(version=version, seeding=seeding)
        self.outgoing.put(self.wire.AgentMessage(hello=hello))

    def act(self, actions, dtype="<i8"):
        self.number += 1
        self.acted = True
        action = self.wire.AgentAction(
            arrays=np.array(actions, dtype).tobytes(), number=self.number
        )
        self.outgoing.put(self.wire.AgentMessage(action=action))

    def end(self, code=None, text=""):
        """Ends it with a status, OK if there is none."""
        self.status = (code, text)
        self.outgoing.put(None)

    def cut(self):
        self.context.cancel()


class Learner:
    """Listens until stop(); accept() gives the streams of those who dial."""

    def __init__(self, wire, address):
        self.wire = wire
        self.address = address
        self.streams = queue.SimpleQueue()
        self.start()

    def start(self):
        from torchbeast_pb2_grpc import add_LearnerServicer_to_server

        self.server = grpc.server(futures.ThreadPoolExecutor(8))
        add_LearnerServicer_to_server(self, self.server)
        self.server.add_insecure_port(self.address)
        self.server.start()

    def stop(self):
        """As if it were killed: all connections are lost."""
        self.server.stop(None).wait(SECONDS)

    def Join(self, requests, context):
        stream = Stream(self.wire, requests, context)
        self.streams.put(stream)
        yield from iter(stream.outgoing.get, None)
        if stream.status and stream.status[0]:
            context.abort(*stream.status)

    def accept(self, **hello):
        """The next stream, in which the learner has said hello."""
        stream = self.streams.get(timeout=SECONDS)
        stream.hello(**hello)
        return stream

    def assert_nobody_dialled(self):
        assert self.streams.empty()


# --- What the messages must be --------------------------------------------------------


def receive_hello(stream, num_envs, first_step=0, stream_id=None):
    """Of CartPole-v1, as Gymnasium describes it."""
    hello = stream.receive("hello")
    if stream_id is None:
        stream_id = hello.stream_id
        assert 0 < len(stream_id) <= 64
    space = gymnasium.make("CartPole-v1").observation_space
    ends = {"low": space.low.tolist(), "high": space.high.tolist()}
    extra = ("last_action", "INT64"), ("truncated", "BOOL")
    assert hello == stream.wire.EnvHello(
        version=3,
        environment="CartPole-v1",
        num_envs=num_envs,
        observation_space={"box": {"dtype": "FLOAT32", "shape": [4], **ends}},
        action_space={"discrete": {"n": 2}},
        extra_fields=[{"name": name, "dtype": dtype} for name, dtype in extra],
        stream_id=stream_id,
        first_step=first_step,
    )
    return stream_id


def decode(data, *arrays):
    """The arrays, given as (dtype, shape), one after the other in `data`."""
    decoded = []
    for dtype, shape in arrays:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        assert dtype != "?" or set(data[:size]) <= {0, 1}
        decoded.append(np.frombuffer(data[:size], dtype).reshape(shape))
        data = data[size:]
    assert not data
    return decoded


def simulate(observation, action):
    """What Gymnasium's cart pole does: (observation, terminated)."""
    env = gymnasium.make("CartPole-v1").unwrapped
    env.reset()
    env.state = observation.astype(np.float64)
    observation, _, terminated, _, _ = env.step(int(action))
    return observation, terminated


class Follower:
    """Sees whether the steps are those of E cart poles; Gymnasium's is the oracle."""

    def __init__(self, num_envs):
        self.E = num_envs
        self.episode_step = np.zeros(num_envs, np.int64)
        self.truncated = self.terminated = 0  # episodes

    def decode(self, step):
        E = self.E
        self.observation, self.reward, self.done, steps, returns, *extra = decode(
            step.arrays,
            *(("<f4", [E, 4]), ("<f4", [E]), ("?", [E]), ("<i8", [E]), ("<f4", [E])),
            *(("<i8", [E]), ("?", [E])),  # the extra fields
        )
        self.last_action, self.cut = extra
        np.testing.assert_array_equal(steps, self.episode_step)
        np.testing.assert_array_equal(returns, self.episode_step)  # 1 a step

    def first(self, step):
        self.decode(step)
        assert self.done.all()
        for zero in (self.reward, self.cut, self.last_action):
            assert not zero.any()
        assert not step.final_observation
        self.check_reset(range(self.E))

    def check_reset(self, envs):
        start = self.observation[list(envs)]
        assert (abs(start) < 0.0501).all()
        assert len(np.unique(start)) == start.size

    def next(self, step, actions):
        """`step` came as the answer to `actions`."""
        self.episode_step[self.done] = 0
        self.episode_step += 1
        before = self.observation
        self.decode(step)
        np.testing.assert_array_equal(self.last_action, actions)
        np.testing.assert_array_equal(self.reward, 1)
        if self.cut.any():
            (final,) = decode(step.final_observation, ("<f4", [self.E, 4]))
        assert bool(step.final_observation) == self.cut.any()
        for e in range(self.E):
            expected, terminated = simulate(before[e], actions[e])
            assert terminated == (self.done[e] and not self.cut[e])
            assert self.cut[e] == (not terminated and self.episode_step[e] == 500)
            shown = final if self.cut[e] else self.observation
            if self.cut[e] or not self.done[e]:
                np.testing.assert_allclose(shown[e], expected, rtol=1e-5, atol=1e-6)
        self.check_reset(np.flatnonzero(self.done))
        self.terminated += int((self.done & ~self.cut).sum())
        self.truncated += int(self.cut.sum())

    def policy(self):
        """Keeps the first pole up, drops the others."""
        keep = (self.observation @ [0.1, 0.3, 1, 1] > 0).astype(np.int64)
        keep[1:] = np.arange(1, self.E) % 2
        return keep


def follow(stream, follower, num_steps):
    """Plays on; returns the newest step."""
    for _ in range(num_steps):
        actions = follower.policy()
        stream.act(actions)
        step = stream.receive("step")
        follower.next(step, actions)
    return step
