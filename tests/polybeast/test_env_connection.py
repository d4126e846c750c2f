"""What learner and environments say of themselves: numbers, seeds, settings, reasons.

Real pools, servers, clients and processes; the learners here are pools of the tests.
"""

import argparse
import collections
import functools
import re
import socket
import threading
import time

import pytest
import servers
import watched_servers
from certificates import Certificates
from servers import Coded, Run, serving
from test_actor_pool import act, initial_state
from watched_runs import starter, wait_until

from libtorchbeast import (
    Client,
    Listener,
    RefusedError,
    Security,
    TransportError,
    probe,
)
from torchbeast.flags import Atari, Environment
from torchbeast.polybeast import env as polybeast_env
from torchbeast.polybeast import env_connection, security
from torchbeast.polybeast import learner as polybeast_learner
from torchbeast.polybeast.remote_envs import RemoteEnvs, expected_environment
from torchbeast.runs import flagset

SECONDS = 60  # for what takes a moment on an idle machine


# --- Numbers and seeds ----------------------------------------------------------------


class Told:
    """Environments that note what begin_stream() was called with, before any reset."""

    def __init__(self):
        self.calls = []
        self.stepped = set()  # those whose environment has taken a step

    def __call__(self):
        calls, stepped = self.calls, self.stepped

        class Environment(Coded):
            told = None

            def begin_stream(self, seed, stream):
                assert self.told is None
                assert self.episode == -1, "it was reset before"
                self.told = (seed, stream)

            def reset(self):
                if self.episode == -1:
                    calls.append(self.told)
                return super().reset()

            def step(self, action):
                stepped.add(self.told)
                return super().step(action)

        return Environment()


def playing(addresses, **arguments):
    return Run(addresses, act, initial_state(), **arguments)


def test_streams_are_numbered_and_a_new_one_is_never_an_old_one(tmp_path):
    address, other = f"unix:{tmp_path}/a", f"unix:{tmp_path}/b"
    told, others = Told(), Told()
    with serving(others, other), playing([address, other, address], seed=5) as run:
        # If nobody took the rollouts, the streams would wait at the queue.
        learner = threading.Thread(target=lambda: collections.deque(run.queue, 0))
        learner.start()
        with serving(told, address):
            wait_until(lambda: len(told.stepped | others.stepped) == 3, "all play")
        with serving(told, address):  # both streams of the first come back
            wait_until(lambda: len(told.calls) == 4, "they have begun again")
    learner.join()
    assert others.calls == [(5, 1)]
    assert sorted(told.calls[:2]) == [(5, 0), (5, 2)]
    assert sorted(told.calls[2:]) == [(5, 3), (5, 4)]


def test_environments_without_begin_stream_get_a_seed(tmp_path):
    seeds = []

    class Seeded(Coded):
        def reset(self, *, seed=None):  # Gymnasium's
            if self.episode == -1:
                seeds.append(seed)
            return super().reset()

    for seed, stream in ((5, 0), (5, 0), (6, 0), (5, 1)):
        with (
            serving(Seeded, f"unix:{tmp_path}/a") as server,
            playing([server.address], seed=seed, first_stream=stream) as run,
        ):
            next(run.queue)
    first, again, *different = seeds
    assert first == again
    assert len({first, *different}) == 3
    assert all(type(seed) is int and 0 <= seed < 2**31 for seed in seeds)


# --- Settings -------------------------------------------------------------------------


def env_flags(*argv, **changes):
    parser = polybeast_env.make_parser()
    flags = flagset.parse(parser, argv)
    return flags.replace(**changes)


def expected(*argv):
    parser = polybeast_learner.make_parser()
    return expected_environment(flagset.parse(parser, argv))


def test_settings_are_all_flags_that_shape_the_environments():
    def settings_of(*words, **changes):
        return env_connection.environment_settings(env_flags(*words, **changes))

    words = ("--preset=sticky-atari", "--env_kwargs={}", "--wrapper=a:b")
    settings = settings_of(*words, "--mask_actions")
    assert settings.keys() == (Environment.declared() | Atari.declared()).keys()
    assert settings["sticky_actions"] == "0.25"
    assert settings["life_loss"] == "False"
    # A preset and the command line may write a number in two ways.
    assert settings_of(sticky_actions=0)["sticky_actions"] == "0.0"
    # Flags without a value are left out, and False if it means the same.
    left_out = {"env_kwargs", "wrapper", "mask_actions"}
    assert not settings_of("--no-mask_actions").keys() & left_out
    # The order and the spaces of JSON have no meaning.
    for text in ('{"b": 1, "a": [2]}', '{"a":[2],"b":1}'):
        settings = settings_of("--env_kwargs", text)
        assert settings["env_kwargs"] == '{"a": [2], "b": 1}'
    # Atari's flags have no effect elsewhere.
    settings = settings_of("--env=CartPole-v1", "--sticky_actions=0.5")
    assert settings == {"env": "CartPole-v1"}


