"""Starts environment servers, and restarts them after a crash."""

import dataclasses
import logging
import multiprocessing as mp
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from torchbeast.base.errors import UserError
from torchbeast.flags import Flags
from torchbeast.polybeast import security
from torchbeast.polybeast.security import ServerError
from torchbeast.procs import children

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0  # servers that don't exit within this time are killed
HEALTHY_SECONDS = 10.0  # uptime after which a crash starts the count anew
LONGEST_BACKOFF = 10.0  # seconds before a restart
REPEAT_SECONDS = 60.0  # between equal log lines
LIMIT = 300.0  # seconds to get ready, or for a step; at least --actor_timeout
BEAT_SECONDS = 2.0  # between two signs of life


class Finished(Exception):
    """The learner has completed its run, so the servers that joined it end."""


class RefusedForGood(ServerError):
    """The learner refuses, and trying again would not help."""


class Seldom:
    """A call returns True once per key in so many seconds; digits make no new key."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._times: dict[str, float] = {}

    def __call__(self, key: str = "") -> bool:
        key, now = re.sub(r"\d+", "", key), time.monotonic()
        is_due = now - self._times.get(key, float("-inf")) >= self.seconds
        if is_due:
            self._times[key] = now
        return is_due


@dataclasses.dataclass
class Server:
    """The state of one server. Times are those of time.monotonic."""

    index: int
    address: str
    child: children.Child | None = None  # None until its next start
    is_ready: bool = False
    since: float = 0.0  # when it got ready, or its start
    due: float = 0.0  # the next start, if there is no process
    starts: int = 0
    crashes: int = 0  # in a row, each before it was healthy


class Supervisor:
    """The server processes, one per address. One thread at a time.

    A process calls `serve`, see serving.py. It sends ("ready", address, description),
    ("log", text), the ServerError that ends it, and, unless its environment hangs,
    ("beat", streams) every BEAT_SECONDS.
    """

    def __init__(
        self, serve: Callable[..., None], flags: Flags, addresses: Sequence[str]
    ) -> None:
        self.serve, self.flags = serve, flags
        self.servers = [Server(i, address) for i, address in enumerate(addresses)]
        # Not forked: gRPC can't be.
        self.group = children.Children(mp.get_context("spawn"), STOP_SECONDS)
        self.limit = max(LIMIT, flags.actor_timeout)
        self.beats = children.StepWatch(self.limit)
        self.ever_ready = False
        self.watched = time.monotonic()
        self.is_new = Seldom(REPEAT_SECONDS)  # servers that join send equal texts

    def watch(self, timeout: float, wake_up: Sequence[Any]) -> None:
        """Starts servers, also again after they have died, and waits for an event.

        Waits for at most `timeout` seconds, or until one of `wake_up` is ready. Raises
        ServerError if a server can't start, or crashes again and again.
        """
        self.watched = now = time.monotonic()
        for server in self.servers:
            if server.child is None and now >= server.due:
                self._start(server)
            elif server.child is None:
                timeout = min(timeout, server.due - now)
        children.wait(self.group.alive, timeout, wake_up)
        for server in self.servers:
            if server.child:
                self._check(server, server.child)

    def _start(self, server: Server) -> None:
        server.since, server.is_ready = time.monotonic(), False
        server.starts += 1
        who, arguments = f"server {server.index}", (server.index, server.address)
        server.child = self.group.start(who, self.serve, self.flags, *arguments)
        server.child.steps = 0

    def _check(self, server: Server, child: children.Child) -> None:
        now = time.monotonic()  # before it is ended, which may take seconds
        who = f"environment server {server.index}"
        try:
            while message := child.receive():
                self._take(server, *message)
            if server.is_ready:
                self.beats.check([child])
            elif now - server.since > self.limit:
                child.print_stack()
                raise ServerError(
                    f"it is not ready after {self.limit:g} s. If its environments need "
                    "that long, raise --actor_timeout"
                )
            return
        except children.ProcessError as error:
            how = f"is lost: {error}"
        except RefusedForGood as error:
            raise ServerError(f"{who} {error}") from error
        except UserError as error:
            if not self.ever_ready:
                raise ServerError(f"{who} cannot start: {error}") from error
            how = f"has failed: {error}"
        child.pipe.close()  # like SIGTERM, if it is still there
        self.group.end(STOP_SECONDS, [child])
        self.beats.restart(child)  # forgets it
        if server.is_ready and now - server.since > HEALTHY_SECONDS:
            server.crashes = -1
        self._start_later(server, how)

    def _start_later(self, server: Server, how: str) -> None:
        server.crashes += 1
        most = self.flags.max_restarts
        if server.crashes > most:
            raise ServerError(
                f"environment server {server.index} {how}: crash number "
                f"{server.crashes} in a row (--max_restarts {most})"
            )
        seconds = min(0.1 * 2 ** min(server.crashes, 10), LONGEST_BACKOFF)
        text = "Server %d %s; starting it again in %.1f s."
        log.warning(text, server.index, how, seconds)
        server.child, server.due = None, time.monotonic() + seconds

    def _take(self, server: Server, kind: str, *rest: Any) -> None:
        if kind == "beat":
            assert server.child
            server.child.steps += 1
            protocol, _, path = server.address.partition(":")
            is_gone = protocol == "unix" and not os.path.exists(path)
            if server.is_ready and rest == (0,) and is_gone:  # streams don't need it
                raise ServerError(f"its socket {path} is gone")
        elif kind == "ready":
            server.since, server.is_ready = time.monotonic(), True
            self.ever_ready = True
            server.address = rest[0]  # keeps a port that was free
            log.info("Server %d at %s: %s", server.index, *rest)
        elif kind == "finished":
            log.info("The learner has completed its run.")
            raise Finished
        elif self.is_new(*rest):
            log.info("%s", *rest)

    # For --metrics_port, in its thread:

    def liveness(self) -> str | None:
        seconds = time.monotonic() - self.watched
        return f"the supervisor hangs for {seconds:.0f} s" if seconds > 300 else None

    def readiness(self) -> str | None:
        down = [str(x.index) for x in self.servers if not (x.child and x.is_ready)]
        return f"not ready: server {', '.join(down)}" if down else None

    def numbers(self) -> dict[str, int]:
        ready = sum(bool(x.child and x.is_ready) for x in self.servers)
        starts = sum(x.starts for x in self.servers)
        return {"servers_ready": ready, "server_starts": starts}

    def stop(self) -> None:
        """Ends all processes and their children, and removes their sockets."""
        for child in self.group.alive:
            child.pipe.close()  # like SIGTERM, which environments may ignore
            child.process.terminate()
        self.group.end(STOP_SECONDS)
        self.group.close()
        for server in () if self.flags.join else self.servers:
            # A server that exits removes its own, and another may listen there by now.
            security.remove_socket(server.address.removeprefix("unix:"))
