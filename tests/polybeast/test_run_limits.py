"""When peers end a run: RunLimits over made-up facts, and pools with real servers."""

from math import inf

import pytest
from libtorchbeast_limits import EnvironmentsFailed, RunLimits

from libtorchbeast import RefusedError, TransportError

# Streams of a peer, see RunLimits.check.
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


def test_servers_are_dialled_at_least_once():
    run = Scene(0.0)
    run.check(after=600)
    run.ends(TransportError, "for 0 s: lost", facts={"last_error": "lost"})


def test_a_stream_counts_until_its_last_step():
    run = Scene(60.0, last_error="lost")
    run.check(after=100, a="steps")
    ended = run.now + 30
    run.check(after=40, a=(False, False, ended))
    run.check(after=50)  # 60 s after its end
    run.ends(TransportError, "no connection", after=0.1)


def test_suspended_time_does_not_count():
    run = Scene(60.0, last_error="lost")
    run.check(after=1000, facts={"was_suspended": True})
    run.check(after=60)
    run.ends(TransportError, "no connection", after=0.1)


def test_a_stream_that_has_failed_as_often_as_it_may_counts():
    run = Scene(60.0, last_error="lost")
    run.check(after=61, failures={"a": 3}, a="steps")
    run.ends(TransportError, "no connection", after=61)


# --- Refusals -------------------------------------------------------------------------


def test_all_servers_refuse():
    run = Scene(last_error="a wrong token")
    run.check(facts={"num_refusing": 1}, b="steps")
    run.ends(RefusedError, "^a wrong token$", facts={"num_refusing": 2})


# --- Failures -------------------------------------------------------------------------


def test_failures_are_forgotten_after_a_minute():
    run = Scene()
    run.check(failures={"a": 3}, a="steps")
    run.check(after=60, a="steps")
    run.check(failures={"a": 3}, a="steps")
    run.check(after=59, a="steps")
    run.ends(EnvironmentsFailed, TOO_OFTEN, failures={"a": 1})


def test_one_that_fails_ends_nobodys_run():
    run = Scene()
    for _ in range(100):
        run.check(failures={"a": 2}, a="steps", b="steps")
    # When the other goes, all count.
    run.ends(EnvironmentsFailed, TOO_OFTEN, a="steps")


def test_several_that_exceed_the_limit_end_nobodys_run():
    run = Scene()
    run.check(failures={"a": 4, "b": 5, "c": 6}, d="steps")


def test_the_worst_of_the_rest_does_not_count():
    run = Scene()
    run.check(failures={"a": 9, "b": 3, "c": 3}, d="steps")
    run.ends(EnvironmentsFailed, TOO_OFTEN, failures={"d": 1}, d="steps")


def test_failures_of_many_end_the_run():
    run = Scene()
    many = dict.fromkeys("bcdef", 1)  # the worst is one of them
    run.ends(EnvironmentsFailed, TOO_OFTEN, failures=many, a="delivers")


@pytest.mark.parametrize(("maximum_downtime", "seconds"), [(60.0, 15), (2.0, 2)])
def test_environments_that_join_have_time_to_come_back(maximum_downtime, seconds):
    run = Scene(maximum_downtime, listener="unix:/tmp/x", num_servers=0)
    run.check(failures={"a": 1}, a="steps")
    run.check(after=0.1, failures={"a": 3})
    run.check(after=seconds - 0.2)
    run.ends(EnvironmentsFailed, TOO_OFTEN, after=0.2)


def test_who_fails_too_often_does_not_keep_the_run_alive():
    """Nor do its steps delay the end."""
    run = Scene(20.0, listener="unix:/tmp/x", num_servers=0)
    run.check(failures={"a": 4}, b="steps")
    for _ in range(15):
        run.check(a="steps")
    run.ends(EnvironmentsFailed, TOO_OFTEN, a="steps")
