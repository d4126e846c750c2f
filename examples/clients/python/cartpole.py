"""Cart poles that join a PolyBeast learner, in plain Python.

Of TorchBeast this uses only the protocol, libtorchbeast/proto/torchbeast.proto, from
which protoc makes the modules torchbeast_pb2 and torchbeast_pb2_grpc:

    pip install grpcio grpcio-tools
    mkdir -p build/wire
    python -m grpc_tools.protoc --proto_path=libtorchbeast/proto \
        --python_out=build/wire --grpc_python_out=build/wire torchbeast.proto
    PYTHONPATH=build/wire python examples/clients/python/cartpole.py localhost:5000

To use your own simulator, replace CartPole; the rest stays nearly as it is.
"""

import argparse
import contextlib
import logging
import math
import os
import queue
import random
import struct
import threading
import time
import traceback
from pathlib import Path

import grpc
import torchbeast_pb2 as wire
from torchbeast_pb2_grpc import LearnerStub

log = logging.getLogger("cartpole")

PROTOCOL_VERSION = 3
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 10.0  # seconds before connecting again

# After these, connecting again would not help.
FINAL_REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,  # the token
    grpc.StatusCode.FAILED_PRECONDITION,  # the protocol's version, or other spaces
    grpc.StatusCode.INVALID_ARGUMENT,  # our message breaks a rule
    grpc.StatusCode.UNIMPLEMENTED,  # not a learner that listens
)


class Lost(Exception):
    """The connection is lost; connecting again may help."""


class Refused(Exception):
    """The learner refuses us, or sends an invalid message."""


# --- The simulator --------------------------------------------------------------------


class CartPole:
    """CartPole-v1: a pole on a cart that is pushed left (0) or right (1).

    The reward is 1 per step. The episode ends if the cart leaves the track or the pole
    falls, and is cut off after MAX_STEPS. Equations: Barto, Sutton and Anderson 1983.
    """

    NUM_ACTIONS = 2
    MAX_STEPS = 500
    MAX_X = 2.4  # m
    MAX_ANGLE = 12 * 2 * math.pi / 360  # rad
    GRAVITY = 9.8  # m/s²
    CART_MASS, POLE_MASS = 1.0, 0.1  # kg
    HALF_LENGTH = 0.5  # m, of the pole
    FORCE = 10.0  # N
    SECONDS = 0.02  # per step

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def reset(self) -> list[float]:
        """Start an episode; returns its first observation."""
        self.steps = 0
        self.state = [self.rng.uniform(-0.05, 0.05) for _ in range(4)]
        return self.state

    def step(self, action: int) -> tuple[list[float], float, bool, bool]:
        """Returns observation, reward, terminated, truncated."""
        x, x_dot, angle, angle_dot = self.state
        force = self.FORCE if action == 1 else -self.FORCE
        mass = self.CART_MASS + self.POLE_MASS
        cos, sin = math.cos(angle), math.sin(angle)
        pole = self.POLE_MASS * self.HALF_LENGTH
        push = (force + pole * angle_dot**2 * sin) / mass
        angle_acceleration = (self.GRAVITY * sin - cos * push) / (
            self.HALF_LENGTH * (4 / 3 - self.POLE_MASS * cos**2 / mass)
        )
        acceleration = push - pole * angle_acceleration * cos / mass
        self.state = [
            x + self.SECONDS * x_dot,
            x_dot + self.SECONDS * acceleration,
            angle + self.SECONDS * angle_dot,
            angle_dot + self.SECONDS * angle_acceleration,
        ]
        self.steps += 1
        terminated = (
            abs(self.state[0]) > self.MAX_X or abs(self.state[2]) > self.MAX_ANGLE
        )
        truncated = self.steps >= self.MAX_STEPS and not terminated
        return self.state, 1.0, terminated, truncated


# --- The messages ---------------------------------------------------------------------


def to_float32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


