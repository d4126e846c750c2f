"""Restarts of environment servers: real processes with a main function of the test."""

import argparse
import collections
import contextlib
import fcntl
import os
import re
import socket
import threading
import time

import pytest
from servers import Run, play_first

from libtorchbeast import Listener
from torchbeast.polybeast import env as polybeast_env
from torchbeast.polybeast import serving, supervisor
from torchbeast.polybeast.security import ServerError
from torchbeast.runs import flagset


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


def watch_for(servers, seconds):
    end = time.monotonic() + seconds
    watch_until(servers, lambda: time.monotonic() > end)


def restarts_of(servers):
    return servers.servers[0].starts - 1


def test_a_restarted_server_has_the_same_port(monkeypatch, caplog):
    """It has lived for a while, so its second crash does not count as one in a row."""
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
    monkeypatch.setattr(supervisor, "LIMIT", 2.0)
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
    ("way", "fault"), [("join", "hang"), ("pipes_basename", "hold_the_lock")]
)
def test_a_server_that_hangs_is_replaced(way, fault, tmp_path, monkeypatch, caplog):
    """Also one whose socket is gone, but not while a learner is connected."""
    file, place = tmp_path / "fault", f"unix:{tmp_path}/socket"
    monkeypatch.setenv("FAULT_FILE", str(file))
    words = ["--env=faulty:Environment", f"--{way}={place}"]
    words += ["--num_servers=1", "--envs_per_actor=1"]
    flags = flagset.parse(polybeast_env.make_parser(), words).freeze()
    addresses = polybeast_env.addresses(flags)
    listener = Listener(place) if flags.join else None
    servers = supervisor.Supervisor(serving.serve, flags, addresses)
    servers.beats.timeout = 5.0
    with contextlib.ExitStack() as stack:
        stack.callback(servers.stop)
        if listener:
            listener.start()
            stack.callback(listener.close)
        watch_until(servers, lambda: servers.ever_ready)
        dialled = [] if listener else addresses
        limits = {"step_timeout_s": 1, "maximum_downtime_s": 300}
        run = Run(dialled, play_first, listener=listener, **limits)
        with run:
            watch_for(servers, 7)  # nobody takes rollouts, so it waits for actions
            rollouts = threading.Thread(target=collections.deque, args=(run.queue, 0))
            rollouts.start()
            file.write_text("step_slowly")
            watch_for(servers, 7)
            assert restarts_of(servers) == 0, caplog.text
            file.write_text(fault)
            watch_until(servers, lambda: restarts_of(servers))
            assert "made no step for 5 s" in caplog.text
            file.unlink()
            steps = run.pool.count()
            watch_until(servers, lambda: run.pool.count() > steps + 50)
            assert run.pool.count() > steps + 50, caplog.text
            if not listener:
                os.unlink(addresses[0].removeprefix("unix:"))
                watch_for(servers, 2 * supervisor.BEAT_SECONDS)
                assert restarts_of(servers) == 1
        rollouts.join()
        if not listener:
            watch_until(servers, lambda: restarts_of(servers) == 2)
            assert "socket.0 is gone" in caplog.text


@pytest.mark.parametrize(
    ("serve", "seconds", "healthy"),
    [
        (dies_before_it_is_ready, 0.8, 0.4),  # however long its start takes
        (dies_when_it_is_ready, 0.0, 60.0),
    ],
)
def test_servers_that_crash_again_and_again(monkeypatch, serve, seconds, healthy):
    monkeypatch.setattr(supervisor, "HEALTHY_SECONDS", healthy)
    flags = argparse.Namespace(
        max_restarts=1, seconds=seconds, join=None, actor_timeout=1
    )
    servers = supervisor.Supervisor(serve, flags, ["127.0.0.1:1"])
    try:
        with pytest.raises(ServerError, match="crash number 2 in a row"):
            watch_until(servers, lambda: restarts_of(servers) == 3)
        assert restarts_of(servers) == 1
    finally:
        servers.stop()
