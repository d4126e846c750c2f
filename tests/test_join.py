"""Environments that dial the learner: libtorchbeast.Listener and Client.

Clients are processes of their own, over real sockets. tests/cpp/join_losses_test.cc
cuts their connections; here are the bindings, TLS, restarts and ends.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import certificates
import pytest
import runs
import servers
import torch
from servers import Coded, CodedVector, Run
from test_actor_pool import act, check, initial_state, policy

from libtorchbeast import (
    Client,
    Listener,
    RefusedError,
    Security,
    Server,
    TransportError,
)

T = 5

CLIENT = """
import itertools, json, sys, time
import servers
from libtorchbeast import Client, Security

class Slow(servers.Coded):
    def step(self, action):
        if (self.episode, self.step_number) == (2, 0):
            time.sleep(30)
        return super().step(action)

arguments = json.loads(sys.argv[1])
servers._numbers = itertools.count(arguments.pop("first_number", 0))
num_episodes = arguments.pop("num_episodes", None)
env_class = {"Slow": Slow, **servers.ENVIRONMENTS}[arguments.pop("env")]
arguments["security"] = Security(**arguments.pop("security", {}))
Client(env_class, arguments.pop("address"), **arguments).run(num_episodes)
"""


class ClientProcess:
    """A client in a process of its own; `first_number` is its first environment's."""

    def __init__(self, env, address, **arguments):
        arguments = {"env": env, "address": address, **arguments}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, json.dumps(arguments, default=str)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def wait(self):
        """The exit status and what it wrote to its standard error."""
        _, error = self.process.communicate(timeout=runs.patience(60))
        return self.process.returncode, error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()


@contextlib.contextmanager
def listening(address, **arguments):
    listener = Listener(str(address), **arguments)
    listener.start()
    try:
        yield listener
    finally:
        listener.close()


def joined(listener, actor=act, **arguments):
    """A pool without servers, whose agent plays as test_actor_pool's."""
    return Run([], actor, initial_state(), listener=listener, **arguments)


@pytest.fixture
def address(tmp_path):
    return f"unix:{tmp_path}/learner"


def play(run, followers, environments):
    """Check rollouts until so many environments have been seen."""
    for rollout in run.queue:
        check([rollout], followers)
        if len(followers) >= environments:
            return
    pytest.fail(f"the run has ended: {run.result.exception(timeout=30)!r}")


def test_environments_join(address):
    followers = {}
    with listening(address) as listener, contextlib.ExitStack() as stack:
        for i in range(2):
            stack.enter_context(
                ClientProcess("CodedVector", address, first_number=10 * i, name="Code")
            )
        hello = listener.probe(60)
        assert hello["name"] == "Code"
        assert hello["num_envs"] == CodedVector.num_envs
        assert hello["extra_fields"]["truncated"] == {"dtype": "bool", "shape": ()}
        assert listener.address == address
        with joined(listener, batch=3) as run:
            play(run, followers, 6)
            check(itertools.islice(run.queue, 20), followers)
            stats = run.pool.stats()
            assert listener.stats()["num_refused"] == 0
            assert listener.stats()["last_refusal"] == ""
        assert stats["num_connected"] == 2
        assert stats["num_reconnects"] == stats["num_dropped_steps"] == 0
        assert stats["env_seconds"] > 0
        assert run.pool.stats()["num_dropped_steps"] == 0


def test_servers_and_clients_together(tmp_path, address):
    followers = {}
    server = Server(numbered(20), f"unix:{tmp_path}/server")
    server.start()
    with (
        listening(address) as listener,
        ClientProcess("Coded", address),
        Run([server.address], act, initial_state(), listener=listener) as run,
    ):
        play(run, followers, 2)
    server.stop()
    assert sorted(followers) == [0, 20]


def numbered(number):
    """Coded, but with this number."""

    def make():
        env = Coded()
        env.number = number
        return env

    return make


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    made = certificates.Certificates(tmp_path_factory.mktemp("tls"))
    for authority in ("ours", "foreign"):
        made.make(f"{authority}-learner", "DNS:learner.example", authority)
        made.make(f"{authority}-client", "DNS:client.example", authority)
    return made


