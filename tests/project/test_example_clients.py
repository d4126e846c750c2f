"""The example clients, which know nothing of TorchBeast but torchbeast.proto.

Their learner is scripted_learner.py; at the end the real one.
"""

import contextlib
import fcntl
import functools
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import runs
from gymnasium import spaces
from scripted_learner import SECONDS, Follower, Learner, follow, receive_hello

grpc = pytest.importorskip("grpc", reason="needs grpcio and grpcio-tools")
pytest.importorskip("grpc_tools.protoc", reason="needs grpcio-tools")


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


@pytest.mark.parametrize("how", ["cut", "full", "killed"])
def test_goes_on_where_it_was_after_a_loss(start, learner, how):
    def lose(stream):
        if how == "cut":
            stream.cut()
        elif how == "killed":
            learner.stop()
            learner.start()
        else:
            stream.end(grpc.StatusCode.RESOURCE_EXHAUSTED, "no place")
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


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (lambda stream: stream.hello(version=1), "version 1"),
        (lambda stream: stream.act([0]), "hello"),
        (lambda stream: (stream.hello(), stream.hello()), "not an action"),
        (lambda stream: (stream.hello(), stream.act([0, 1])), "INT64"),
        (lambda stream: (stream.hello(), stream.act([2])), "2"),
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


# --- The real learner -----------------------------------------------------------------


def test_a_program_with_a_loop_of_its_own(tmp_path, monkeypatch):
    """It plays episodes of four steps until the run is complete, some cut off."""
    monkeypatch.syspath_prepend(CLIENTS / "python")
    from caller import Caller, RunComplete

    address = f"unix:{tmp_path}/learner"
    flags = {"listen": address, "num_actors": 1, "envs_per_actor": 1, "batch_size": 1}
    module = "torchbeast.polybeast_learner"
    run = runs.start(tmp_path, "run", module=module, **{**runs.SMALL, **flags})
    parts = {"x": spaces.Box(-9, 9, (3,)), "n": spaces.Discrete(50, start=7)}
    observe = [{"x": np.full(3, i), "n": 7 + i} for i in range(5)]
    actions = set()
    both_spaces = spaces.Dict(parts), spaces.Discrete(3, start=5)
    wait = {"maximum_downtime_s": runs.patience(60)}  # until the learner listens
    with Caller(address, *both_spaces, **wait) as agent:

        def play():
            for episode in itertools.count():
                actions.add(int(agent.begin(observe[0])))
                for i in (1, 2, 3):
                    actions.add(int(agent.step(i, observe[i])))
                agent.end(4, observe[4] if episode % 2 else None)

        for call in (play, lambda: agent.step(1, observe[1])):
            with pytest.raises(RunComplete):
                call()
    output = runs.finish(run)
    assert run.returncode == 0, output
    assert "WARNING" not in output
    assert actions == {5, 6, 7}
    rows = runs.read_logs(tmp_path, "run")
    assert {x["mean_episode_return"] for x in rows if x["mean_episode_return"]} == {
        "10.0"
    }
    assert int(rows[-1]["dropped_steps"]) == 0


@pytest.mark.slow
def test_python_and_cpp_train_one_policy(start_client, tmp_path):
    """It learns from both, which end with it."""
    address = f"unix:{tmp_path}/learner"
    clients = [
        start_client(language, address, "--num_envs", 8, "--seed", 1)
        for language in ("python", "cpp")
    ]
    flags = {"preset": "classic-control", "envs_per_actor": 8, "torch_threads": 1}
    flags |= {
        "precision": "fp32",
        "listen": address,
        "num_actors": 2,
        "total_steps": 10_000,
    }
    runs.run(tmp_path, "a", module="torchbeast.polybeast_learner", **flags)
    assert all("The stream has ended after" in finish(client) for client in clients)
    assert [client.returncode for client in clients] == [0, 0]
    rows = runs.read_logs(tmp_path, "a")
    assert rows[-1]["streams"] == "2"
    assert rows[-1]["dropped_steps"] == "0"
