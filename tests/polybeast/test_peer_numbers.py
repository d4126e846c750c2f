"""PolyBeast's servers and learner, started apart: numbers, places, lost unrolls."""

import contextlib
import itertools
import os
import pathlib
import random
import signal
import socket
import threading

import pytest
import test_actor_pool
from certificates import Certificates
from servers import CodedVector, ServerProcess
from servers import Run as PoolRun
from watched_runs import END_SECONDS, wait_until
from watched_servers import E, T, assert_whole_updates

import libtorchbeast
from torchbeast.polybeast import env as polybeast_env

# --- Numbers and places ---------------------------------------------------------------


def test_fewer_actors_than_servers(serve, learn, pipes):
    servers = serve(pipes_basename=pipes, num_servers=2)
    run = learn(
        pipes_basename=pipes, num_servers=2, num_actors=1, total_steps=20 * 2 * E * T
    )
    run.wait_for_end(0, 2 * END_SECONDS)
    assert "1 streams of 3 environments" in run.console
    assert len(assert_whole_updates(run)) == 20
    servers.process.send_signal(signal.SIGTERM)
    servers.wait_for_end(143)


def places(tmp_path):
    """Paths where no socket can be, and words of the message."""
    if os.geteuid() == 0:  # who may write to every folder but this
        closed = pathlib.Path("/proc")
    else:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
    (tmp_path / "file").touch()
    (tmp_path / "taken.0").touch()
    return {
        "directory": (tmp_path / "nowhere" / "pipe", "No such file or directory"),
        "file": (tmp_path / "file" / "pipe", "Not a directory"),
        "closed": (closed / "pipe", ""),
        "long": (tmp_path / ("x" * 110), "bytes, and the system allows 107"),
        "taken": (tmp_path / "taken", "not a socket"),
    }


@pytest.mark.parametrize("name", ["directory", "file", "closed", "long", "taken"])
def test_servers_cannot_listen(serve, tmp_path, name):
    path, words = places(tmp_path)[name]
    servers = serve(pipes_basename=f"unix:{path}")
    servers.wait_for_end(1)
    assert servers.console.count("[ERROR ") == 1
    assert "environment server 0 cannot start" in servers.console
    assert f"{path}.0" in servers.console
    assert words in servers.console
    assert "Traceback" not in servers.console


def bad_flags(tmp_path):
    """Flags of polybeast_env that can't work, and words of the message."""
    certificates = Certificates(tmp_path)
    certificates.make("one", "IP:127.0.0.1")
    certificates.make("other", "IP:127.0.0.1")
    one, other = certificates.identity("one"), certificates.identity("other")
    missing, empty, text = (tmp_path / x for x in ("missing", "empty", "text"))
    binary, half, spaced = (tmp_path / x for x in ("binary", "half", "spaced"))
    spaced.write_text("a secret")
    empty.touch()
    text.write_text("not a certificate")
    half.write_text("-----BEGIN CERTIFICATE-----\nhalf")
    binary.write_bytes(b"\xff\xfe")
    here = "127.0.0.1:0"
    return [
        ({"bind": "127.0.0.1:http"}, "--bind must be HOST:PORT"),
        ({"bind": "127.0.0.1"}, "--bind must be HOST:PORT"),
        ({"bind": "127.0.0.1:99999"}, "--bind must be HOST:PORT"),
        ({"bind": "127.0.0.1:65534", "num_servers": 3}, "with 3 ports from PORT on"),
        ({"bind": ""}, "--bind is empty"),
        ({"join": ""}, "--join is empty"),
        ({"bind": here, "tls_cert": missing, "tls_key": missing}, "No such file"),
        ({"bind": here, "tls_cert": text, "tls_key": text}, f"--tls_cert {text}"),
        ({"bind": here, **one, "tls_cert": half}, f"--tls_cert {half}"),
        ({"bind": here, **one, "tls_key": other["tls_key"]}, "key values mismatch"),
        ({"bind": here, "tls_cert": one["tls_cert"]}, "--tls_key None: No such file"),
        ({"bind": here, "tls_key": one["tls_key"]}, "--tls_cert None"),
        ({"bind": here, **one, "tls_ca": text}, "--tls_ca"),
        (
            {"join": here, "tls_ca": missing},
            f"--tls_ca {missing}: No such file",
        ),
        ({"token_file": missing}, f"--token_file {missing}: No such file"),
        ({"token_file": empty}, "is empty"),
        ({"token_file": spaced}, f"--token_file {spaced} may have printable ASCII"),
        ({"token_file": binary}, "is not text in UTF-8"),
        ({"token_file": tmp_path}, "Is a directory"),
    ]


def test_flags_of_servers_that_cannot_work(tmp_path, caplog):
    """They are refused before a process is started, in one line."""
    for flags, words in bad_flags(tmp_path):
        caplog.clear()
        argv = [f"--{name}={value}" for name, value in flags.items()]
        assert polybeast_env.main(argv) == 1
        (record,) = caplog.records
        message = record.getMessage()
        assert message.startswith(("FlagError: ", "FileError: "))
        assert words in message
        assert "\n" not in message
        assert not record.exc_info


