"""PolyBeast's environment servers: processes that step environments for a learner.

    python -m torchbeast.polybeast_env --env PongNoFrameskip-v4 --num_servers 4
    python -m torchbeast.polybeast_env --bind 0.0.0.0:5000 --tls_cert ... --tls_key ...
    python -m torchbeast.polybeast_env --join learner:5000 --tls_ca ...

Server i listens at PIPES_BASENAME.i, or, with --bind HOST:PORT, at HOST:PORT+i. Each
stream that a learner opens gets --envs_per_actor new environments: one stream in the
server's main thread, further ones in threads of their own. With --join each server has
one stream to a learner that listens, and they end when its run is complete. Dead
servers are restarted. This loads no PyTorch.
"""

import contextlib
import multiprocessing as mp
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

from torchbeast.base import parts
from torchbeast.base.errors import FlagError
from torchbeast.base.flag import FlagParser
from torchbeast.flags import Atari, Environment, Flags
from torchbeast.polybeast import security
from torchbeast.polybeast.flags import Connection, OfServers, Servers
from torchbeast.polybeast.native import require_native
from torchbeast.polybeast.serving import serve
from torchbeast.polybeast.supervisor import Finished, Supervisor
from torchbeast.runs import flagset, start


def addresses(flags: Flags) -> list[str]:
    """The address of each server; with --join, of the learner that it connects to.

    Paths are absolute, because environments may change the working directory.
    """
    address = flags.join or flags.pipes_basename
    if address.startswith("unix:"):
        address = f"unix:{os.path.abspath(address.removeprefix('unix:'))}"
    if flags.join:
        return [address] * flags.num_servers
    if not flags.bind:
        return [f"{address}.{i}" for i in range(flags.num_servers)]
    host, _, port = flags.bind.rpartition(":")
    if not host or not port.isdigit() or int(port) + flags.num_servers > 65536:
        raise FlagError(
            f"--bind must be HOST:PORT, with {flags.num_servers} ports from PORT on, "
            f"got {flags.bind!r}"
        )
    first = int(port)  # 0: each server gets a free port
    return [f"{host}:{first + i if first else 0}" for i in range(flags.num_servers)]


def make_parser() -> FlagParser:
    metrics = parts.optional("metrics")
    optional = [metrics.Flags] if metrics else []
    groups = (OfServers, *optional, Environment, Atari, Servers, Connection)
    return FlagParser("PolyBeast's environment servers.", groups, {})


def run(flags: Flags, until: Sequence[Any] = ()) -> int:
    """Serves until one of the sentinels `until` is ready; then returns 0.

    With --join also until the learner has completed its run.
    Raises ServerError if a server can't start, or crashes again and again.
    """
    if flags.bind and flags.join:
        raise FlagError("--bind waits for learners, --join connects to one: give one")
    security.security(flags)  # raises before a process is started
    if not (flags.bind or flags.join):
        security.make_private_folder(flags.pipes_basename)
    with contextlib.suppress(Finished), contextlib.ExitStack() as stack:
        servers = Supervisor(serve, flags, addresses(flags))
        stack.callback(servers.stop)
        if getattr(flags, "metrics_port", 0):
            endpoint = parts.optional("metrics").Endpoint(flags, servers)
            stack.callback(endpoint.close)
        while not connection.wait(until, 0):
            servers.watch(1.0, until)
    return 0


def run_for_learner(flags: Flags) -> None:
    """The main function of torchbeast.polybeast's child process, until SIGTERM."""
    # A Ctrl-C or the end of a terminal also gets here, but the learner reacts to it.
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGINT, signal.SIGHUP])
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun signals whole process groups
        os.setpgid(0, 0)
    learner = mp.parent_process()
    assert learner is not None

    def serve() -> int:
        if flags.suppress_logs:
            start.print_warnings_only()
        with contextlib.suppress(KeyboardInterrupt):  # the end of the run
            return run(flags, [learner.sentinel])
        return 128 + signal.SIGTERM

    sys.exit(start.guarded(serve))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 128 + n ended by signal n, 1 failed."""
    flags = flagset.parse(make_parser(), argv).freeze()
    require_native()
    return start.guarded(lambda: run(flags))