class CartPoles:
    """E cart poles in lockstep, the environments of one stream."""

    # Besides the fields of every step; README.md lists those that the learner reads.
    EXTRA_FIELDS = (("last_action", wire.INT64), ("truncated", wire.BOOL))

    def __init__(self, num_envs: int) -> None:
        self.rng = random.Random()
        self.envs = [CartPole(self.rng) for _ in range(num_envs)]
        self.episode_step = [0] * num_envs
        self.episode_return = [0.0] * num_envs
        self.all_done = True  # each row of the newest step is the first of an episode

    def seed(self, seed: int | None, learner: wire.AgentHello) -> None:
        """From --seed, or from the learner's numbers, which no other stream has."""
        if seed is not None:
            self.rng.seed(seed)
        elif learner.HasField("seeding"):
            self.rng.seed(f"{learner.seeding.seed} {learner.seeding.stream}")

    def hello(self, stream_id: bytes, first_step: int) -> wire.EnvHello:
        bound = [
            to_float32(x)
            for x in (2 * CartPole.MAX_X, math.inf, 2 * CartPole.MAX_ANGLE, math.inf)
        ]
        box = wire.Space.Box(
            dtype=wire.FLOAT32, shape=[4], low=[-x for x in bound], high=bound
        )
        discrete = wire.Space.Discrete(n=CartPole.NUM_ACTIONS)
        return wire.EnvHello(
            version=PROTOCOL_VERSION,
            environment="CartPole-v1",
            num_envs=len(self.envs),
            observation_space=wire.Space(box=box),
            action_space=wire.Space(discrete=discrete),
            extra_fields=[wire.Field(name=n, dtype=d) for n, d in self.EXTRA_FIELDS],
            stream_id=stream_id,
            first_step=first_step,
        )

    def first_step(self) -> wire.EnvStep:
        """New episodes. No action has led here, so all else is zero."""
        E = len(self.envs)
        return self._make_step(
            observations=[x for env in self.envs for x in env.reset()],
            rewards=[0.0] * E,
            done=[True] * E,
            truncated=[False] * E,
            actions=[0] * E,
            final=[],
        )

    def step(self, actions: list[int]) -> wire.EnvStep:
        started = time.perf_counter_ns()
        observations, final, rewards, done, truncated = [], [], [], [], []
        for e, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
            observation, reward, terminated, was_cut = env.step(action)
            self.episode_step[e] += 1
            self.episode_return[e] += reward
            final += observation
            rewards.append(reward)
            truncated.append(was_cut)
            done.append(terminated or was_cut)
            # The last row of an episode has the first observation of the next.
            observations += env.reset() if done[e] else observation
        step = self._make_step(observations, rewards, done, truncated, actions, final)
        for e in range(len(self.envs)):
            if done[e]:
                self.episode_step[e], self.episode_return[e] = 0, 0.0
        step.env_nanoseconds = time.perf_counter_ns() - started
        return step

    def _make_step(
        self,
        observations: list[float],
        rewards: list[float],
        done: list[bool],
        truncated: list[bool],
        actions: list[int],
        final: list[float],
    ) -> wire.EnvStep:
        E = len(self.envs)
        self.all_done = all(done)
        # One array after the other; "<" is little-endian and without padding. The last
        # two are the extra fields, in the order of the hello.
        rows = struct.pack(
            f"<{4 * E}f{E}f{E}?{E}q{E}f{E}q{E}?",
            *(*observations, *rewards, *done, *self.episode_step),
            *(*self.episode_return, *actions, *truncated),
        )
        return wire.EnvStep(
            arrays=rows,
            final_observation=struct.pack(f"<{4 * E}f", *final)
            if any(truncated)
            else b"",
        )

    def read_action(self, action: wire.AgentAction) -> list[int]:
        """Checks the message: do not trust the learner more than necessary."""
        E = len(self.envs)
        if len(action.arrays) != 8 * E:
            raise Refused(
                f"an action of {len(action.arrays)} bytes instead of INT64 [{E}]"
            )
        actions = [*struct.unpack(f"<{E}q", action.arrays)]
        if not all(0 <= a < CartPole.NUM_ACTIONS for a in actions):
            raise Refused(
                f"actions {actions}; allowed are 0 to {CartPole.NUM_ACTIONS - 1}"
            )
        return actions


# --- The connection -------------------------------------------------------------------