def test_tls_and_token(tls):
    learner = Security(token="a-secret", **tls.identity("ours-learner"), **tls.ca())
    client = {
        **tls.identity("ours-client"),
        **tls.ca(),
        "tls_server_name": "learner.example",
        "token": "a-secret",
    }
    with (
        listening("127.0.0.1:0", security=learner) as listener,
        joined(listener) as run,
    ):
        wrong = [
            (RefusedError, {"token": "another"}),
            (RefusedError, {"token": None}),
            (TransportError, tls.identity("foreign-client")),
            (TransportError, {"tls_cert": None, "tls_key": None}),
            (TransportError, tls.ca("foreign")),
            (TransportError, {"tls_server_name": None}),
        ]
        for error, change in wrong:
            security = Security(**{**client, **change})
            with pytest.raises(error):
                Client(
                    Coded, listener.address, maximum_downtime_s=0.3, security=security
                ).run()
        assert listener.stats()["num_refused"] == 2
        with ClientProcess("Coded", listener.address, security=client):
            play(run, {}, 1)


def test_others_are_refused(address):
    with listening(address) as listener, ClientProcess("Coded", address):
        hello = listener.probe(60)["hello"]
        with joined(listener, hello=hello) as run:
            play(run, {}, 1)
            with pytest.raises(RefusedError, match=r"differ.*FLOAT|differ.*UINT8"):
                Client(servers.Counting, address).run()
            assert listener.stats()["num_refused"] == 1
            assert "differ" in listener.stats()["last_refusal"]
            ((_, kind, text),), _ = listener.events()
            assert kind == "refused"
            assert "differ" in text
            assert text.count("the environment that has joined") == 1, text
            next(iter(run.queue))
        # The pool has ended; who comes now may try again later.
        with pytest.raises(
            TransportError, match=r"no learner for 0\.3 s.*about to end"
        ):
            Client(Coded, address, maximum_downtime_s=0.3).run()


def test_the_learner_is_restarted(address):
    """The client stays, with its environment in the middle of an episode."""
    seen = []
    with ClientProcess("Coded", address):
        for _ in range(3):
            with listening(address) as listener, joined(listener) as run:
                for rollout in itertools.islice(run.queue, 4):
                    ((observation, *_), (actions, *_)), _ = rollout
                    rows = [tuple(row) for row in observation[:, 0].tolist()]
                    assert actions[:, 0].tolist() == [policy(row) for row in rows]
                    seen.append(rows)
    expected = (row[0] for row in servers.rows(0, policy))
    # Each rollout is a piece of what the environment did, of T + 1 rows in a row.
    everything = list(itertools.islice(expected, 2000))
    begins = [everything.index(rows[0]) for rows in seen]
    assert begins == sorted(set(begins))
    for begin, rows in zip(begins, seen, strict=True):
        assert rows == everything[begin : begin + T + 1]
    for i, begin in enumerate(begins):
        if i % 4 > 0:  # of one learner
            assert begin == begins[i - 1] + T


@pytest.mark.slow
def test_a_step_may_take_long(address):
    """Longer than a network may be cut until TCP's pings notice it."""
    with (
        listening(address) as listener,
        joined(listener) as run,
        ClientProcess("Slow", address),
    ):
        check(itertools.islice(run.queue, 4), {})
        stats = run.pool.stats()
    assert stats["env_seconds"] > 30
    assert stats["num_reconnects"] == 0
    assert stats["last_error"] == ""


def test_clients_that_leave_hand_over(address):
    """Each plays three episodes; the unroll of all is one."""
    clients = [
        list(itertools.islice(servers.rows(i, policy), length + 1))
        for i in range(4)
        for length in [sum(servers.episode_length(i, k) for k in range(3))]
    ]
    with (
        listening(address, max_streams=1) as listener,
        joined(listener) as run,
        ThreadPoolExecutor(1) as threads,
    ):
        rollouts = threads.submit(lambda: list(itertools.islice(run.queue, 10)))
        for i in range(4):
            with ClientProcess(
                "Coded", address, first_number=i, num_episodes=3
            ) as client:
                assert client.wait() == (0, "")
        rollouts = rollouts.result(timeout=30)
        stats = run.pool.stats()
    assert stats["num_steps"] == sum(len(rows) - 1 for rows in clients)
    assert stats["num_dropped_steps"] == 0
    # In the row where one takes over only the observation is the newcomer's.
    expected = zip(
        [row[0] for rows in clients for row in rows[:-1]],
        [clients[0][0][1:], *(row[1:] for rows in clients for row in rows[1:])],
        strict=False,
    )
    for ((observation, *fields), _), _ in rollouts:
        for t in range(T):
            found = tuple(field[t, 0].item() for field in fields)
            assert (tuple(observation[t, 0].tolist()), found) == next(expected)


