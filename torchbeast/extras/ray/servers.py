"""PolyBeast's environment servers as Ray actors, on one machine or a cluster.

Each joins the learner, which listens. Ray places them and starts dead ones again. The
token and the certificates travel through Ray, so no machine needs these files.
"""

import contextlib
import logging
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import ray

from torchbeast.base.errors import FlagError, text_of
from torchbeast.extras.ray import cluster
from torchbeast.flags import Flags
from torchbeast.polybeast import serving
from torchbeast.polybeast.security import ServerError, make_private_folder, security
from torchbeast.polybeast.supervisor import RefusedForGood
from torchbeast.procs import children
from torchbeast.runs import start

log = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0  # before others replace environments that have raised
ALONE_SECONDS = 60.0  # a server that fails later is started again
FILES = ("tls_cert", "tls_key", "tls_ca", "token_file")


class EnvServer:
    """A Ray actor: the environments of one stream. `files` are contents, by flag."""

    def __init__(self, flags: Flags, index: int, files: dict[str, bytes]) -> None:
        os.nice(5)  # the learner has priority
        cluster.limit_steps(flags.actor_timeout)
        self.index = index
        # Files that only this process has, and that are on no disk.
        paths = {name: f"/proc/self/fd/{os.memfd_create(name)}" for name in files}
        for name, path in paths.items():
            Path(path).write_bytes(files[name])
        self.flags = flags.replace(**paths)

    def run(self) -> None:
        """Steps environments, and new ones after an error, until it is killed."""
        start.configure_logging()  # Ray prints it where the learner runs
        try:
            serving.try_environment(self.flags)
        except Exception as error:
            raise ServerError(text_of(error)) from None
        while True:
            client = serving.make_server(self.flags, self.index, self.flags.join)
            try:
                return serving.run_client(self.flags, client, log.info)
            except RefusedForGood:
                raise
            except ServerError as error:
                log.warning("New environments after: %s", error)
                time.sleep(PAUSE_SECONDS)


@contextlib.contextmanager
def ray_servers(flags: Flags) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Runs the environment servers of a run, one per stream, until the block ends.

    Yields the address at which the learner has to listen, and a function that raises
    UserError if a server can't make environments or can't join.
    """
    security(flags)  # raises before Ray starts
    context = multiprocessing.get_context("forkserver")
    with contextlib.closing(children.Children(context)) as group:
        child, (address, started) = cluster.start_caller(group, call_ray, flags)
        log.info("%s", started)
        yield address, child.receive


def call_ray(flags: Flags, pipe: connection.Connection) -> None:
    address = flags.listen or listening_address(flags)
    join = joined_address(address)
    joining = flags.replace(join=join, listen=None, **dict.fromkeys(FILES))
    files = server_files(flags)
    arguments = [(joining, i, files) for i in range(flags.num_actors)]
    limit = "connect_timeout", flags.connect_timeout
    servers, started = cluster.start_actors(EnvServer, arguments, *limit)
    running = [server.run.remote() for server in servers]
    pipe.send((address, started))
    began = time.monotonic()
    while not pipe.poll(1.0):  # until the learner closes it
        ray.put(None)  # Ray ends this process if the raylet has died
        for reference in ray.wait(running, timeout=0)[0]:
            index = running.index(reference)
            try:
                cluster.result(reference, f"environment server {index}")
            except cluster.ClusterError as error:
                # Later, one that can't go on, as on a bad machine, must not end others.
                if time.monotonic() - began < ALONE_SECONDS:
                    raise
                log.warning("%s\nIt starts again.", error)
                time.sleep(PAUSE_SECONDS)
                running[index] = servers[index].run.remote()


def joined_address(address: str) -> str:
    """The address at which others reach a learner that listens at `address`."""
    host, _, port = address.rpartition(":")
    if address.startswith("unix:"):
        return address
    if port == "0":
        raise FlagError(f"--listen {address}: name a port, which Ray's actors can know")
    if host not in ("", "0.0.0.0", "[::]", "*"):
        return address
    return f"{ray.util.get_node_ip_address()}:{port}"


def listening_address(flags: Flags) -> str:
    if not flags.ray_address:
        make_private_folder(flags.pipes_basename)
        return f"{flags.pipes_basename}.ray"
    host = ray.util.get_node_ip_address()
    with socket.create_server((host, 0)) as probe:
        return f"{host}:{probe.getsockname()[1]}"


def server_files(flags: Flags) -> dict[str, bytes]:
    """Contents of the files that a server needs, by flag."""
    paths = {name: getattr(flags, name) for name in FILES}
    if not flags.tls_ca:  # the learner asks for no certificates
        paths |= {"tls_ca": flags.tls_cert, "tls_cert": None, "tls_key": None}
    return {name: Path(path).read_bytes() for name, path in paths.items() if path}
