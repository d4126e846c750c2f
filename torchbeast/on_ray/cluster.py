"""A Ray cluster, and the Ray actors of a run."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

import psutil
import ray
from ray import exceptions

from torchbeast.base.errors import UserError
from torchbeast.procs import processes
from torchbeast.runs.flagset import Flags

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0


class ClusterError(UserError, RuntimeError):
    """One of Ray's processes has died, or a Ray actor has raised."""


class Link:
    """A connection to one of Ray's processes, to notice at once that it has died.

    If Ray itself notices, at its next call, it ends this process without saving.
    """

    def __init__(self, name: str, host: str, port: int) -> None:
        self.name, self.address = name, (host, port)
        self._connect(CONNECT_SECONDS)

    def _connect(self, seconds: float) -> None:
        self.socket = socket.create_connection(self.address, seconds)
        self.socket.setblocking(False)

    def fileno(self) -> int:
        return self.socket.fileno()

    def is_alive(self) -> bool:
        try:
            while self.socket.recv(4096):
                pass
            # It closes connections that have asked for nothing. Is it there?
            self.socket.close()
            self._connect(1.0)
        except BlockingIOError:  # it has said nothing
            pass
        except OSError:
            return False
        return True


class Cluster:
    """The cluster at flags.ray_address, or a local one that ends with `close`.

    Attributes:
      links: to Ray's processes. Readable if one has died, see check.

    Raises:
      UserError: no cluster is there.
    """

    def __init__(self, flags: Flags) -> None:
        self.flags = flags
        self.actors: list[Any] = []
        self.links: list[Link] = []
        self._is_ours = not ray.is_initialized()
        self._ours: set[psutil.Process] = set()  # Ray's processes that end with us
        self._others = set(psutil.Process().children(recursive=True))
        handlers = {n: signal.getsignal(n) for n in processes.handled_signals()}
        try:
            check_reachable(flags.ray_address)
            ray.init(
                address=flags.ray_address or "local",
                ignore_reinit_error=True,
                configure_logging=False,
                include_dashboard=False if flags.ray_address is None else None,
            )
            own_id = ray.get_runtime_context().get_node_id()
            (node,) = [node for node in ray.nodes() if node["NodeID"] == own_id]
            host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
            self.links = [
                Link("raylet", node["NodeManagerAddress"], node["NodeManagerPort"]),
                Link("GCS", host.strip("[]"), int(port)),
            ]
        except (Exception, SystemExit) as error:  # of many types
            place = f"no Ray cluster at --ray_address {flags.ray_address}"
            raise UserError(
                f"{place if flags.ray_address else 'Ray can not be started'}: {error}"
            ) from error
        finally:  # Ray replaces that of SIGTERM
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def start(self, kind: type, arguments: Sequence[tuple], limit: str) -> None:
        """Starts Ray actors, one per tuple of arguments. Each needs a CPU.

        Args:
          kind: their class. Its method node() returns the address of its machine.
          limit: the flag with the time limit until all have started, in seconds.

        Raises:
          UserError: the cluster has no room for them, or one can't start.
        """
        seconds = getattr(self.flags, limit)
        # Ray starts a dead one again, on any machine with room, and repeats its call.
        remote: Any = ray.remote(
            num_cpus=1,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy="SPREAD",
        )(kind)
        self.actors = [remote.remote(*words) for words in arguments]
        places = [actor.node.remote() for actor in self.actors]
        try:
            nodes = ray.get(places, timeout=seconds)
        except exceptions.GetTimeoutError:
            cpus = ray.cluster_resources().get("CPU", 0)
            raise UserError(
                f"Ray did not start {len(arguments)} actors within {seconds:g} s. Each "
                f"needs a CPU, and the cluster has {cpus:g}: lower --num_actors, add "
                f"machines or raise --{limit}"
            ) from None
        except exceptions.RayError as error:
            raise UserError(f"a Ray actor failed to start:\n{error}") from error
        if self._is_ours and not self.flags.ray_address:
            started = psutil.Process().children(recursive=True)
            self._ours = set(started) - self._others
        count = ", ".join(f"{n} ({nodes.count(n)})" for n in sorted(set(nodes)))
        log.info("Ray runs %d actors on %s.", len(nodes), count)

    def check(self) -> None:
        """Call it before Ray's functions.

        Raises:
          ClusterError: one of Ray's processes has died.
        """
        for link in self.links:
            if not link.is_alive():
                host, port = link.address
                raise ClusterError(
                    f"Ray's process {link.name} at {host}:{port} has died (out of "
                    "memory? see dmesg and the logs in /tmp/ray/session_latest/logs). "
                    "Start the same command again to resume"
                )

    def get(self, reference: Any, who: str) -> Any:
        """The result of an actor's call.

        Raises:
          ClusterError: the call raised, or `who` is lost.
        """
        try:
            return ray.get(reference)
        except exceptions.RayTaskError as error:
            raise ClusterError(f"{who} failed:\n{error.cause}") from error
        except exceptions.RayError as error:
            self.check()
            raise ClusterError(f"{who} is lost: {error}") from error

    def close(self) -> None:
        """Ends the actors, and Ray if it was started here."""
        try:
            self.check()
        except ClusterError:
            # Ray's functions would end this process, or wait for a minute. Without
            # ray.shutdown, its threads crash while Python ends.
            if self._is_ours:
                atexit.register(os._exit, 1)
            for process in self._ours:
                with contextlib.suppress(psutil.Error):  # it has ended
                    for child in process.children(recursive=True):
                        child.kill()
                    process.kill()
            return
        if self._is_ours:  # the actors end with the connection
            ray.shutdown()
            return
        for actor in self.actors:
            ray.kill(actor)


def check_reachable(address: str | None) -> None:
    """Raises OSError if nothing listens at HOST:PORT. Ray would wait for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