def test_a_killed_client_is_missed(address):
    with (
        listening(address) as listener,
        ClientProcess("Dying", address) as client,
    ):
        listener.probe(60)
        with joined(listener, maximum_downtime_s=1) as run:
            error = run.error()
        assert client.wait()[0] == -signal.SIGKILL
    assert type(error) is TransportError
    assert re.search("no environment has joined at .* for 1 s; .* is lost", str(error))
    steps = sum(servers.episode_length(0, episode) for episode in range(2))
    stats = run.pool.stats()
    assert stats["num_steps"] == steps
    # Between episodes its place would have gone to the next; nothing is lost.
    assert stats["num_dropped_steps"] == 0


def test_nobody_joins(address):
    with listening(address) as listener:
        with pytest.raises(TransportError, match=r"joined at unix:.* within 0.05 s"):
            listener.probe(0.05)
        with joined(listener, maximum_downtime_s=0.2) as run:
            error = run.error()
    assert type(error) is TransportError
    assert str(error) == f"no environment has joined at {address} for 0.2 s"


def raise_again_and_again(address, over):
    """Joins with one environment after the other; each gives a rollout and raises."""
    while not over.is_set():
        with contextlib.suppress(RuntimeError):
            Client(servers.Failing, address, maximum_downtime_s=0.3).run()


def test_one_that_raises_again_and_again_ends_nobodys_run(address):
    over = threading.Event()
    with (
        listening(address) as listener,
        ThreadPoolExecutor(1) as threads,
        ClientProcess("Coded", address),
    ):
        listener.probe(60)
        limits = {"max_env_failures": 2, "maximum_downtime_s": 2}
        with joined(listener, **limits) as run:
            next(iter(run.queue))
            threads.submit(raise_again_and_again, address, over)
            while run.pool.stats()["num_env_failures"] < 7:
                next(iter(run.queue))
            over.set()
            next(iter(run.queue))


def test_environments_that_all_raise_end_the_run(address):
    def fail_three_times():
        for _ in range(3):
            with contextlib.suppress(RuntimeError):
                Client(servers.Failing, address, maximum_downtime_s=60).run()

    limits = {"max_env_failures": 2, "maximum_downtime_s": 3}
    with (
        listening(address) as listener,
        ThreadPoolExecutor(1) as threads,
        joined(listener, **limits) as run,
    ):
        threads.submit(fail_three_times)
        error = run.error()
    assert type(error) is RuntimeError
    assert "more than 2 environments have raised within a minute" in str(error)
    assert "ZeroDivisionError: the pole fell over at" in str(error)


def test_an_exception_reaches_both_sides(address):
    with (
        listening(address) as listener,
        joined(listener) as run,
        ClientProcess("Failing", address) as client,
    ):
        error = str(run.error())
        status, text = client.wait()
    assert status == 1
    for told in (error, text):
        assert "in fall_over" in told
        assert "ZeroDivisionError: the pole fell over at" in told
        assert "über" in told


def test_an_unusable_hello_is_not_the_measure(address):
    with listening(address) as listener:
        with ThreadPoolExecutor(1) as threads:
            client = threads.submit(Client(servers.Counting, address).run)
            hello = listener.probe(60)["hello"]
            listener.refuse(hello, "a Box of bytes is of no use")
            with pytest.raises(RefusedError, match="a Box of bytes is of no use"):
                client.result(timeout=60)
        with pytest.raises(ValueError, match="hello"):
            listener.refuse(b"\xff", "")
        with ClientProcess("Coded", address), joined(listener) as run:
            assert listener.probe(60)["hello"] != hello
            play(run, {}, 1)


def test_a_refusal_may_be_long(address):
    """Longer than gRPC's status may be; its middle is left out."""
    with listening(address) as listener, ThreadPoolExecutor(1) as threads:
        client = threads.submit(Client(Coded, address).run)
        hello = listener.probe(60)["hello"]
        listener.refuse(hello, "begin " + "ü" * 10_000 + " end")
        with pytest.raises(RefusedError, match=r"(?s)begin ü+.*\[\.\.\.\].*ü end"):
            client.result(timeout=60)


def test_a_factory_that_raises(address):
    with pytest.raises(RuntimeError, match="FileNotFoundError: no ROM here"):
        Client(servers.FailingToStart, address).run()


def test_a_first_connection_is_no_reconnect(address):
    client = Client(Coded, address)
    thread = threading.Thread(target=client.run)
    thread.start()
    while not client.stats()["last_error"]:  # nobody listens
        time.sleep(0.01)
    with listening(address) as listener, joined(listener) as run:
        play(run, {}, 1)
        assert client.stats()["num_reconnects"] == 0
        assert run.pool.stats()["num_reconnects"] == 0
    client.stop()
    thread.join()


