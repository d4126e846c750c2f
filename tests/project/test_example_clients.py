"""The example clients, which know nothing of TorchBeast but torchbeast.proto.

Their learner is scripted_learner.py; at the end the real one.
"""

import ast
import contextlib
import fcntl
import functools
import itertools
import os
import queue
import re
import shutil
import subprocess
import sys
from concurrent import futures
from pathlib import Path

import numpy as np
import pytest
import runs
from certificates import Certificates
from scripted_learner import (
    SECONDS,
    Follower,
    Learner,
    follow,
    receive_hello,
    simulate,
)

grpc = pytest.importorskip("grpc", reason="needs grpcio and grpcio-tools")
pytest.importorskip("grpc_tools.protoc", reason="needs grpcio-tools")

pytestmark = pytest.mark.timeout(300)  # the C++ client is compiled

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "examples" / "clients"


# --- The clients ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def program():
    """The C++ client."""
    for tool in ("cmake", "c++", "pkg-config", "protoc", "grpc_cpp_plugin"):
        if not shutil.which(tool):
            runs.skip(f"the C++ client needs {tool}")
    if subprocess.run(["pkg-config", "grpc++", "protobuf"]).returncode != 0:
        runs.skip("the C++ client needs gRPC's and protobuf's C++ libraries")
    folder = ROOT / "build" / "cartpole"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers of pytest build it, too
        for command in (
            ["cmake", "-S", CLIENTS / "cpp", "-B", folder],
            ["cmake", "--build", folder],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder / "cartpole"


@pytest.fixture
def start_client(request, stubs):
    """A function that starts a client, "python" or "cpp"; all end with the test."""
    with contextlib.ExitStack() as stack:

        def start(language, *arguments):
            if language == "python":
                command = [sys.executable, "-s", CLIENTS / "python" / "cartpole.py"]
            else:
                command = [request.getfixturevalue("program")]
            process = subprocess.Popen(
                [*command, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "PYTHONPATH": str(stubs)},
                cwd=stubs,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture(params=["python", "cpp"])
def start(request, start_client):
    """The same for each of both languages."""
    return functools.partial(start_client, request.param)


def finish(process):
    """What a client has printed; it ends by itself."""
    output, _ = process.communicate(timeout=SECONDS)
    return output


@pytest.fixture
def learner(wire, tmp_path):
    learner = Learner(wire, f"unix:{tmp_path}/learner")
    yield learner
    learner.stop()


# --- Tests ----------------------------------------------------------------------------


def test_they_know_nothing_but_the_proto():
    tree = ast.parse((CLIENTS / "python" / "cartpole.py").read_text())
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
    assert modules - sys.stdlib_module_names == {
        "grpc",
        "torchbeast_pb2",
        "torchbeast_pb2_grpc",
    }
    source = (CLIENTS / "cpp" / "cartpole.cc").read_text()
    assert re.findall(r'#include "(.*)"', source) == ["torchbeast.grpc.pb.h"]


def test_every_message_is_right(start, learner):
    process = start(learner.address, "--num_envs", 3)
    stream = learner.accept()
    receive_hello(stream, 3)
    follower = Follower(3)
    follower.first(stream.receive("step"))
    follow(stream, follower, 1010)
    assert follower.truncated >= 2  # with final observations, before and after a reset
    assert follower.terminated > 100
    stream.end()
    assert "after 1010 steps" in finish(process)
    assert process.returncode == 0


def test_two_streams_are_two_and_a_seed_repeats(start, learner):
    seen = []
    for seed in ([], [], ["--seed", 5], ["--seed", 5]):
        start(learner.address, *seed)
        stream = learner.accept()
        stream_id = receive_hello(stream, 1)
        step = stream.receive("step")
        seen.append((stream_id, step.SerializeToString()))
        stream.end()
    assert len({stream_id for stream_id, _ in seen}) == 4
    (_, a), (_, b), (_, c), (_, d) = seen
    assert c == d
    assert len({a, b, c}) == 3


def test_the_learner_says_which_games(start, learner):
    seen = []
    large = 2**64 - 1
    for seed, stream_number, *words in (
        *((5, 0), (5, 0), (5, 1), (6, 0), (large, large), (large, large)),
        *((5, 0, "--seed", 7), (6, 1, "--seed", 7)),
    ):
        client = start(learner.address, *words)
        stream = learner.accept(seeding={"seed": seed, "stream": stream_number})
        receive_hello(stream, 1)
        seen.append(stream.receive("step").SerializeToString())
        stream.end()
        finish(client)
    a, b, c, d, e, f, g, h = seen
    assert (a, e, g) == (b, f, h)
    assert len({a, c, d, e, g}) == 5


@pytest.mark.parametrize("how", ["cut", "unavailable", "full", "killed"])
def test_goes_on_where_it_was_after_a_loss(start, learner, how):
    def lose(stream):
        if how == "cut":
            stream.cut()
        elif how == "killed":
            learner.stop()
            learner.start()
        elif how == "full":
            stream.end(grpc.StatusCode.RESOURCE_EXHAUSTED, "no place")
        else:
            stream.end(grpc.StatusCode.UNAVAILABLE, "about to end")
        return learner.accept()

    process = start(learner.address, "--num_envs", 2)
    stream = learner.streams.get(timeout=SECONDS)
    stream = lose(stream)  # before anything was said
    stream_id = receive_hello(stream, 2)
    follower = Follower(2)
    step = stream.receive("step")
    follower.first(step)

    stream = lose(stream)  # with the first step underway or read
    receive_hello(stream, 2, 0, stream_id)
    assert stream.receive("step") == step

    step = follow(stream, follower, 40)
    stream = lose(stream)
    receive_hello(stream, 2, 40, stream_id)
    assert stream.receive("step") == step

    stream = lose(stream)  # again, with nothing learned in between
    receive_hello(stream, 2, 40, stream_id)
    assert stream.receive("step") == step

    # The action may have come or not.
    actions = follower.policy()
    stream.act(actions)
    stream = lose(stream)
    hello = stream.receive("hello")
    again = stream.receive("step")
    assert hello.stream_id == stream_id
    assert hello.first_step in (40, 41)
    if hello.first_step == 40:
        assert again == step
        stream.act(actions)
        again = stream.receive("step")
    follower.next(again, actions)
    follow(stream, follower, 20)
    stream.end()
    assert "after 61 steps" in finish(process)
    assert process.returncode == 0


def test_leaves_between_episodes(start, learner):
    process = start(learner.address, "--episodes", 3)
    stream = learner.accept()
    receive_hello(stream, 1)
    follower = Follower(1)
    follower.first(stream.receive("step"))
    while follower.terminated < 3:
        stream.act([0])
        step = stream.receive("step")
        follower.next(step, [0])
    assert follower.done.all()
    stream.receive(None)
    stream.end()
    finish(process)
    assert process.returncode == 0


def test_sends_its_last_step_again_if_that_may_be_lost(start, learner):
    process = start(learner.address, "--episodes", 1)
    stream = learner.accept()
    stream_id = receive_hello(stream, 1)
    step = stream.receive("step")
    number = 0
    done = False
    while not done:
        stream.act([1])
        step = stream.receive("step")
        number += 1
        done = bool(step.arrays[4 * 4 + 4])
    stream.receive(None)
    stream.end(grpc.StatusCode.UNAVAILABLE, "about to end")
    stream = learner.accept()
    receive_hello(stream, 1, number, stream_id)
    assert stream.receive("step") == step
    stream.act([1])  # which nobody waits for
    stream.receive(None)
    stream.end()
    finish(process)
    assert process.returncode == 0


@pytest.mark.parametrize(
    "code", ["UNAUTHENTICATED", "FAILED_PRECONDITION", "INVALID_ARGUMENT"]
)
@pytest.mark.parametrize("after", [0, 2])
def test_a_final_refusal_is_said_and_ends_it(start, learner, code, after):
    process = start(learner.address)
    stream = learner.streams.get(timeout=SECONDS)
    if after:
        stream.hello()
        receive_hello(stream, 1)
        for _ in range(after):
            stream.receive("step")
            stream.act([0])
    stream.end(grpc.StatusCode[code], "this is why")
    assert "this is why" in finish(process)
    assert process.returncode == 1
    learner.assert_nobody_dialled()


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (lambda stream: stream.hello(version=1), "version 1"),
        (lambda stream: stream.act([0]), "hello"),
        (lambda stream: (stream.hello(), stream.hello()), "not an action"),
        (lambda stream: (stream.hello(), stream.act([0, 1])), "INT64"),
        (lambda stream: (stream.hello(), stream.act([0], dtype="<i4")), "INT64"),
        (lambda stream: (stream.hello(), stream.act([])), "INT64"),
        (lambda stream: (stream.hello(), stream.act([2])), "2"),
        (lambda stream: (stream.hello(), stream.act([-1])), "-1"),
    ],
)
def test_a_learner_that_breaks_the_rules_is_left(start, learner, says, why):
    process = start(learner.address)
    stream = learner.streams.get(timeout=SECONDS)
    says(stream)
    assert why in finish(process)
    assert process.returncode == 1
    stream.end()
    learner.assert_nobody_dialled()


