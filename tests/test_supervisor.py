"""Restarts of environment servers: real processes with a main function of the test."""

import argparse
import contextlib
import os
import time

import pytest

from torchbeast.core import supervisor
from torchbeast.core.connection_flags import ServerError


def dies_before_it_is_ready(flags, index, address, first_stream, pipe):
    time.sleep(flags.seconds)
    os._exit(3)


def dies_when_it_is_ready(flags, index, address, first_stream, pipe):
    pipe.send(("ready", address, "a server"))
    time.sleep(flags.seconds)
    os._exit(3)


@pytest.mark.parametrize(
    ("serve", "seconds", "healthy", "gives_up"),
    [
        (dies_before_it_is_ready, 0.8, 0.4, True),  # however long its start takes
        (dies_when_it_is_ready, 0.0, 60.0, True),
        (dies_when_it_is_ready, 3.0, 0.4, False),
    ],
)
def test_servers_that_crash_again_and_again(
    monkeypatch, serve, seconds, healthy, gives_up
):
    monkeypatch.setattr(supervisor, "HEALTHY_SECONDS", healthy)
    flags = argparse.Namespace(max_restarts=1, seconds=seconds, join=None)
    servers = supervisor.Servers(serve, flags, ["127.0.0.1:1"])
    crashes = (
        pytest.raises(ServerError, match="crash number 2 in a row")
        if gives_up
        else contextlib.nullcontext()
    )
    servers.start(lambda: False)
    try:
        deadline = time.monotonic() + 60
        with crashes:
            while servers.restarts < 3 and time.monotonic() < deadline:
                servers.watch(0.2, [])
        assert servers.restarts == (1 if gives_up else 3)
    finally:
        servers.stop()