def test_flags_that_a_server_process_refuses(serve, tmp_path):
    """Or another program, or two servers of one port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            ({"bind": f"127.0.0.1:{port}"}, "Address already in use"),
            ({"bind": "0.0.0.0:0"}, "can be reached from other machines"),
            ({"join": "127.0.0.1"}, "no port. Allowed are unix:"),
            ({"join": f"unix:{tmp_path}/{'x' * 110}"}, "and the system allows 107"),
            ({"pipes_basename": f"{tmp_path}/pipe"}, "no port. Allowed are unix:"),
        ]
        started = [serve(**flags) for flags, _ in cases]
        for servers, (_, words) in zip(started, cases, strict=True):
            servers.wait_for_end(1)
            (line,) = servers.console.splitlines()
            assert "[ERROR " in line
            assert words in line


def test_servers_that_cannot_listen_remove_nothing(serve, learn, pipes, tmp_path):
    """Neither a file nor the socket of other servers."""
    file = tmp_path / "file.0"
    file.write_text("precious")
    serve(pipes_basename=f"unix:{tmp_path}/file").wait_for_end(1)
    first = serve(pipes_basename=pipes)
    (address,) = first.addresses()
    second = serve(pipes_basename=pipes)
    second.wait_for_end(1)
    assert "another server listens there" in second.console
    try:
        assert file.read_text() == "precious"
        assert libtorchbeast.probe(address)["num_envs"] == E
    finally:
        first.process.send_signal(signal.SIGTERM)
        first.wait_for_end(143)


def test_polybeast_cannot_listen(learn, tmp_path):
    """If the connection can't work, both sides end with one message."""
    run = learn(
        module="torchbeast.polybeast", pipes_basename=f"unix:{tmp_path}/nowhere/pipe"
    )
    run.wait_for_end(1)
    assert "No such file or directory" in run.console
    assert not run.path.exists()


# --- No partial unroll ----------------------------------------------------------------


class Proxy:
    """Between pool and server: cuts connection n after so many bytes of the server.

    limits: for each connection; the later ones are not cut.
    """

    def __init__(self, target, limits):
        self.target = target
        self.limits = iter(limits)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:{1}".format(*self.listener.getsockname())
        self.cuts = 0
        self.sockets = []
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                self.sockets.append(client)
                try:
                    server = socket.create_connection(self.target)
                except ConnectionRefusedError:
                    client.shutdown(socket.SHUT_RDWR)
                    continue
                self.sockets.append(server)
                limit = next(self.limits, None)
                for pump in ((client, server, None), (server, client, limit)):
                    thread = threading.Thread(target=self.pump, args=pump)
                    self.threads.append(thread)
                    thread.start()

    def pump(self, source, sink, limit):
        with contextlib.suppress(OSError):
            left = limit
            while data := source.recv(4096 if left is None else min(left, 4096)):
                sink.sendall(data)
                if left is not None:
                    left -= len(data)
                    if left == 0:
                        self.cuts += 1
                        break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.threads[0].join()
        for s in self.sockets:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        for s in self.sockets:
            s.close()


def end_server(server, run, rollouts, followers):
    """Kills the run and checks what was learned until then."""
    server.kill()
    server.stop()
    while run.pool.stats()["num_connected"] or run.queue.size():
        if run.queue.size():
            test_actor_pool.check([next(rollouts)], followers)


def assert_every_step_counted(stats):
    """Each is one of a whole rollout or was dropped, if all streams were lost."""
    learned = stats["num_rollouts"] * T * CodedVector.num_envs
    assert stats["num_steps"] == learned + stats["num_dropped_steps"]


def test_a_connection_cut_at_any_byte():
    """In the handshake, between messages, and in the middle of one."""
    draw = random.Random(1)
    limits = [
        draw.choice([draw.randrange(1, 900), draw.randrange(20_000)]) for _ in range(24)
    ]
    followers = {}
    with (
        ServerProcess("CodedVector", "127.0.0.1:0") as server,
        Proxy(("127.0.0.1", int(server.address.split(":")[1])), limits) as proxy,
        PoolRun(
            [proxy.address] * 2,
            test_actor_pool.act,
            test_actor_pool.initial_state(),
            batch=CodedVector.num_envs,
        ) as run,
    ):
        rollouts = iter(run.queue)
        while proxy.cuts < len(limits):
            test_actor_pool.check([next(rollouts)], followers)
        test_actor_pool.check(itertools.islice(rollouts, 20), followers)
        end_server(server, run, rollouts, followers)
    stats = run.pool.stats()
    assert_every_step_counted(stats)
    assert 0 < stats["num_dropped_steps"] <= (len(limits) + 2) * T * E
    # Where a cut came before the first row, there was nothing to lose.
    assert 5 < stats["num_reconnects"] <= len(limits)


def test_a_server_killed_at_any_moment(tmp_path):
    address = f"unix:{tmp_path}/socket"
    with PoolRun(
        [address] * 2,
        test_actor_pool.act,
        test_actor_pool.initial_state(),
        batch=CodedVector.num_envs,
    ) as run:
        rollouts = iter(run.queue)
        for kills in range(5):
            server = ServerProcess("CodedVector", address)
            followers = {}  # a new process numbers its environments anew
            wait_until(lambda: run.pool.stats()["num_connected"] == 2, "both are back")
            test_actor_pool.check(itertools.islice(rollouts, 10 + kills), followers)
            end_server(server, run, rollouts, followers)
    stats = run.pool.stats()
    assert stats["num_reconnects"] == 2 * 4
    assert_every_step_counted(stats)