def test_a_learner_that_says_nothing_is_dialled_again(start, learner):
    start(learner.address, "--timeout", 3)
    learner.streams.get(timeout=SECONDS)
    stream = learner.accept()
    stream_id = receive_hello(stream, 1)
    stream.receive("step")  # and no answer
    stream = learner.accept()
    receive_hello(stream, 1, 0, stream_id)
    stream.receive("step")


def test_patience_is_for_times_without_a_learner(start, learner):
    process = start(learner.address, "--patience", 3)
    stream = learner.accept()
    stream_id = receive_hello(stream, 1)
    stream.receive("step")
    with pytest.raises(queue.Empty):  # the learner takes longer than that
        stream.incoming.get(timeout=4)
    stream.cut()
    stream = learner.accept()
    receive_hello(stream, 1, 0, stream_id)
    learner.stop()
    assert "No learner for 3 s" in finish(process)
    assert process.returncode == 1


def test_gives_up_where_nobody_listens(start, tmp_path):
    process = start(f"unix:{tmp_path}/nobody", "--patience", 3)
    assert "No learner for 3 s" in finish(process)
    assert process.returncode == 1


def test_token_and_certificate(start, wire, tmp_path):
    certificates = Certificates(tmp_path)
    certificates.make("learner", "DNS:localhost")
    identity = certificates.identity("learner")
    credentials = grpc.ssl_server_credentials(
        [(identity["tls_key"].read_bytes(), identity["tls_cert"].read_bytes())]
    )
    learner = Learner(wire, "localhost:0", credentials)
    address = f"localhost:{learner.port}"
    (tmp_path / "token").write_text("open-sesame\n")
    token = ["--token_file", tmp_path / "token"]
    try:
        process = start(address, *token, "--tls_ca", tmp_path / "ours.pem")
        stream = learner.accept()
        receive_hello(stream, 1)
        assert stream.metadata["authorization"] == "Bearer open-sesame"
        stream.end()
        finish(process)
        assert process.returncode == 0

        foreign = ["--tls_ca", tmp_path / "foreign.pem", "--patience", 0.5]
        process = start(address, *token, *foreign)
        finish(process)
        assert process.returncode == 1
        learner.assert_nobody_dialled()
    finally:
        learner.stop()


