"""When peers end a run: RunLimits over made-up facts, and pools with real servers."""

import re
import socket
import threading
from math import inf

import pytest
import servers
from libtorchbeast_limits import RunLimits
from servers import Run, ServerProcess
from test_actor_pool import act, initial_state, zeros

from libtorchbeast import RefusedError, Security, Server, TransportError

# Streams of a peer, see RunLimits.check.
OPENED = (True, False, -inf)  # may still make its first step
AWAY = (False, False, -inf)


class Scene:
    """A run of made-up facts, each one second after the last unless it says more."""

    def __init__(self, maximum_downtime=60.0, max_env_failures=3, **facts):
        self.limits = RunLimits(maximum_downtime, max_env_failures)
        self.now = 1000.0
        self.facts = {
            "was_suspended": False,
            "last_failure": "it broke",
            "last_error": "",
            "num_servers": 2,
            "num_refusing": 0,
            "listener": "",
            **facts,
        }
        self.check()

    def check(self, after=1.0, failures=None, facts=None, **peers):
        """`failures`: numbers by peer; a peer is "steps", "delivers", or a tuple."""
        self.now += after
        words = {"steps": (True, False, self.now), "delivers": (True, True, self.now)}
        streams = {name: words.get(x, x) for name, x in peers.items()}
        failures = failures or {}
        self.limits.check(
            {
                **self.facts,
                **(facts or {}),
                "time": self.now,
                "peers": {
                    name: (*streams.get(name, AWAY), failures.get(name, 0))
                    for name in {**streams, **failures}
                },
            }
        )

    def ends(self, error, match, **arguments):
        with pytest.raises(error, match=match) as raised:
            self.check(**arguments)
        assert raised.type is error
        return str(raised.value)


TOO_OFTEN = "^more than 3 environments have raised within a minute. The last: it broke$"


# --- Without a stream -----------------------------------------------------------------


def test_no_connection_for_too_long():
    run = Scene(60.0, last_error="the server is lost")
    run.check(after=60)
    run.ends(TransportError, "^no connection for 60 s: the server is lost$", after=0.1)


def test_nobody_joins():
    run = Scene(0.25, listener="unix:/tmp/x", num_servers=0)
    words = "^no environment has joined at unix:/tmp/x for 0.25 s"
    run.ends(TransportError, f"{words}$")
    why = {"last_error": "a refusal"}
    run.ends(TransportError, f"{words}; the last error: a refusal$", facts=why)


def test_servers_are_dialled_at_least_once():
    run = Scene(0.0)
    run.check(after=600)
    run.ends(TransportError, "for 0 s: lost", facts={"last_error": "lost"})


def test_a_long_time():
    run = Scene(1234567.5, last_error="lost")
    run.ends(TransportError, "^no connection for 1234567.5 s: lost$", after=2e6)


def test_no_limit():
    run = Scene(inf, last_error="lost", listener="unix:/tmp/x")
    run.check(after=1e9)


def test_a_stream_counts_until_its_last_step():
    run = Scene(60.0, last_error="lost")
    run.check(after=100, a="steps")
    ended = run.now + 30
    run.check(after=40, a=(False, False, ended))
    run.check(after=50)  # 60 s after its end
    run.ends(TransportError, "no connection", after=0.1)


def test_a_stream_that_never_steps_counts_while_it_is_there():
    run = Scene(60.0, last_error="lost")
    run.check(after=100, a=OPENED)
    run.check(after=100, a=OPENED)
    run.ends(TransportError, "no connection", after=0.1)


def test_a_connection_that_is_not_open_does_not_count():
    run = Scene(60.0, last_error="lost")
    run.ends(TransportError, "no connection", after=61, a=AWAY)


def test_suspended_time_does_not_count():
    run = Scene(60.0, last_error="lost")
    run.check(after=1000, facts={"was_suspended": True})
    run.check(after=60)
    run.ends(TransportError, "no connection", after=0.1)


def test_the_time_before_the_run_does_not_count():
    limits = RunLimits(1.0, 3)
    run = Scene(1.0, last_error="lost")
    run.limits = limits  # made long ago
    run.check(after=1000)
    run.ends(TransportError, "no connection", after=1.1)


def test_a_stream_that_has_failed_as_often_as_it_may_counts():
    run = Scene(60.0, last_error="lost")
    run.check(after=61, failures={"a": 3}, a="steps")
    run.ends(TransportError, "no connection", after=61)


# --- Refusals -------------------------------------------------------------------------


def test_all_servers_refuse():
    run = Scene(last_error="a wrong token")
    run.check(facts={"num_refusing": 1}, b="steps")
    run.ends(RefusedError, "^a wrong token$", facts={"num_refusing": 2})


def test_environments_may_join_if_all_servers_refuse():
    run = Scene(last_error="a wrong token", listener="unix:/tmp/x")
    run.check(facts={"num_refusing": 2})
    run = Scene(num_servers=0, listener="unix:/tmp/x")
    run.check()


# --- Failures -------------------------------------------------------------------------


def test_the_first_failure_may_end_the_run():
    run = Scene(max_env_failures=0)
    run.check(a="delivers", b="delivers")
    text = {"last_failure": "Traceback: it broke"}
    failed = {"failures": {"a": 1}, "b": "delivers", "facts": text}
    run.ends(RuntimeError, "^Traceback: it broke$", **failed)


def test_a_single_server_fails_too_often():
    run = Scene()
    run.check(failures={"a": 3})
    run.ends(RuntimeError, TOO_OFTEN, failures={"a": 1})


