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

import pytest
import runs
import servers
from servers import CodedVector, Run
from test_actor_pool import act, check, initial_state

from libtorchbeast import Listener, TransportError

CLIENT = """
import itertools, json, sys
import servers
from libtorchbeast import Client

arguments = json.loads(sys.argv[1])
servers._numbers = itertools.count(arguments.pop("first_number", 0))
env_class = servers.ENVIRONMENTS[arguments.pop("env")]
Client(env_class, arguments.pop("address"), **arguments).run()
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


def test_a_killed_client_is_missed(address):
    with listening(address) as listener, ClientProcess("Dying", address) as client:
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
