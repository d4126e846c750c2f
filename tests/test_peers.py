"""Peers that send what nobody can use, and a learner that goes on training.

A learner in a process of its own, and peers that speak torchbeast.proto with grpcio.
Every one of them costs a stream at most: it is told why, and the learner says who.
"""

import contextlib
import itertools
import queue
import signal
import sys
import threading
import time
from concurrent import futures

import numpy as np
import pytest
import watched_runs
from runs import ROOT, read_logs

grpc = pytest.importorskip("grpc", reason="needs grpcio and grpcio-tools")
protoc = pytest.importorskip("grpc_tools.protoc", reason="needs grpcio-tools")
protobuf_message = pytest.importorskip("google.protobuf.message")

T, E = 5, 3
INF, NAN = float("inf"), float("nan")
SECONDS = 60  # for what takes a moment on an idle machine
LEARNER = {
    "module": "torchbeast.polybeast_learner",
    "env": "CartPole-v1",  # what the peers say that they are
    "envs_per_actor": E,
    "unroll_length": T,
    "batch_size": E,
    "reward_clipping": "none",
}


@pytest.fixture(scope="module")
def wire(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stubs")
    arguments = [f"--proto_path={ROOT / 'libtorchbeast' / 'proto'}"]
    arguments += [f"--python_out={folder}", "torchbeast.proto"]
    assert protoc.main(["protoc", *arguments]) == 0
    sys.path.insert(0, str(folder))
    try:
        import torchbeast_pb2
    finally:
        sys.path.remove(str(folder))
    return torchbeast_pb2


@pytest.fixture
def learn(tmp_path):
    """Starts learners; what is left of them is killed after the test."""
    started = []

    def start(**flags):
        started.append(watched_runs.Run(tmp_path, **{**LEARNER, **flags}))
        return started[-1]

    yield start
    for run in started:
        run.kill()


# --- Good peers -----------------------------------------------------------------------

FIELDS = {
    "last_action": np.int64,
    "game_return": np.float32,
    "game_step": np.int64,
    "game_over": np.bool_,
    "truncated": np.bool_,
    "env_warnings": np.int64,
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
        "env_warnings": np.zeros(E, np.int64),
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
def playing(address, wire):
    """Good environments that have joined, in a thread."""
    with Peer(address) as peer:
        thread = threading.Thread(target=peer.play, args=(good_messages(wire),))
        thread.start()
        try:
            yield peer
        finally:
            peer.call.cancel()
            thread.join()


# --- Hellos ---------------------------------------------------------------------------


def box(dtype, shape, low=(), high=()):
    return lambda w: w.Space(
        box=w.Space.Box(dtype=getattr(w, dtype), shape=shape, low=low, high=high)
    )


def discrete(n, start=0):
    return lambda w: w.Space(discrete=w.Space.Discrete(n=n, start=start))


def multi(n, start=()):
    return lambda w: w.Space(multi_discrete=w.Space.MultiDiscrete(n=n, start=start))


def binary(shape):
    return lambda w: w.Space(multi_binary=w.Space.MultiBinary(shape=shape))


def tuple_of(*items):
    return lambda w: w.Space(tuple=w.Space.Tuple(items=[item(w) for item in items]))


def dict_of(keys, *items):
    return lambda w: w.Space(
        dict=w.Space.Dict(keys=keys, values=[item(w) for item in items])
    )


def nested(levels):
    return tuple_of(nested(levels - 1)) if levels else discrete(2)


def no_space(w):
    return w.Space()


# What is wrong, and what the refusal says.
OBSERVATIONS = {
    "low above high": (box("FLOAT32", [2], [1], [0]), "low must be at most high"),
    "NaN as bound": (box("FLOAT32", [2], [NAN], [1]), "low must be at most high"),
    "low infinite": (box("FLOAT32", [2], [INF], [INF]), "nothing lies between"),
    "below uint8": (box("UINT8", [2], [-1], [255]), "outside of the dtype, uint8"),
    "above int8": (box("INT8", [2], [0], [300]), "outside of the dtype, int8"),
    "above int32": (box("INT32", [2], [0], [1e10]), "outside of the dtype, int32"),
    "beyond int64": (box("INT64", [2], [-1e300], [0]), "outside of the dtype, int64"),
    "too few bounds": (box("FLOAT32", [5], [0, 0], [1]), "2 values in low"),
    "too many bounds": (box("FLOAT32", [2], [0], [1, 1, 1]), "3 values in high"),
    "no dtype": (box("DTYPE_UNSPECIFIED", [2]), "no such dtype: 0"),
    "Box of 2**20 + 1": (box("UINT8", [2**20 + 1]), "at most 1048576 are allowed"),
    "Box of 8M": (box("FLOAT32", [8, 1000, 1000]), "at most 1048576 are allowed"),
    "Box of 2**60": (box("UINT8", [2**60]), "1152921504606846976 elements in"),
    "Box of 2**28 squared": (box("UINT8", [2**28, 2**28]), "larger than a message"),
    "Box of 7 dimensions": (box("UINT8", [1] * 7), "7 dimensions, at most 6"),
    "n of 0": (discrete(0), "n is 0, must be 1 or more"),
    "n below 0": (discrete(-5), "n is -5, must be 1 or more"),
    "n of 2**40": (discrete(2**40), "together may be at most 262144"),
    "n of 2**63 - 1": (discrete(2**63 - 1), "together may be at most 262144"),
    "start + n": (discrete(2, 2**63 - 1), "exceed -2^53 to 2^53"),
    "no n beside others": (
        tuple_of(multi([]), discrete(2)),
        "MultiDiscrete without n",
    ),
    "one n of 0": (multi([2, 0]), "[1]: n is 0"),
    "one n of 2**31": (multi([2, 2**31]), "[1]: n is 2147483648"),
    "many n": (multi([2**17] * 3), "together may be at most 262144"),
    "starts for some": (multi([2, 3], [1]), "1 values in start"),
    "MultiBinary of 2**30": (binary([2**30]), "1073741824 elements in a dimension"),
    "no kind": (no_space, "a space without a kind"),
    "no array": (tuple_of(), "no array with an element"),
    "keys without values": (dict_of(["a", "b"], discrete(2)), "2 keys and 1 values"),
    "a key twice": (dict_of("aa", discrete(2), discrete(2)), "comes twice"),
    "17 levels": (nested(17), "17 levels of spaces, at most 16"),
    "1030 arrays": (tuple_of(*[discrete(2)] * 1030), "1025 arrays, at most 1024"),
}
ACTIONS = {
    "Tuple": (tuple_of(discrete(2)), "no policy for the action space Tuple"),
    "Dict": (dict_of("a", discrete(2)), "no policy for the action space Dict"),
    "MultiBinary": (binary([2]), "no policy for the action space MultiBinary"),
    "Box of integers": (box("INT64", [2]), "no policy for the action space Box"),
    "n of 2**17": (discrete(2**17), "together may be at most 65536"),
    "Box of 2**17": (box("FLOAT32", [2**17]), "at most 65536 are allowed"),
    "none": (None, "action_space is missing"),
}
TWO_NUMBERS = {
    "truncated": ("INT64", [], "must be bool []"),
    "last_action": ("FLOAT32", [], "must be int64 []"),
    "game_return": ("FLOAT64", [], "must be float32 []"),
    "game_step": ("INT32", [], "must be int64 []"),
    "game_over": ("BOOL", [2], "must be bool []"),
    "reward": ("FLOAT32", [], "taken by the step"),
    "": ("FLOAT32", [], "the name is empty"),
    "mask": ("FLOAT32", [], "comes twice"),
    "huge": ("FLOAT64", [2**26], "larger than a message"),
}
NUMBERS = {
    "version": (1, "speaks version 1 of the protocol"),
    "num_envs": (0, "num_envs is 0"),
    "num_envs ": (65536, "num_envs is 65536, allowed are 1 to 16384"),
    "first_step": (2**63, "first_step"),
    "stream_id": (b"x" * 65, "65 bytes, at most 64"),
    "environment": ("x" * 1025, "1025 bytes in"),
    "environment ": ("Pong-v5", "Pong-v5"),
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
    for name, (dtype, shape, words) in TWO_NUMBERS.items():
        hello = make_hello(wire)
        if name in FIELDS and name != "mask":
            del hello.extra_fields[list(FIELDS).index(name)]
        hello.extra_fields.add(name=name, dtype=getattr(wire, dtype), shape=shape)
        yield f"field: {name}", hello, words
    for name, (value, words) in NUMBERS.items():
        hello = make_hello(wire)
        setattr(hello, name.strip(), value)
        yield f"{name}: {str(value)[:20]}", hello, words


def assert_refused(wire, address, *, begun):
    """Every unusable hello is refused with its reason. Returns how many there were.

    begun: environments play already; of what only the learner can't use, the refusal
        says then that it differs.
    """
    hellos = list(unusable_hellos(wire))
    for name, hello, words in hellos:
        with Peer(address) as peer:
            peer.send(wire.EnvMessage(hello=hello).SerializeToString())
            peer.send(encode_row(wire, make_row(0)))
            code, text = peer.status()
        assert code in ("INVALID_ARGUMENT", "FAILED_PRECONDITION"), (name, code, text)
        assert words in text or (begun and "differ" in text), (name, text)
    return len(hellos)


def bad_rows(wire):
    """(What is wrong, message, what the refusal says)."""
    for name, value, words in (
        ("box", NAN, '["box"]: nan in environment 1, element 0; allowed are finite'),
        ("box", INF, '["box"]: inf'),
        ("reward", NAN, "reward: nan in environment 1; allowed are finite"),
        ("reward", -INF, "reward: -inf"),
        ("choice", 0, '["choice"]: 0 in environment 1; allowed are 1 to 6'),
        ("choice", 7, '["choice"]: 7'),
        ("choice", 2**62, '["choice"]: 4611686018427387904'),
        (
            "choices",
            [0, 2],
            '["choices"]: 2 in environment 1, element 1; allowed are 0',
        ),
        ("binary", 2, '["binary"]: 2'),
        ("last_action", 5, "last_action: 5 in environment 1; allowed are 0 to 4"),
        ("last_action", -1, "last_action: -1"),
        ("episode_step", -1, "episode_step: -1"),
        ("episode_step", 2**60, "episode_step: 1152921504606846976"),
        ("episode_return", NAN, "episode_return: nan"),
        ("game_step", -3, "game_step: -3"),
        ("game_return", INF, "game_return: inf"),
        ("env_warnings", -(2**63), "env_warnings: -9223372036854775808"),
        ("env_warnings", 2**31, "allowed are 0 to 2147483647"),
    ):
        row = make_row(2)
        row[name][1] = value
        yield f"{name} {value}", encode_row(wire, row), words
    row = make_row(2)
    row["truncated"][1] = row["done"][1] = True
    observation = {k: row[k].copy() for k in ("binary", "box", "choice", "choices")}
    # Of what was not truncated the final observation may be anything.
    observation["choice"][:] = 99
    yield (
        "final_observation",
        encode_row(wire, row, observation.values()),
        'final_observation: observation["choice"]: 99 in environment 1',
    )
    row = make_row(2) | {"box": np.zeros((E, 5), np.float32)}
    yield "shape", encode_row(wire, row), "step: 291 bytes"
    row = make_row(2)
    del row["mask"]
    yield "too few", encode_row(wire, row), "step: 267 bytes"
    row = make_row(2)
    row["done"] = np.full(E, 2, np.uint8)
    yield "bool", encode_row(wire, row), "is neither 0 nor 1"
    row = make_row(2)
    yield (
        "final",
        encode_row(wire, row, [row["binary"]]),
        "final_observation: 6 bytes",
    )
    observation = [row[k] for k in ("binary", "box", "choice", "choices")]
    yield "not due", encode_row(wire, row, observation), "no episode is truncated"
    row = make_row(2)
    row["truncated"][1] = True
    words = "truncated is true and done is false in environment 1"
    yield "no end", encode_row(wire, row, observation), words
    row["done"][1] = True
    yield "missing", encode_row(wire, row), "final_observation is missing"
    yield "garbage", b"\xff" * 1000, "malformed"
    hello = wire.EnvMessage(hello=make_hello(wire)).SerializeToString()
    yield "hello", hello, "a second hello"


def test_joined_peers_that_nobody_can_use(learn, wire, tmp_path):
    """None is the measure of others, none ends the run, and all hear the reason."""
    address = f"unix:{tmp_path}/learner"
    run = learn(listen=address, num_actors=2)
    run.wait_for((tmp_path / "learner").exists, "the learner listens")
    refused = assert_refused(wire, address, begun=False)
    assert refused > 50
    with playing(address, wire):
        run.wait_for_updates(3)
        refused += assert_refused(wire, address, begun=True)
        first = [
            wire.EnvMessage(hello=make_hello(wire)).SerializeToString(),
            *(encode_row(wire, make_row(step)) for step in range(2)),
        ]
        for name, message, words in bad_rows(wire):
            with Peer(address) as peer:
                peer.play([*first, message])
                code, text = peer.status()
            assert code == "INVALID_ARGUMENT", (name, code, text)
            assert words in text, (name, text)
            refused += 1
        for number in range(
            2
        ):  # two environments raise: no more than --max_env_failures
            with Peer(address) as peer:
                error = wire.EnvError(message=f"Traceback: broken {number}")
                peer.play([*first, wire.EnvMessage(error=error).SerializeToString()])
                assert peer.status()[0] == "OK"
        run.wait_for_updates(3)
        run.wait_for(
            lambda: int(read_logs(tmp_path, "run")[-1]["env_failures"]) == 2,
            "both failures are counted",
        )
        last = read_logs(tmp_path, "run")[-1]
        assert int(last["refused"]) == refused
        assert last["streams"] == "1"
        assert int(last["dropped_steps"]) >= 2 * E
        run.process.send_signal(signal.SIGINT)
        run.wait_for_end(130)
    run.assert_no_error()
    assert "A stream is refused: " in run.console
    assert f"this machine: {refused}, the last because: " in run.console
    assert "streams 1/2" in run.console or "Step " not in run.console


def stray_messages(wire, rows):
    """Environments that are none of this run: one action less."""
    hello = make_hello(wire)
    hello.action_space.discrete.n = 4
    yield wire.EnvMessage(hello=hello).SerializeToString()
    for step in range(rows):
        yield encode_row(wire, make_row(step))


@pytest.mark.parametrize(
    ("flags", "size", "named"),
    [
        ({"num_actors": 64, "unroll_length": 20}, 2**20 - 9, "--num_actors"),
        (
            {"num_actors": 4, "replay_ratio": 1, "replay_size": 10**6},
            2**16,
            "--replay_size",
        ),
    ],
    ids=["rollouts", "replay"],
)
def test_a_stray_whose_rollouts_are_too_large(
    learn, wire, tmp_path, flags, size, named
):
    """One stream fits, but not all, or no replay; it joins first."""
    address = f"unix:{tmp_path}/learner"
    run = learn(listen=address, **flags)
    run.wait_for((tmp_path / "learner").exists, "the learner listens")
    hello = make_hello(wire)
    box = wire.Space.Box(dtype=wire.FLOAT64, shape=[size])
    hello.observation_space.CopyFrom(wire.Space(box=box))
    del hello.extra_fields[:]
    with Peer(address) as stray:
        stray.play([wire.EnvMessage(hello=hello).SerializeToString()])
        code, text = stray.status()
        assert code == "FAILED_PRECONDITION", text
        assert named in text
    with playing(address, wire):
        run.wait_for_updates(3)
        run.process.send_signal(signal.SIGINT)
        run.wait_for_end(130)
    run.assert_no_error()


def test_strays_do_not_determine_the_spaces(learn, wire, tmp_path):
    """Neither those that leave, nor those that are silent, nor on a resumed run."""
    address = f"unix:{tmp_path}/learner"
    flags = {"listen": address, "num_actors": 4}
    run = learn(**flags)
    run.wait_for((tmp_path / "learner").exists, "the learner listens")
    with Peer(address) as leaver, Peer(address) as silent:
        leaver.play(stray_messages(wire, rows=T))  # T - 1 steps, so no unroll
        silent.play(stray_messages(wire, rows=0))
        with playing(address, wire) as good:
            leaver.call.cancel()
            run.wait_for_updates(3)
            with Peer(address) as late:
                late.play(stray_messages(wire, rows=1))
                code, text = late.status()
            assert code == "FAILED_PRECONDITION", text
            assert "differ" in text
            assert good.call.is_active()
            run.process.send_signal(signal.SIGINT)
            run.wait_for_end(130)
    run.assert_no_error()

    resumed = learn(**flags)
    resumed.wait_for((tmp_path / "learner").exists, "the learner listens")
    with Peer(address) as stray:
        stray.play(stray_messages(wire, rows=1))
        code, text = stray.status()
        assert code == "FAILED_PRECONDITION", text
        assert "don't fit the model" in text
    with playing(address, wire):
        resumed.wait_for_updates(3)
        resumed.process.send_signal(signal.SIGINT)
        resumed.wait_for_end(130)
    assert "Resuming at step" in resumed.console
    resumed.assert_no_error()


def test_a_step_that_comes_before_its_action(learn, wire, tmp_path):
    """It is not taken as the action's result, however the peer counts."""
    address = f"unix:{tmp_path}/learner"
    run = learn(listen=address, num_actors=2)
    run.wait_for((tmp_path / "learner").exists, "the learner listens")
    hello = wire.EnvMessage(hello=make_hello(wire)).SerializeToString()
    with playing(address, wire):
        run.wait_for_updates(1)
        for guess in range(3):
            with Peer(address) as peer:
                peer.send(hello)
                for step in range(2):  # of which the second answers nothing
                    message = wire.EnvMessage.FromString(
                        encode_row(wire, make_row(step))
                    )
                    message.step.action_number = guess * step
                    peer.send(message.SerializeToString())
                code, text = peer.status()
            assert code == "INVALID_ARGUMENT", text
            assert f"the step answers action {guess}, and the last action is" in text
        with Peer(address) as peer:  # after some good ones
            rows = [*itertools.islice(good_messages(wire), 4)]
            peer.play(rows)
            peer.send(rows[-1])  # answers none, as it is
            assert "the step answers action 0" in peer.status()[1]
        run.wait_for_updates(1)
    assert "[ERROR " not in run.console


def test_one_that_raises_again_and_again_ends_nobodys_run(learn, wire, tmp_path):
    address = f"unix:{tmp_path}/learner"
    run = learn(listen=address, num_actors=2, max_env_failures=3, connect_timeout=1)
    run.wait_for((tmp_path / "learner").exists, "the learner listens")
    error = wire.EnvMessage(error=wire.EnvError(message="Traceback: it broke"))
    with playing(address, wire):
        run.wait_for_updates(1)
        for _ in range(8):
            with Peer(address) as peer:
                rows = itertools.islice(good_messages(wire), 4)
                peer.play([*rows, error.SerializeToString()])
                assert peer.status()[0] == "OK"
        run.wait_for_updates(3)
        assert "[ERROR " not in run.console
    run.wait_for_end(1, 2 * watched_runs.END_SECONDS)  # no other is left
    assert "more than 3 environments have raised within a minute" in run.console


# --- Servers --------------------------------------------------------------------------


class DialledServer:
    """An environment server; `behave(number of the stream)` gives its messages.

    A message of None hangs.
    """

    def __init__(self, path, behave):
        self.address = f"unix:{path}"
        self.over = threading.Event()
        self.streams = itertools.count()

        def stream(requests, context):
            action = next(requests, b"")  # the learner's hello
            for message in behave(next(self.streams)):
                if message is None:
                    while context.is_active() and not self.over.wait(0.05):
                        pass
                    return
                yield answering(message, action)
                if not message.startswith(b"\x0a"):
                    action = next(requests, None)
                    if action is None:
                        return

        handler = grpc.stream_stream_rpc_method_handler(stream)
        self.threads = futures.ThreadPoolExecutor(8)
        self.server = grpc.server(self.threads)
        service = "torchbeast.wire.EnvServer"
        self.server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, {"Stream": handler})]
        )
        self.server.add_insecure_port(self.address)
        self.server.start()

    def stop(self):
        self.over.set()
        self.server.stop(None).wait()
        self.threads.shutdown()