def test_no_learner(address):
    client = Client(Coded, address, maximum_downtime_s=0.2)
    with pytest.raises(TransportError, match=r"no learner for 0\.2 s"):
        client.run()
    assert client.stats()["num_steps"] == 0
    assert "No such file" in client.stats()["last_error"]
    with pytest.raises(RuntimeError, match="once"):
        client.run()


def test_stop_from_another_thread(address):
    with listening(address) as listener, ThreadPoolExecutor(1) as threads:
        client = Client(Coded, address, maximum_downtime_s=None)
        done = threads.submit(client.run)
        listener.probe(60)
        client.stop()
        client.stop()
        done.result(timeout=30)
        assert not client.stats()["connected"]


class Closing(Coded):
    closed = threading.Event()

    def close(self):
        self.closed.set()


def test_the_environment_is_closed(address):
    Closing.closed.clear()
    with (
        listening(address) as listener,
        joined(listener) as run,
        ThreadPoolExecutor(1) as threads,
    ):
        client = Client(Closing, address)
        done = threads.submit(client.run, 2)
        next(iter(run.queue))
        done.result(timeout=30)
        assert client.stats()["num_episodes"] == 2
        assert Closing.closed.wait(timeout=30)


def test_ctrl_c_ends_a_client(address):
    with listening(address) as listener, ClientProcess("Coded", address) as client:
        listener.probe(60)
        client.process.send_signal(signal.SIGINT)
        status, text = client.wait()
    assert status == -signal.SIGINT
    assert "KeyboardInterrupt" in text


def test_a_listener_serves_one_pool_at_a_time(address):
    with (
        listening(address) as listener,
        ClientProcess("Coded", address),
        joined(listener) as run,
    ):
        play(run, {}, 1)
        with joined(listener) as second:
            error = second.error()
        assert type(error) is ValueError
        assert "has a pool already" in str(error)
        next(iter(run.queue))


def test_the_pool_keeps_its_listener(address):
    listener = Listener(address)
    listener.start()
    with joined(listener) as run, ClientProcess("Coded", address):
        del listener
        play(run, {}, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Listener("nowhere"), "no port"),
        (lambda: Listener("0.0.0.0:0"), "can be reached from other machines"),
        (lambda: Listener("unix:/tmp/x", max_streams=0), "max_streams.* 0"),
        (lambda: Listener("unix:/tmp/x", max_streams=-1), "max_streams.* -1"),
        (lambda: Listener("unix:/tmp/x", max_streams=2**30 + 5), "max_str.*1073741829"),
        (lambda: Client(Coded, "nowhere"), "no port"),
        (lambda: Client(Coded, "far.example:1"), "can be reached from other machines"),
        (lambda: Client(Coded, "unix:/tmp/x", maximum_downtime_s=-1), "downtime_s"),
        (lambda: Client(Coded, "unix:/tmp/x").run(-1), "num_episodes"),
        (lambda: joined(None), "no listener"),
    ],
)
def test_arguments_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_socket_path_that_cannot_be(tmp_path):
    with pytest.raises(RuntimeError, match="No such file or directory"):
        Listener(f"unix:{tmp_path}/no/where").start()


def test_the_interpreter_may_end_at_any_moment(tmp_path):
    """With a listener, a pool whose queue is full, and a client in daemon threads."""
    program = textwrap.dedent(
        f"""
        import threading
        import servers
        from libtorchbeast import *
        address = "unix:{tmp_path}/learner"
        listener = Listener(address)
        listener.start()
        queue = BatchingQueue(maximum_queue_size=1)
        batcher = DynamicBatcher(timeout_ms=1)
        pool = ActorPool(2, queue, batcher, [], (), listener=listener)
        client = Client(servers.Coded, address)

        def infer():
            import numpy as np
            for batch in batcher:
                batch.set_outputs(((np.zeros((1, len(batch)), np.int64),), ()))

        for run in (pool.run, client.run, infer):
            threading.Thread(target=run, daemon=True).start()
        while pool.stats()["num_rollouts"] < 1 or pool.stats()["num_steps"] < 4:
            pass
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=runs.patience(60),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "learner").exists()


def test_counts_of_steps_agree(address):
    with (
        listening(address) as listener,
        joined(listener) as run,
        ThreadPoolExecutor(1) as threads,
    ):
        client = Client(Coded, address)
        done = threads.submit(client.run, 4)
        for _ in range(2):
            assert torch.is_tensor(next(iter(run.queue))[0][0][0])
        done.result(timeout=30)
        assert run.pool.count() == client.stats()["num_steps"]