def test_failures_are_forgotten_after_a_minute():
    run = Scene()
    run.check(failures={"a": 3}, a="steps")
    run.check(after=60, a="steps")
    run.check(failures={"a": 3}, a="steps")
    run.check(after=59, a="steps")
    run.ends(RuntimeError, TOO_OFTEN, failures={"a": 1})


def test_one_that_fails_ends_nobodys_run():
    run = Scene()
    for _ in range(100):
        run.check(failures={"a": 2}, a="steps", b="steps")
    # When the other goes, all count.
    run.ends(RuntimeError, TOO_OFTEN, a="steps")


def test_a_stream_of_the_one_that_fails_speaks_for_nobody():
    run = Scene()
    run.ends(RuntimeError, TOO_OFTEN, failures={"a": 4}, a="steps")


def test_a_stream_of_the_same_machine_speaks_by_its_rollouts():
    run = Scene(listener="unix:/tmp/x", num_servers=0)
    for _ in range(100):
        run.check(failures={"a": 2}, a="delivers")


def test_several_that_exceed_the_limit_end_nobodys_run():
    run = Scene()
    run.check(failures={"a": 4, "b": 5, "c": 6}, d="steps")


def test_the_worst_of_the_rest_does_not_count():
    run = Scene()
    run.check(failures={"a": 9, "b": 3, "c": 3}, d="steps")
    run.ends(RuntimeError, TOO_OFTEN, failures={"d": 1}, d="steps")


def test_failures_of_many_end_the_run():
    run = Scene()
    many = dict.fromkeys("bcdef", 1)  # the worst is one of them
    run.ends(RuntimeError, TOO_OFTEN, failures=many, a="delivers")


@pytest.mark.parametrize(("maximum_downtime", "seconds"), [(60.0, 15), (2.0, 2)])
def test_environments_that_join_have_time_to_come_back(maximum_downtime, seconds):
    run = Scene(maximum_downtime, listener="unix:/tmp/x", num_servers=0)
    run.check(failures={"a": 1}, a="steps")
    run.check(after=0.1, failures={"a": 3})
    run.check(after=seconds - 0.2)
    run.ends(RuntimeError, TOO_OFTEN, after=0.2)


def test_environments_that_come_back_save_the_run():
    run = Scene(listener="unix:/tmp/x", num_servers=0)
    run.check(a="steps", b="steps")
    run.check(failures={"a": 4})
    run.check(after=14, b="steps")
    run.check(after=100, b="steps")


def test_who_fails_too_often_does_not_keep_the_run_alive():
    """Nor do its steps delay the end."""
    run = Scene(20.0, listener="unix:/tmp/x", num_servers=0)
    run.check(failures={"a": 4}, b="steps")
    for _ in range(15):
        run.check(a="steps")
    run.ends(RuntimeError, TOO_OFTEN, a="steps")


def test_a_negative_limit():
    with pytest.raises(ValueError, match="max_env_failures must be at least 0, got -1"):
        RunLimits(60.0, -1)


# --- With real servers ---------------------------------------------------------------


def test_one_server_that_raises_again_and_again_ends_nobodys_run(tmp_path):
    addresses = [f"unix:{tmp_path}/{i}" for i in range(2)]
    with (
        ServerProcess("Failing", addresses[0]),
        ServerProcess("Coded", addresses[1]) as good,
        Run(addresses, act, initial_state(), max_env_failures=1) as run,
    ):
        while run.pool.stats()["num_env_failures"] < 4:
            next(iter(run.queue))
        good.kill()
        error = run.error()
    assert type(error) is RuntimeError
    assert "more than 1 environments have raised within a minute" in str(error)


def test_a_server_that_does_not_come_back(address):
    with (
        ServerProcess("Dying", address),
        Run([address], act, initial_state(), maximum_downtime_s=0.5) as run,
    ):
        error = run.error()
    assert type(error) is TransportError
    assert re.search(rf"no connection for 0.5 s.*{address}", str(error))


def test_a_server_that_says_nothing(tmp_path):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/silent")
        silent.listen()
        addresses = [f"unix:{tmp_path}/silent"]
        limits = {"step_timeout_s": 0.3, "maximum_downtime_s": 0.5}
        with Run(addresses, act, **limits) as run:
            error = run.error()
    assert type(error) is TransportError
    assert re.search("no connection for 0.5 s.*within the step timeout", str(error))


def test_a_server_that_always_hangs_does_not_keep_the_run_alive(address):
    release = threading.Event()

    class Hanging(servers.Counting):
        def step(self, action):
            release.wait(timeout=60)
            return super().step(action)

    server = Server(Hanging, address)
    server.start()
    limits = {"step_timeout_s": 0.3, "maximum_downtime_s": 0.7}
    try:
        with Run([address], zeros, **limits) as run:
            error = run.error()
        assert type(error) is TransportError
        assert re.search("no connection for 0.7 s.*within the step timeout", str(error))
    finally:
        release.set()
        server.stop()


def test_all_real_servers_refuse(tmp_path):
    addresses = [f"unix:{tmp_path}/{i}" for i in range(2)]
    with (
        ServerProcess("Counting", addresses[0]),
        ServerProcess("Counting", addresses[1]),
        Run(addresses, zeros, expected={"num_envs": 7}) as run,
    ):
        error = run.error()
    assert type(error) is RefusedError
    assert "7" in str(error)


def test_a_wrong_token_ends_the_run_at_once(address):
    server = Server(servers.Counting, address, security=Security(token="a-secret"))
    server.start()
    try:
        with Run([address], zeros) as run:
            error = run.error()
        assert type(error) is RefusedError
        assert "token is missing or wrong" in str(error)
        assert server.stats()["num_refused"] == 1
    finally:
        server.stop()
