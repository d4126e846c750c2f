"""PolyBeast's environment servers as Ray actors, on one machine or a cluster.

Each joins the learner, which listens. Ray places them and starts dead ones again. The
token and the certificates travel through Ray, so no machine needs these files.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import socket
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path

import ray

from torchbeast.base.errors import FlagError
from torchbeast.on_ray import cluster
from torchbeast.procs import children
from torchbeast.remote.security import make_private_folder, security
from torchbeast.runs.flagset import Flags

log = logging.getLogger(__name__)

# The system gives others to Ray's processes, so that a port which is free now is still
# free when the learner listens.
PORTS = range(20_000, 32_768)
FILES = ("tls_cert", "tls_key", "tls_ca", "token_file")


class EnvServer:
    """A Ray actor: the environments of one stream.

    Args:
      serve: serving.serve_under_ray.
      flags: of the run; `join` is the learner's address.
      files: contents of the files in FILES, by flag.
    """

    def __init__(
        self,
        serve: Callable[[Flags, int], None],
        flags: Flags,
        index: int,
        files: dict[str, bytes],
    ) -> None:
        os.nice(5)  # the learner has priority
        self.serve, self.index = serve, index
        self.flags = flags.replace(
            **{name: memory_file(name, content) for name, content in files.items()}
        )

    def node(self) -> str:
        """The address of the machine it runs on."""
        return ray.util.get_node_ip_address()

    def run(self) -> None:
        """Steps environments for the learner, until this actor is killed."""
        self.serve(self.flags, self.index)


def memory_file(name: str, content: bytes) -> str:
    """The path of a new file that only this process has, and that is on no disk."""
    number = os.memfd_create(name)
    with os.fdopen(os.dup(number), "wb") as file:
        file.write(content)
    return f"/proc/self/fd/{number}"


class RayServers:
    """The environment servers of a run, one per stream.

    Args:
      serve: serving.serve_under_ray.

    Attributes:
      address: the learner has to listen here.

    Raises:
      UserError: no cluster is at flags.ray_address, or it has no room for them.
    """

    def __init__(self, serve: Callable[[Flags, int], None], flags: Flags) -> None:
        security(flags)  # raises before Ray starts
        self._group = children.Children(multiprocessing.get_context("forkserver"))
        try:
            caller = cluster.start_caller(self._group, call_ray, flags, serve)
            self._child, (self.address, started) = caller
        except BaseException:
            self.close()
            raise
        log.info("%s", started)

    def check(self) -> None:
        """Raises UserError if a server can't make environments or can't join."""
        self._child.receive()

    def close(self) -> None:
        """Ends the servers, and Ray if it was started here."""
        self._group.close()


def call_ray(
    flags: Flags, serve: Callable[[Flags, int], None], pipe: connection.Connection
) -> None:
    """The main function of the process that calls Ray."""
    address = flags.listen or listening_address(flags)
    joining = flags.replace(join=address, listen=None, **dict.fromkeys(FILES))
    files = server_files(flags)
    arguments = [(serve, joining, i, files) for i in range(flags.num_actors)]
    limit = "connect_timeout", flags.connect_timeout
    servers, started = cluster.start_actors(EnvServer, arguments, *limit)
    running = [server.run.remote() for server in servers]
    pipe.send((address, started))
    while not pipe.poll(1.0):  # until the learner closes it
        ray.put(None)  # Ray ends this process if the raylet has died
        for reference in ray.wait(running, timeout=0)[0]:
            who = f"environment server {running.index(reference)}"
            cluster.result(reference, who)


def listening_address(flags: Flags) -> str:
    """A free address for the learner: on a cluster, a port of this machine."""
    if not flags.ray_address:
        make_private_folder(flags.pipes_basename)
        return f"{flags.pipes_basename}.ray"
    host = ray.util.get_node_ip_address()
    for port in random.SystemRandom().sample(PORTS, 1000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((host, port))
            return f"{host}:{port}"
    raise FlagError(f"no port of {host} is free: give --listen {host}:PORT")


def server_files(flags: Flags) -> dict[str, bytes]:
    """Contents of the files that a server needs, by flag."""
    paths = {name: getattr(flags, name) for name in FILES}
    if not flags.tls_ca:  # the learner asks for no certificates
        paths |= {"tls_ca": flags.tls_cert, "tls_cert": None, "tls_key": None}
    return {name: Path(path).read_bytes() for name, path in paths.items() if path}
