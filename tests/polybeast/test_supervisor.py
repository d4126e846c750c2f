"""Restarts of environment servers: real processes with a main function of the test."""

import argparse
import contextlib
import fcntl
import os
import re
import socket
import time

import pytest

from torchbeast.polybeast import supervisor
from torchbeast.polybeast.security import ServerError


def dies_before_it_is_ready(flags, index, address, pipe):
    time.sleep(flags.seconds)
    os._exit(3)


def dies_when_it_is_ready(flags, index, address, pipe):
    pipe.send(("ready", address, "a server"))
    time.sleep(flags.seconds)
    os._exit(3)


def asks_for_a_free_port(flags, index, address, pipe):
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        pipe.send(("ready", f"127.0.0.1:{server.getsockname()[1]}", "a server"))
        time.sleep(0.5)
    os._exit(3)


def is_ready(flags, index, address, pipe):
    pipe.send(("ready", address, "a server"))
    time.sleep(1000)


@pytest.mark.parametrize("another", [False, True])
def test_the_socket_of_another_server_stays(tmp_path, caplog, another):
    """It may listen there when ours has ended; then it has the lock."""
    path, lock = tmp_path / "server", tmp_path / "server.lock"
    flags = argparse.Namespace(max_restarts=1, join=None, actor_timeout=1)
    with lock.open("w") as file, socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        servers = supervisor.Supervisor(is_ready, flags, [f"unix:{path}"])
        try:
            watch_until(servers, lambda: servers.ever_ready)
            if another:
                fcntl.flock(file, fcntl.LOCK_EX)
        finally:
            servers.stop()
    assert path.exists() == lock.exists() == another


def watch_until(servers, is_done):
    end = time.monotonic() + 60
    while not is_done() and time.monotonic() < end:
        servers.watch(0.2, [])


def restarts_of(servers):
    return servers.servers[0].starts - 1


def test_a_restarted_server_has_the_same_port(monkeypatch, caplog):
    monkeypatch.setattr(supervisor, "HEALTHY_SECONDS", 0.1)
    flags = argparse.Namespace(max_restarts=1, join=None, actor_timeout=1)
    servers = supervisor.Supervisor(asks_for_a_free_port, flags, ["127.0.0.1:0"])
    try:
        with caplog.at_level("INFO"):
            watch_until(servers, lambda: caplog.text.count("a server") == 3)
    finally:
        servers.stop()
    ports = re.findall(r"at 127\.0\.0\.1:(\d+): a server", caplog.text)
    assert len(ports) == 3
    assert len(set(ports)) == 1


def never_gets_ready(flags, index, address, pipe):
    time.sleep(1000)


def test_a_server_that_never_gets_ready(monkeypatch):
    monkeypatch.setattr(supervisor, "START_SECONDS", 2.0)
    monkeypatch.setattr(supervisor, "STOP_SECONDS", 0.1)
    flags = argparse.Namespace(max_restarts=5, join=None, actor_timeout=1)
    servers = supervisor.Supervisor(never_gets_ready, flags, ["127.0.0.1:1"])
    words = "cannot start: it is not ready after 2 s.*raise --actor_timeout"
    try:
        with pytest.raises(ServerError, match=words):
            watch_until(servers, lambda: False)
    finally:
        servers.stop()


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
    flags = argparse.Namespace(
        max_restarts=1, seconds=seconds, join=None, actor_timeout=1
    )
    servers = supervisor.Supervisor(serve, flags, ["127.0.0.1:1"])
    crashes = (
        pytest.raises(ServerError, match="crash number 2 in a row")
        if gives_up
        else contextlib.nullcontext()
    )
    try:
        with crashes:
            watch_until(servers, lambda: restarts_of(servers) == 3)
        assert restarts_of(servers) == (1 if gives_up else 3)
    finally:
        servers.stop()