def test_dialled_servers_that_nobody_can_use(learn, wire, tmp_path):
    """Each costs its stream; the run ends when no server is left."""
    hello = wire.EnvMessage(hello=make_hello(wire)).SerializeToString()
    row = encode_row(wire, make_row(0))
    differs = make_hello(wire)
    differs.action_space.discrete.n = 4
    tuples = make_hello(wire)
    tuples.action_space.CopyFrom(tuple_of(discrete(2))(wire))
    del tuples.extra_fields[0]
    bad_row = make_row(7)
    bad_row["reward"][2] = NAN
    error = wire.EnvMessage(error=wire.EnvError(message="Traceback: it broke"))

    def after_rows(*messages):
        rows = (encode_row(wire, make_row(step)) for step in range(1, 7))
        return [hello, row, *rows, *messages]

    servers = {
        "unusable": lambda n: [wire.EnvMessage(hello=tuples).SerializeToString()],
        "garbage": lambda n: [b"\xff" * 100],
        "silent": lambda n: [None],
        "good": lambda n: good_messages(wire),
        "differs": lambda n: [wire.EnvMessage(hello=differs).SerializeToString(), row],
        "hangs": lambda n: [hello, row, None],
        "lies": lambda n: after_rows(encode_row(wire, bad_row)),
        "raises": lambda n: (
            after_rows(error.SerializeToString()) if n == 0 else good_messages(wire)
        ),
    }
    with contextlib.ExitStack() as stack:
        started = {}
        for name, behave in servers.items():
            started[name] = DialledServer(tmp_path / name, behave)
            stack.callback(started[name].stop)
        run = learn(
            server_addresses=",".join(s.address for s in started.values()),
            num_actors=len(started),
            actor_timeout=1,
            connect_timeout=2,
        )
        run.wait_for_updates(1)
        begun = time.monotonic()
        for words in (
            f"{started['unusable'].address} can't be used for now: ",
            f"{started['garbage'].address} can't be used for now: ",
            f"{started['silent'].address} can't be used for now: ",
            f"{started['silent'].address} has not answered within the step timeout",
            f"{started['hangs'].address} has not answered within the step timeout",
            f"{started['differs'].address} differ",
            f"{started['lies'].address} breaks the rules: reward: nan in environment 2",
            f"{started['raises'].address} failed:\n  | Traceback: it broke",
            f"A stream is back: the environment server at {started['raises'].address}",
        ):
            run.wait_for(lambda words=words: words in run.console, words)
        # The others go on for longer than --connect_timeout and --actor_timeout.
        run.wait_for(lambda: time.monotonic() - begun > 4, "a while")
        run.wait_for_updates(5)
        last = read_logs(tmp_path, "run")[-1]
        assert int(last["env_failures"]) == 1
        assert int(last["refused"]) >= 4
        assert int(last["streams"]) >= 2
        assert int(last["dropped_steps"]) >= 2 * E
        assert "[ERROR " not in run.console
        for name in ("good", "lies", "raises"):
            started[name].stop()
        run.wait_for_end(1, 2 * watched_runs.END_SECONDS)
    assert run.console.count("[ERROR ") == 1
    assert "TransportError: no connection for 2 s: " in run.console


def test_environments_that_always_raise_end_the_run(learn, wire, tmp_path):
    """More often than --max_env_failures within a minute; the last one's traceback."""
    hello = wire.EnvMessage(hello=make_hello(wire)).SerializeToString()
    error = wire.EnvMessage(error=wire.EnvError(message="Traceback: it broke"))
    messages = [hello, encode_row(wire, make_row(0)), error.SerializeToString()]
    server = DialledServer(tmp_path / "server", lambda n: messages)
    try:
        run = learn(server_addresses=server.address, num_actors=1, max_env_failures=3)
        run.wait_for_end(1, 4 * watched_runs.END_SECONDS)
    finally:
        server.stop()
    assert "more than 3 environments have raised within a minute" in run.console
    assert "Traceback: it broke" in run.console