def test_flags_that_cannot_work_are_refused(start):
    for arguments in ([], ["a:1", "--num_envs", 0], ["a:1", "--frog", 1]):
        process = start(*arguments)
        assert "usage" in finish(process)
        assert process.returncode == 2
    process = start("a:1", "--num_envs", 2, "--episodes", 1)
    assert "--episodes" in finish(process)
    assert process.returncode == 2


# --- The real learner -----------------------------------------------------------------


@pytest.fixture
def native():
    """libtorchbeast, if it is built."""
    return pytest.importorskip("libtorchbeast", exc_type=ImportError)


def test_unrolls_span_those_who_come_and_go(start_client, native, tmp_path):
    """One place, and several who have it one after the other: nothing is lost."""
    from servers import Run

    def push_right(inputs):
        (observation, *_), state = inputs
        return (np.ones((1, observation.shape[1]), np.int64),), state

    certificates = Certificates(tmp_path)
    certificates.make("learner", "DNS:localhost")
    listener = native.Listener(
        "localhost:0",
        max_streams=1,
        security=native.Security(token="sesame", **certificates.identity("learner")),
    )
    listener.start()
    (tmp_path / "token").write_text("sesame\n")
    (tmp_path / "wrong").write_text("sesam\n")
    security = ["--tls_ca", tmp_path / "ours.pem", "--token_file"]
    T, num_steps = 5, 0
    with Run([], push_right, listener=listener, T=T) as run:
        with futures.ThreadPoolExecutor(1) as executor:
            rollouts = executor.submit(list, run.queue)
            for language in ("python", "cpp", "cpp", "python"):
                process = start_client(
                    *(language, listener.address, "--episodes", 2),
                    *(*security, tmp_path / "token"),
                )
                said = finish(process)
                assert process.returncode == 0, said
                num_steps += int(re.search(r"after (\d+) steps", said)[1])
                process = start_client(
                    language, listener.address, *security, tmp_path / "wrong"
                )
                assert "token" in finish(process)
                assert process.returncode == 1
            stats = run.pool.stats()
            run.pool.close()
        assert stats["num_steps"] == num_steps
        assert stats["num_dropped_steps"] == 0
        rollouts = rollouts.result(SECONDS)
    listener.close()

    assert len(rollouts) == num_steps // T
    rows = []
    for (env_outputs, (action,)), _ in rollouts:
        *env_outputs, extra = env_outputs
        fields = [*env_outputs, extra["last_action"], extra["truncated"], action]
        new_rows = list(zip(*(np.asarray(x)[:, 0] for x in fields), strict=True))
        assert len(new_rows) == T + 1
        if rows:  # row 0 is the last one before, but for who came in between
            first, last = new_rows[0], rows.pop()
            came = slice(1, -1) if first[2] else slice(None)
            np.testing.assert_equal(first[came], last[came])
        rows += new_rows
    episode_step = num_episodes = 0
    for before, row in itertools.pairwise(rows):
        observation, reward, done, steps, returns, last_action, truncated, _ = row
        expected, terminated = simulate(before[0], before[-1])
        assert (done, truncated) == (terminated, False)
        if done:
            assert (abs(observation) < 0.0501).all()
        else:
            np.testing.assert_allclose(observation, expected, rtol=1e-5, atol=1e-6)
        episode_step += 1
        assert (reward, last_action) == (1, 1)
        assert steps == returns == episode_step
        episode_step *= not done
        num_episodes += done
    assert num_episodes >= 7  # the eighth may end in an unroll that is not full


@pytest.mark.slow
def test_python_and_cpp_train_one_policy(start_client, native, tmp_path):
    """It learns from both, in two runs, and plays well where Gymnasium plays."""
    address = f"unix:{tmp_path}/learner"
    clients = [
        start_client(language, address, "--num_envs", 8, "--seed", 1)
        for language in ("python", "cpp")
    ]
    run = functools.partial(
        runs.run, tmp_path, "a", module="torchbeast.polybeast_learner"
    )
    flags = {"preset": "classic-control", "precision": "fp32", "torch_threads": 1}
    flags |= {"listen": address, "num_actors": 2}
    run(**flags, total_steps=20_000)
    assert [client.poll() for client in clients] == [None, None]  # they dial again
    run(**flags, total_steps=100_000)
    rows = runs.read_logs(tmp_path, "a")
    returns = [float(row["mean_game_return_100"] or 0) for row in rows]
    assert max(returns) > 80  # a random policy: 20
    assert rows[-1]["dropped_steps"] == "0"
    output = run(mode="test", num_test_episodes=10)
    mean = re.search(r"mean return ([-0-9.]+)", output)
    assert mean, output
    assert float(mean[1]) > 40
