"""PolyBeast on one machine: starts environment servers and learner together.

    python -m torchbeast.polybeast --env PongNoFrameskip-v4

The learner runs in this process (learner.py), the servers in child processes (env.py).
Ctrl-C saves and ends both. If one of them ends or fails, the other ends, too.
"""

import multiprocessing as mp
import os
import secrets
from collections.abc import Sequence
from typing import Any

from torchbeast import flags as declared_flags
from torchbeast.base import parts, ranks
from torchbeast.base.errors import FlagError
from torchbeast.base.flag import FlagParser
from torchbeast.base.hardware import num_cpus
from torchbeast.flags import Flags
from torchbeast.model import CHOICES
from torchbeast.polybeast import env, learner, security, supervisor
from torchbeast.polybeast.flags import PIPES_BASENAME, Connection, PolyBeast, Servers
from torchbeast.procs import children
from torchbeast.runs.start import Start, run_script

NUM_SERVERS = Connection.declared()["num_servers"].default


def make_parser() -> FlagParser:
    of_both = *declared_flags.TRAINING, PolyBeast, Connection, Servers
    text = "PolyBeast: IMPALA with environments in server processes."
    found = dict.fromkeys(("num_actors", "num_servers", "pipes_basename"))
    return FlagParser(text, (*of_both, *parts.groups()), CHOICES, **found)


def resolve_layout(flags: Flags) -> Flags:
    is_ray = getattr(flags, "launcher", "") == "ray"
    foreign = {"server_addresses", "bind", "join"} | (set() if is_ray else {"listen"})
    for name in foreign - flags.typed:  # saved by another script
        setattr(flags, name, None)
    if any(getattr(flags, name) for name in foreign):
        raise FlagError(
            "torchbeast.polybeast starts its servers here. For other machines, start "
            "torchbeast.polybeast_learner and torchbeast.polybeast_env apart"
        )
    if is_ray:
        from torchbeast.extras import ray  # optional

        ray.check(flags)
    if flags.pipes_basename is None:
        flags.pipes_basename = f"{PIPES_BASENAME}-{secrets.token_hex(4)}"
    if flags.num_servers is None or is_ray:
        flags.num_actors = flags.num_actors or NUM_SERVERS
        # More server processes than cores would only take memory.
        most = flags.num_actors if flags.sync or is_ray else num_cpus()
        flags.num_servers = min(flags.num_actors, most)
    return learner.resolve_layout(flags)


def train(start: Start) -> int:
    """Trains until flags.total_steps or a stop signal. Returns the exit status."""
    if ranks.rank():  # each learner has servers of its own
        name = f"{start.flags.pipes_basename}-{ranks.rank()}"
        start = start._replace(flags=start.flags.replace(pipes_basename=name))
    flags = start.flags
    if getattr(flags, "launcher", "") == "ray":
        from torchbeast.extras.ray.servers import ray_servers  # optional

        with ray_servers(flags) as (address, check):
            return learner.train(start, check, listen=address)
    # Not forked, because gRPC does not work in a forked process. The learner has the
    # port of --metrics_port.
    spawn, theirs = mp.get_context("spawn"), flags.replace(metrics_port=0)
    servers = spawn.Process(target=env.run_for_learner, args=(theirs,), name="servers")
    try:
        with children.starting_children():
            servers.start()
        return learner.train(start, lambda: are_starting(servers, flags))
    finally:
        if servers.pid is not None:
            servers.terminate()
            servers.join(2 * supervisor.STOP_SECONDS)
            servers.kill()  # unless it has ended
            servers.join()


def are_starting(servers: Any, flags: Flags) -> bool:
    """Whether none serves yet. Raises ServerError if the servers have exited."""
    if not servers.is_alive():
        how = children.how_it_ended(servers.exitcode)
        raise security.ServerError(f"the environment servers ended {how}")
    paths = [address.removeprefix("unix:") for address in env.addresses(flags)]
    return not any(map(os.path.exists, paths))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 finished, 1 failed, 128 + n ended by signal n."""
    return run_script(make_parser(), argv, resolve_layout, train, learner.find_player)