class Simulator:
    """The state that outlives a connection: the environments and their newest step."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.envs = CartPoles(args.num_envs)
        self.stream_id = os.urandom(16)
        self.number = 0  # of the newest step
        self.newest: wire.EnvStep | None = None  # kept until its action has arrived
        self.episodes_left = args.episodes  # None: no end
        self.met_learner = False  # in the newest connection

    def advance(self, actions: list[int]) -> None:
        self.newest = self.envs.step(actions)
        self.number += 1
        if self.envs.all_done and self.episodes_left is not None:
            self.episodes_left -= 1

    def play(self) -> None:
        """Connects and steps until this side leaves or the learner ends the stream.

        Raises:
          Lost: the connection is lost, or there was none.
          Refused: the learner refuses us for good.
        """
        metadata = []
        if self.args.token_file:
            token = Path(self.args.token_file).read_text().strip()
            metadata = [("authorization", f"Bearer {token}")]
        self.met_learner = False
        with self._channel() as channel:
            # gRPC uses its own threads for both directions.
            outgoing: queue.SimpleQueue = queue.SimpleQueue()  # None ends it
            incoming: queue.SimpleQueue = queue.SimpleQueue()
            requests = iter(outgoing.get, None)
            call = LearnerStub(channel).Join(requests, metadata=metadata)
            receiver = threading.Thread(
                target=receive, args=(call, incoming), daemon=True
            )
            receiver.start()
            try:
                self._converse(outgoing, incoming)
            finally:
                outgoing.put(None)
                call.cancel()
                # A thread that is in gRPC's code while Python exits may never end.
                receiver.join(LONGEST_BACKOFF)

    def _channel(self) -> grpc.Channel:
        options = [
            # Detects a dead network. The learner allows a ping every 5 s.
            ("grpc.keepalive_time_ms", 15_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.max_pings_without_data", 0),
            # main() waits before it connects again; gRPC need not wait as well.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        address = self.args.learner
        if not self.args.tls_ca:
            return grpc.insecure_channel(address, options)
        credentials = grpc.ssl_channel_credentials(Path(self.args.tls_ca).read_bytes())
        return grpc.secure_channel(address, credentials, options)

    def _converse(
        self, outgoing: queue.SimpleQueue, incoming: queue.SimpleQueue
    ) -> None:
        message = self._next(incoming)
        if message is None:
            return
        if message.WhichOneof("kind") != "hello":
            raise Refused("the learner's first message is not a hello")
        if message.hello.version != PROTOCOL_VERSION:
            raise Refused(
                f"the learner speaks version {message.hello.version} of the protocol, "
                f"this program version {PROTOCOL_VERSION}"
            )
        self.met_learner = True
        if self.newest is None:
            self.envs.seed(self.args.seed, message.hello)
            self.newest = self.envs.first_step()
        hello = self.envs.hello(self.stream_id, self.number)
        outgoing.put(wire.EnvMessage(hello=hello))
        last = 0  # the number of this connection's last action
        while True:
            # After a lost connection, the newest step and its action are sent again.
            outgoing.put(wire.EnvMessage(step=self.newest))
            if self.episodes_left == 0:
                self._leave(outgoing, incoming)
                return
            message = self._next(incoming)
            if message is None:
                return
            if message.WhichOneof("kind") != "action":
                raise Refused("the learner sent a message that is not an action")
            actions = self.envs.read_action(message.action)
            number = message.action.number
            if number == 0 or (last and number != last + 1):
                raise Refused(f"action {number} after action {last}")
            last = number
            try:
                self.advance(actions)
                self.newest.action_number = number  # the step answers this action
            except Exception:
                error = wire.EnvError(message=traceback.format_exc()[-65536:])
                outgoing.put(wire.EnvMessage(error=error))
                with contextlib.suppress(Lost, Refused):  # this error is the cause
                    self._leave(outgoing, incoming)
                raise

    def _leave(self, outgoing: queue.SimpleQueue, incoming: queue.SimpleQueue) -> None:
        """Ends this side; returns when the learner has read everything."""
        outgoing.put(None)
        while self._next(incoming) is not None:
            pass  # an action that is no longer needed

    def _next(self, incoming: queue.SimpleQueue) -> wire.AgentMessage | None:
        """The next message; None if the learner has ended the stream with status OK."""
        try:
            message = incoming.get(timeout=self.args.timeout)
        except queue.Empty:
            raise Lost(f"no answer within {self.args.timeout:g} s") from None
        if isinstance(message, grpc.RpcError):
            kind = Refused if message.code() in FINAL_REFUSALS else Lost
            raise kind(f"{message.code().name}: {message.details()}")
        return message


def receive(call: grpc.Call, incoming: queue.SimpleQueue) -> None:
    """Runs in a thread and queues what arrives, so that waiting can have a timeout."""
    try:
        for message in call:
            incoming.put(message)
        incoming.put(None)
    except grpc.RpcError as error:
        incoming.put(error)


# --- Command line ---------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Cart poles for a PolyBeast learner that listens."
    )
    add = parser.add_argument
    add("learner", help="HOST:PORT or unix:PATH")
    add("--num_envs", type=int, default=1, help="cart poles in lockstep (default 1)")
    add("--episodes", type=int, help="leave after this many; needs --num_envs 1")
    add("--seed", type=int, help="of all games (default: as the learner says)")
    add("--token_file", help="file with the learner's secret")
    add("--tls_ca", help="PEM certificate of the authority that signed the learner's")
    add("--timeout", type=float, default=120.0, help="seconds to wait for an answer")
    add("--patience", type=float, default=60.0, help="seconds to try to connect")
    args = parser.parse_args()
    if args.num_envs < 1:
        parser.error(f"--num_envs must be at least 1, got {args.num_envs}")
    if args.episodes is not None and (args.episodes < 1 or args.num_envs != 1):
        parser.error(
            "--episodes must be at least 1 and needs --num_envs 1: a client can leave "
            "only when all its environments have just ended an episode"
        )
    return args


def main() -> int:
    """Returns the exit status.

    0: it left, or the learner ended the stream. 1: it was refused, or found no learner.
    """
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s %(name)s] %(message)s")
    simulator = Simulator(args)
    backoff, down_since, number = FIRST_BACKOFF, time.monotonic(), 0
    while True:
        try:
            simulator.play()
            break
        except Refused as error:
            log.error("Refused by %s: %s", args.learner, error)
            return 1
        except Lost as error:
            if simulator.met_learner:
                down_since = time.monotonic()
            if simulator.number > number:  # the connection had worked
                backoff, number = FIRST_BACKOFF, simulator.number
            if time.monotonic() - down_since > args.patience:
                log.error("No learner for %g s: %s", args.patience, error)
                return 1
            log.info("%s; connecting again in about %.1f s.", error, backoff)
            time.sleep(backoff * random.uniform(0.5, 1))
            backoff = min(2 * backoff, LONGEST_BACKOFF)
    log.info("The stream has ended after %d steps.", simulator.number)
    return 0


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # Not sys.exit(): a thread of gRPC's may never end while Python exits.
    os._exit(status)
