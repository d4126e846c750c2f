"""Starts environment servers, and restarts them after a crash."""

import contextlib
import dataclasses
import logging
import multiprocessing as mp
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

from torchbeast.base.seldom import Seldom
from torchbeast.procs import children
from torchbeast.remote.security import ServerError
from torchbeast.runs.flagset import Flags

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0  # servers that don't exit within this time are killed
START_SECONDS = 300.0  # time limit for a server's imports and its environments
HEALTHY_SECONDS = 10.0  # uptime after which a crash starts the count anew
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 10.0  # seconds before a restart
REPEAT_SECONDS = 60.0  # between equal log lines
SIGN_SECONDS = 5.0  # between two signs of life of a server
# Without a sign of life, a server is killed after this. If it was started together with
# the learner, its --actor_timeout counts if it is longer.
SILENT_SECONDS = 300.0


@dataclasses.dataclass
class Server:
    """The state of one server. Times are those of time.monotonic."""

    index: int
    address: str
    child: children.Child | None = None  # None until its next start
    started: float = 0.0
    ready: float | None = None  # None: not yet
    heard: float = 0.0  # the last message
    due: float = 0.0  # the next start, if there is no process
    crashes: int = 0  # in a row, each before it was healthy


class Servers:
    """The server processes. One thread at a time.

    Args:
      serve: the main function of a server process, see polybeast_env.py. Once it is
        ready, it gives a sign of life every SIGN_SECONDS.
      addresses: one per server.
    """

    def __init__(
        self, serve: Callable[..., None], flags: Flags, addresses: Sequence[str]
    ) -> None:
        self.serve, self.flags = serve, flags
        self.servers = [Server(i, address) for i, address in enumerate(addresses)]
        # Not forked: gRPC can't be.
        self.group = children.Children(mp.get_context("spawn"), STOP_SECONDS)
        self.restarts = 0
        self.ever_ready = False
        self.watched = time.monotonic()
        self.silent_seconds = max(SILENT_SECONDS, getattr(flags, "actor_timeout", 0))
        self.is_new = Seldom(REPEAT_SECONDS)  # "waiting" messages

    def start(self, should_stop: Callable[[], Any]) -> None:
        """Starts all servers, unless `should_stop` returns true before that."""
        for server in self.servers:
            if should_stop():
                break
            self._start(server, 0)

    def watch(self, timeout: float, wake_up: Sequence[Any]) -> None:
        """Waits for an event, and restarts dead servers.

        Args:
          timeout: maximal seconds to wait.
          wake_up: objects that end the wait when they are ready.

        Raises:
          ServerError: a server can't start, or crashes again and again.
        """
        now = time.monotonic()
        for server in self.servers:
            if server.child is None:
                if now >= server.due:
                    self.restarts += 1
                    # Each start has 65,536 numbers for its streams: none repeats.
                    self._start(server, self.restarts << 16)
                else:
                    timeout = min(timeout, server.due - now)
        children.wait(self.group.alive, timeout, wake_up)
        now = time.monotonic()
        if now - self.watched > self.silent_seconds / 2:  # all were suspended
            for server in self.servers:
                server.heard = now
        self.watched = now
        for server in self.servers:
            if server.child:
                self._check(server, server.child)

    def _start(self, server: Server, first_stream: int) -> None:
        arguments = (self.flags, server.index, server.address, first_stream)
        # The end of its pipe is a request to end.
        server.child = self.group.start(
            f"server {server.index}", self.serve, *arguments
        )
        server.started, server.ready = time.monotonic(), None

    def _check(self, server: Server, child: children.Child) -> None:
        now = time.monotonic()  # before it is ended, which may take seconds
        error = self._take_messages(server, child, now)
        if server.ready is not None and now - server.heard > self.silent_seconds:
            error = (
                f"it gave no sign of life for {self.silent_seconds:g} s. An "
                "environment may hang and hold Python's lock"
            )
        if error and not self.ever_ready:
            raise failure(server, f"cannot start: {error}")
        if child.process.is_alive() and not error:
            if server.ready is None and now - server.started > START_SECONDS:
                raise failure(server, f"was not ready after {START_SECONDS:g} s")
            return
        self.group.end(STOP_SECONDS, [child])
        how = f"has failed: {error}" if error else f"has {child.how_it_died()}"
        healthy = server.ready is not None and now - server.ready > HEALTHY_SECONDS
        server.crashes = 0 if healthy else server.crashes + 1
        if server.crashes > self.flags.max_restarts:
            raise failure(
                server,
                f"{how}: crash number {server.crashes} in a row, each less than "
                f"{HEALTHY_SECONDS:g} s after the server was ready (--max_restarts "
                f"{self.flags.max_restarts})",
            )
        doublings = min(server.crashes, 10)  # more would be above the longest
        backoff = min(FIRST_BACKOFF * 2**doublings, LONGEST_BACKOFF)
        log.warning(
            "Server %d %s; starting it again in %.1f s.", server.index, how, backoff
        )
        child.pipe.close()
        server.child, server.due = None, time.monotonic() + backoff

    def _take_messages(self, server: Server, child: children.Child, now: float) -> str:
        """Reads what the server has sent. Returns its error, or ""."""
        with contextlib.suppress(children.ProcessError):  # dead: see _check
            while message := child.receive():
                kind, *rest = message
                server.heard = now
                if kind == "ready":
                    server.ready, self.ever_ready = time.monotonic(), True
                    server.address = rest[0]  # keeps a port that was free
                    log.info("Server %d at %s: %s", server.index, *rest)
                elif kind == "waiting":
                    if self.is_new(*rest):  # every server sends it
                        log.info(
                            "Waiting for a learner at %s: %s", self.flags.join, *rest
                        )
                elif kind == "joined":
                    log.info(
                        "Server %d has joined the learner at %s.", server.index, *rest
                    )
                    self.is_new = Seldom(REPEAT_SECONDS)
                elif kind == "refused":
                    raise failure(server, f"can't join: {rest[0]}")
                elif kind == "error":
                    return rest[0]
        return ""  # "alive" says nothing more

    def stop(self) -> None:
        """Ends all processes and their children, and removes their sockets."""
        for child in self.group.alive:
            child.pipe.close()
            child.process.terminate()
        self.group.end(STOP_SECONDS)
        self.group.close()
        for server in self.servers:
            kind, _, path = server.address.partition(":")
            if kind == "unix" and not self.flags.join:
                remove_dead_socket(path)


def failure(server: Server, why: str) -> ServerError:
    return ServerError(f"environment server {server.index} {why}")


class SharedPipe:
    """A server's pipe to its supervisor. Thread-safe."""

    def __init__(self, pipe: connection.Connection) -> None:
        self.pipe = pipe
        self.lock = threading.Lock()

    def send(self, kind: str, *rest: str) -> None:
        # The send fails if the supervisor has exited.
        with self.lock, contextlib.suppress(OSError):
            self.pipe.send((kind, *rest))

    def give_signs_of_life(self, every: float = SIGN_SECONDS) -> None:
        """Starts a thread that sends "alive".

        If an environment holds Python's lock for long, the messages stop.
        """

        def work() -> None:
            while True:
                time.sleep(every)
                self.send("alive")

        threading.Thread(target=work, daemon=True).start()


def remove_dead_socket(path: str) -> None:
    """Removes the socket of a killed server; keeps other files and live sockets."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
