"""A Ray cluster, and the Ray actors of a run."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Sequence
from typing import Any

import ray
from ray import exceptions

from torchbeast.core import processes
from torchbeast.core.errors import UserError
from torchbeast.core.flags import Flags

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0


class Cluster:
    """The cluster at flags.ray_address, or a local one that ends with `close`.

    Raises:
      UserError: no cluster is there.
    """

    def __init__(self, flags: Flags) -> None:
        self.flags = flags
        self.actors: list[Any] = []
        self._is_ours = not ray.is_initialized()
        handlers = {n: signal.getsignal(n) for n in processes.handled_signals()}
        try:
            check_reachable(flags.ray_address)
            ray.init(
                address=flags.ray_address or "local",
                ignore_reinit_error=True,
                configure_logging=False,
                include_dashboard=False if flags.ray_address is None else None,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"no Ray cluster at --ray_address {flags.ray_address}: {error}"
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
        count = ", ".join(f"{n} ({nodes.count(n)})" for n in sorted(set(nodes)))
        log.info("Ray runs %d actors on %s.", len(nodes), count)

    def close(self) -> None:
        """Ends the actors, and Ray if it was started here."""
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
