"""Starts environment servers, and restarts them after a crash."""

import contextlib
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

from torchbeast.core import processes
from torchbeast.core.connection_flags import ServerError
from torchbeast.core.flags import Flags

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0  # servers that don't exit within this time are killed
START_SECONDS = 300.0  # time limit for a server's imports and its environments
HEALTHY_SECONDS = 10.0  # after this time since it was ready a crash no longer counts
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 10.0  # seconds before a restart
REPEAT_SECONDS = 60.0  # between equal log lines
SIGN_SECONDS = 5.0  # between two signs of life of a server
# Without a sign of life, a server is killed after this. If it was started together with
# the learner, its --actor_timeout counts if it is longer.
SILENT_SECONDS = 300.0


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
        self.serve, self.flags, self.addresses = serve, flags, list(addresses)
        self.context = mp.get_context("spawn")  # gRPC can't be forked
        self.guardian = processes.Guardian(STOP_SECONDS)
        count = len(self.addresses)
        self.processes: list[Any] = [None] * count
        self.pipes: list[Any] = [None] * count
        self.started = [0.0] * count  # times
        self.ready: list[float | None] = [None] * count  # since when
        self.due = [0.0] * count  # time of the restart, if there is no process
        self.crashes = [0] * count  # in a row, each before it was healthy
        self.restarts = 0
        self.ever_ready = False
        self.heard = [0.0] * count  # time of the last message
        self.watched = time.monotonic()
        self.silent_seconds = max(SILENT_SECONDS, getattr(flags, "actor_timeout", 0))
        self.said: dict[str, float] = {}  # "waiting" messages and when they were logged

    def start(self, should_stop: Callable[[], Any]) -> None:
        """Starts all servers, unless `should_stop` returns true before that."""
        for index in range(len(self.addresses)):
            if should_stop():
                break
            self._start(index, 0)

    def watch(self, timeout: float, wake_up: Sequence[Any]) -> None:
        """Waits for an event, and restarts dead servers.

        Args:
          timeout: maximal seconds to wait.
          wake_up: objects that end the wait when they are ready.

        Raises:
          ServerError: a server can't start, or crashes again and again.
        """
        now = time.monotonic()
        for index, process in enumerate(self.processes):
            if process is None:
                if now >= self.due[index]:
                    self.restarts += 1
                    self._start(index, self.restarts << 16)
                else:
                    timeout = min(timeout, self.due[index] - now)
        alive = [i for i, process in enumerate(self.processes) if process is not None]
        objects = list(wake_up)
        objects += [self.processes[i].sentinel for i in alive]
        objects += [self.pipes[i] for i in alive]
        connection.wait(objects, timeout)
        now = time.monotonic()
        if now - self.watched > self.silent_seconds / 2:  # all were suspended
            self.heard = [now] * len(self.heard)
        self.watched = now
        for index in alive:
            self._check(index)

    def _start(self, index: int, first_stream: int) -> None:
        self.pipes[index], child = self.context.Pipe(duplex=False)
        process = self.context.Process(
            target=self.serve,
            name=f"server-{index}",
            args=(self.flags, index, self.addresses[index], first_stream, child),
            daemon=True,
        )
        self.guardian.start(process)
        child.close()
        self.processes[index] = process
        self.started[index] = time.monotonic()
        self.ready[index] = None

    def _check(self, index: int) -> None:
        process, pipe = self.processes[index], self.pipes[index]
        now = time.monotonic()  # before it is ended, which may take seconds
        error = ""
        with contextlib.suppress(EOFError, OSError):
            while pipe.poll():
                kind, *rest = pipe.recv()
                self.heard[index] = now
                if kind == "alive":
                    continue
                if kind == "ready":
                    self.ready[index], self.ever_ready = time.monotonic(), True
                    self.addresses[index] = rest[0]  # keeps a port that was free
                    log.info("Server %d at %s: %s", index, *rest)
                elif kind == "waiting":
                    self._say_waiting(*rest)
                elif kind == "joined":
                    log.info("Server %d has joined the learner at %s.", index, *rest)
                    self.said.clear()
                elif kind == "refused":
                    self._raise(index, f"can't join: {rest[0]}")
                else:
                    (error,) = rest
                    break
        ready_at = self.ready[index]
        if ready_at is not None and now - self.heard[index] > self.silent_seconds:
            error = (
                f"it gave no sign of life for {self.silent_seconds:g} s. An "
                "environment may hang and hold Python's lock"
            )
        if error and not self.ever_ready:
            self._raise(index, f"cannot start: {error}")
        if process.is_alive() and not error:
            if ready_at is None and now - self.started[index] > START_SECONDS:
                self._raise(index, f"was not ready after {START_SECONDS:g} s")
            return
        self.guardian.end([process], STOP_SECONDS)
        how = (
            f"has failed: {error}"
            if error
            else f"has died, {processes.how_it_ended(process.exitcode)}"
        )
        healthy = ready_at is not None and now - ready_at > HEALTHY_SECONDS
        self.crashes[index] = 0 if healthy else self.crashes[index] + 1
        if self.crashes[index] > self.flags.max_restarts:
            self._raise(
                index,
                f"{how}. It is crash number {self.crashes[index]} in a row, each "
                f"before it was ready for {HEALTHY_SECONDS:g} s (--max_restarts "
                f"{self.flags.max_restarts})",
            )
        backoff = min(FIRST_BACKOFF * 2 ** self.crashes[index], LONGEST_BACKOFF)
        log.warning("Server %d %s; starting it again in %.1f s.", index, how, backoff)
        pipe.close()
        self.processes[index] = None
        self.due[index] = time.monotonic() + backoff

    def _say_waiting(self, why: str) -> None:
        """Logs the message once per minute, although every server sends it."""
        now = time.monotonic()
        if now - self.said.get(why, -REPEAT_SECONDS) >= REPEAT_SECONDS:
            self.said[why] = now
            log.info("Waiting for a learner at %s: %s", self.flags.join, why)

    def _raise(self, index: int, why: str) -> None:
        raise ServerError(f"environment server {index} {why}")

    def stop(self) -> None:
        """Ends all processes and their children, and removes their sockets."""
        alive = [process for process in self.processes if process is not None]
        for process in alive:
            process.terminate()
        self.guardian.end(alive, STOP_SECONDS)
        self.guardian.close()
        for address in self.addresses:
            kind, _, path = address.partition(":")
            if kind == "unix" and not self.flags.join:
                remove_dead_socket(path)


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
        """Starts a thread. It needs Python's lock, as all streams of a server do."""

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
