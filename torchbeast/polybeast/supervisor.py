"""Starts environment servers, and restarts them after a crash."""

import contextlib
import dataclasses
import fcntl
import logging
import multiprocessing as mp
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from torchbeast.base.errors import UserError
from torchbeast.base.seldom import Seldom
from torchbeast.flags import Flags
from torchbeast.polybeast.security import ServerError
from torchbeast.procs import children

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0  # servers that don't exit within this time are killed
HEALTHY_SECONDS = 10.0  # uptime after which a crash starts the count anew
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 10.0  # seconds before a restart
REPEAT_SECONDS = 60.0  # between equal log lines
SIGN_SECONDS = 5.0  # between two signs of life of a server
# A server that sends nothing for so long is killed: it does not get ready, or it gives
# no sign of life. A longer --actor_timeout counts instead.
SILENT_SECONDS = 300.0


class RefusedForGood(ServerError):
    """The learner refuses, and trying again would not help."""


@dataclasses.dataclass
class Server:
    """The state of one server. Times are those of time.monotonic."""

    index: int
    address: str
    child: children.Child | None = None  # None until its next start
    ready: float | None = None  # None: not yet
    heard: float = 0.0  # the last message, or the start
    due: float = 0.0  # the next start, if there is no process
    starts: int = 0
    crashes: int = 0  # in a row, each before it was healthy


class Supervisor:
    """The server processes, one per address. One thread at a time.

    Args:
      serve: the main function of a server process, see serving.py. It sends
        ("ready", address, description), ("log", text), signs of life after it is ready,
        and the ServerError that ends it.
    """

    def __init__(
        self, serve: Callable[..., None], flags: Flags, addresses: Sequence[str]
    ) -> None:
        self.serve, self.flags = serve, flags
        self.servers = [Server(i, address) for i, address in enumerate(addresses)]
        # Not forked: gRPC can't be.
        self.group = children.Children(mp.get_context("spawn"), STOP_SECONDS)
        self.ever_ready = False
        self.sockets: set[str] = set()  # of servers that have been ready
        self.watched = time.monotonic()
        self.silent_seconds = max(SILENT_SECONDS, flags.actor_timeout)
        self.is_new = Seldom(REPEAT_SECONDS)  # servers that join send equal texts

    def watch(self, timeout: float, wake_up: Sequence[Any]) -> None:
        """Starts servers, also again after they have died, and waits for an event.

        Waits for at most `timeout` seconds, or until one of `wake_up` is ready. Raises
        ServerError if a server can't start, or crashes again and again.
        """
        now = time.monotonic()
        for server in self.servers:
            if server.child is None and now >= server.due:
                self._start(server)
            elif server.child is None:
                timeout = min(timeout, server.due - now)
        children.wait(self.group.alive, timeout, wake_up)
        now = time.monotonic()
        all_were_suspended = now - self.watched > self.silent_seconds / 2
        self.watched = now
        for server in self.servers:
            if all_were_suspended:
                server.heard = now
            if server.child:
                self._check(server, server.child)

    def _start(self, server: Server) -> None:
        arguments = (self.flags, server.index, server.address)
        server.heard, server.ready = time.monotonic(), None
        server.starts += 1
        try:
            server.child = self.group.start(
                f"server {server.index}", self.serve, *arguments
            )
        except children.ProcessError as error:
            if not self.ever_ready:
                raise
            self._start_later(server, f"can't be started: {error}")

    def _check(self, server: Server, child: children.Child) -> None:
        now = time.monotonic()  # before it is ended, which may take seconds
        who = f"environment server {server.index}"
        try:
            while message := child.receive():
                server.heard = now
                self._take(server, *message)
            if now - server.heard <= self.silent_seconds:
                return
            children.print_stack(child)
            why = "An environment may hang and hold Python's lock"
            if not server.ready:
                why = "If its environments need that long, raise --actor_timeout"
            limit = f"{self.silent_seconds:g} s"
            raise ServerError(f"it gave no sign of life for {limit}. {why}")
        except children.ProcessError as error:
            how = f"has died: {error}"
        except RefusedForGood as error:
            raise ServerError(f"{who} {error}") from error
        except UserError as error:
            if not self.ever_ready:
                raise ServerError(f"{who} cannot start: {error}") from error
            how = f"has failed: {error}"
        self.group.end(STOP_SECONDS, [child])
        child.pipe.close()
        if server.ready is not None and now - server.ready > HEALTHY_SECONDS:
            server.crashes = -1
        self._start_later(server, how)

    def _start_later(self, server: Server, how: str) -> None:
        server.crashes += 1
        who = f"environment server {server.index}"
        if server.crashes > self.flags.max_restarts:
            raise ServerError(
                f"{who} {how}: crash number {server.crashes} in a row (--max_restarts "
                f"{self.flags.max_restarts})"
            )
        doublings = min(server.crashes, 10)  # more would be above the longest
        backoff = min(FIRST_BACKOFF * 2**doublings, LONGEST_BACKOFF)
        log.warning(
            "Server %d %s; starting it again in %.1f s.", server.index, how, backoff
        )
        server.child, server.due = None, time.monotonic() + backoff

    def _take(self, server: Server, kind: str, *rest: str) -> None:
        if kind == "ready":
            server.ready, self.ever_ready = time.monotonic(), True
            server.address = rest[0]  # keeps a port that was free
            if server.address.startswith("unix:") and not self.flags.join:
                self.sockets.add(server.address.removeprefix("unix:"))
            log.info("Server %d at %s: %s", server.index, *rest)
        elif kind == "log" and self.is_new(*rest):
            log.info("%s", *rest)

    # For --metrics_port, in its thread:

    def liveness(self) -> str | None:
        seconds = time.monotonic() - self.watched
        hangs = seconds > SILENT_SECONDS
        return f"the supervisor hangs for {seconds:.0f} s" if hangs else None

    def readiness(self) -> str | None:
        down = [str(x.index) for x in self.servers if not (x.child and x.ready)]
        return f"not ready: server {', '.join(down)}" if down else None

    def collect(self) -> Iterable[Any]:
        from torchbeast.extras import metrics

        ready = sum(bool(x.child and x.ready) for x in self.servers)
        yield metrics.family("servers_ready", ready)
        yield metrics.family("server_starts", sum(x.starts for x in self.servers))

    def stop(self) -> None:
        """Ends all processes and their children, and removes their sockets."""
        for child in self.group.alive:
            child.pipe.close()  # like SIGTERM, which environments may ignore
            child.process.terminate()
        self.group.end(STOP_SECONDS)
        self.group.close()
        for path in self.sockets:
            # A server that exits removes its own, and another may listen there by now.
            with contextlib.suppress(OSError), open(path + ".lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                Path(path).unlink(missing_ok=True)
                os.unlink(lock.name)


class SharedPipe:
    """A server's pipe to its supervisor. Thread-safe."""

    def __init__(self, pipe: connection.Connection) -> None:
        self.pipe = pipe
        self.lock = threading.Lock()

    def send(self, message: Any) -> None:
        # The send fails if the supervisor has exited.
        with self.lock, contextlib.suppress(OSError):
            self.pipe.send(message)

    def give_signs_of_life(self, every: float = SIGN_SECONDS) -> None:
        """Starts a thread that sends them.

        If an environment holds Python's lock for long, they stop.
        """

        def work() -> None:
            while True:
                time.sleep(every)
                self.send(("alive",))

        threading.Thread(target=work, daemon=True).start()