CASES = {
    "E": ({"num_envs": 3}, {}, "--envs_per_actor 1 (this learner: 3)"),
    "value": (
        {"settings": {"a": "1", "b": "2"}},
        {"a": "0", "b": "1"},
        "--a 0 (this learner: 1), --b 1 (this learner: 2); give both sides the same",
    ),
    # Not ten flags that only one of the two environments has.
    "env": (
        {"name": "Pong", "settings": {"env": "Pong", "a": "1"}},
        {"env": "Code"},
        "has --env Code (this learner: Pong); give both sides the same flags",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_who_has_other_settings_is_refused_by_name(case, tmp_path):
    must_be, settings, words = CASES[case]
    described = {"name": "Code", "settings": settings}
    match = re.escape(words)
    with serving(Coded, f"unix:{tmp_path}/server", **described) as server:
        with pytest.raises(RefusedError, match=f"{server.address}.*{match}"):
            probe(server.address, expected=must_be)
        with playing([server.address], expected=must_be) as run:
            wait_until(
                lambda: words in run.pool.stats()["last_error"], "the pool refuses it"
            )
    listener = Listener(f"unix:{tmp_path}/learner", expected=must_be)
    listener.start()
    with pytest.raises(RefusedError, match=match):
        Client(Coded, listener.address, **described).run()
    assert words in listener.stats()["last_refusal"]
    listener.close()


# --- Why a connection can't work ------------------------------------------------------


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    made = Certificates(tmp_path_factory.mktemp("tls"))
    # As docs/cluster.md makes it: no address in it.
    made.make("learner", "DNS:torchbeast")
    made.make("expired-learner", "DNS:torchbeast", expired=True)
    for name in ("client", "expired-client"):
        made.make(name, "DNS:client", expired=name.startswith("expired"))
    made.make("foreign-client", "DNS:client", "foreign")
    return made


def flags_of(**changes):
    names = ("tls", "tls_ca", "tls_cert", "tls_key", "tls_server_name")
    flags = dict.fromkeys(names)
    return argparse.Namespace(**{**flags, **changes})


def test_why_tls_cannot_work(tls):
    named = {"tls_server_name": "torchbeast"}
    trusting = {**tls.ca(), **named}
    us = {**trusting, **tls.identity("client")}
    one_sided = tls.identity("learner")
    both_sided = {**one_sided, **tls.ca()}
    cases = [
        (both_sided, us, None),
        (one_sided, {"tls_ca": one_sided["tls_cert"], **named}, None),  # pinned
        ({}, {}, None),
        (one_sided, named, "certificate of the other side is not valid"),
        (one_sided, {**trusting, "tls_server_name": None}, "not valid: IP"),
        (one_sided, {**tls.ca("foreign"), **named}, "not valid"),
        (tls.identity("expired-learner"), trusting, "certificate has expired"),
        (one_sided, {}, "do not agree on TLS: it speaks TLS"),
        ({}, trusting, "do not agree on TLS: it speaks plain TCP"),
        (both_sided, trusting, "it ends the connection"),
        (both_sided, {}, "it speaks TLS"),
        (both_sided, {**us, **tls.identity("foreign-client")}, "foreign-client.pem"),
        (both_sided, {**us, **tls.identity("expired-client")}, "expired-client.pem"),
    ]
    for listens, dials, words in cases:
        listener = Listener("127.0.0.1:0", security=Security(**listens))
        listener.start()
        fault = security.tls_fault(listener.address, flags_of(**dials))
        assert fault is None if words is None else words in fault, (fault, words)
        assert "\n" not in (fault or "")
        listener.close()
    # Nobody is there; that may pass.
    for nobody in (listener.address, "unix:/tmp/nobody", "a..b:1", f"{'a' * 99}:1"):
        assert security.tls_fault(nobody, flags_of(**us)) is None


def test_a_machine_that_does_not_answer_delays_the_others_little(tmp_path, caplog):
    """And the time to connect begins when the servers have started."""
    parser = polybeast_learner.make_parser()
    with socket.socket() as silent, socket.socket() as peer:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        peer.connect(silent.getsockname())  # while it waits, no other gets an answer
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        good = f"unix:{tmp_path}/good"
        words = ["--env=Code", "--envs_per_actor=1", "--connect_timeout=200"]
        words += [f"--server_addresses={address},{good}", "--num_actors=2"]
        flags = flagset.parse(parser, words)
        settings = env_connection.environment_settings(flags)
        with serving(Coded, good, name="Code", settings=settings):
            begun = time.monotonic()
            spec = RemoteEnvs(flags, seed=1).find_env_spec(lambda: None)
            assert time.monotonic() - begun < 30
            assert spec.num_envs == 1
    assert f"{address} can't be used for now: " in caplog.text
    words = [f"--pipes_basename=unix:{tmp_path}/s", "--connect_timeout=0.3"]
    envs = RemoteEnvs(flagset.parse(parser, [*words, "--num_actors=1"]), seed=1)
    ask = envs._ask
    envs._ask = lambda *words: time.sleep(0.5) or ask(*words)  # longer than the time
    begun = time.monotonic()
    words = r"within 0\.3 s \(--connect_timeout\): no "
    with pytest.raises(TransportError, match=words):
        envs.find_env_spec(lambda: time.monotonic() - begun < 1.5)
    assert time.monotonic() - begun > 1.5


# --- polybeast_env --join -------------------------------------------------------------


class Environments(watched_servers.Servers):
    """`python -m torchbeast.polybeast_env --join` in a session of its own."""

    def __init__(self, folder, address, **arguments):
        super().__init__(folder, **{"env": "CartPole-v1", "join": address, **arguments})

    def wait_for(self, words):
        wait_until(lambda: words in self.console, words, SECONDS)

    def assert_refused(self, *words):
        """It ends with one line that has all these words."""
        self.wait_for_end(1)
        assert "Traceback" not in self.console
        errors = [line for line in self.console.splitlines() if "[ERROR " in line]
        assert len(errors) == 1, self.console
        for word in words:
            assert word in errors[0]
        assert "starting it again" not in self.console


@pytest.fixture
def join(tmp_path):
    """Starts environments that dial; what is left of them is killed after the test."""
    yield from starter(functools.partial(Environments, tmp_path))


def test_joiners_that_are_refused_say_why_and_end(join, tls, tmp_path):
    """And the right ones join, two machines with one command play different games."""
    for name in ("token", "wrong"):
        (tmp_path / name).write_text(f"{name}-between-us\n")
    flags = {"token_file": tmp_path / "token", **tls.ca()}
    flags["tls_server_name"] = "torchbeast"
    listener = Listener(
        "127.0.0.1:0",
        seed=3,
        expected=expected("--env=CartPole-v1", "--envs_per_actor=3"),
        security=Security(token="token-between-us", **tls.identity("learner")),
    )
    listener.start()
    address = listener.address
    good = [join(address, **flags) for _ in range(2)]
    cases = [
        (
            {"env": "PongNoFrameskip-v4", "preset": "sticky-atari"},
            ["--env PongNoFrameskip-v4 (this learner: CartPole-v1)"],
        ),
        ({"token_file": tmp_path / "wrong"}, ["token is missing or wrong"]),
        (tls.ca("foreign"), ["This side trusts --tls_ca", "foreign.pem"]),
        ({"envs_per_actor": 2}, ["--envs_per_actor 2 (this learner: 3)"]),
    ]
    bad = [join(address, **{**flags, **change}) for change, _ in cases]
    for environments, (_, words) in zip(bad, cases, strict=True):
        environments.assert_refused(address, "server 0 can't join", *words)
    with servers.Run([], servers.play_first, (), listener=listener, batch=3) as run:
        wait_until(lambda: run.pool.stats()["num_connected"] == 2, "both play", SECONDS)
        starts = []
        while len(starts) < 6:
            ((observation, _, _, episode_step, *_), _), _ = next(run.queue)
            if not episode_step[0].any():  # the first rollout of a stream
                starts += map(tuple, observation[0].tolist())
        assert len(set(starts)) == 6, starts
    listener.close()
    assert all("[ERROR" not in environments.console for environments in good)
    for environments in good:
        environments.wait_for(f"Waiting for a learner at {address}: ")
        environments.wait_for("Connection refused")
        environments.end()
