"""PolyBeast on one machine: starts environment servers and learner together.

    python -m torchbeast.polybeast --env PongNoFrameskip-v4

The learner runs in this process (polybeast_learner.py), the servers in child processes
(polybeast_env.py). Ctrl-C saves and ends both. If one of them ends or fails, the other
ends, too.
"""

from __future__ import annotations

# The learner, and with it torch, is imported late: server processes import this file.
import multiprocessing as mp
import os
import secrets
from collections.abc import Sequence
from typing import Any

from torchbeast import flags as declared_flags
from torchbeast.base import parts
from torchbeast.base.errors import FlagError
from torchbeast.base.flag import FlagParser
from torchbeast.base.hardware import num_cpus
from torchbeast.flags import Flags
from torchbeast.polybeast import env as polybeast_env
from torchbeast.polybeast import flags as own_flags
from torchbeast.polybeast import security, supervisor
from torchbeast.procs import children
from torchbeast.runs.start import Start, run_script

NUM_SERVERS = own_flags.Connection.declared()["num_servers"].default


def make_parser() -> FlagParser:
    from torchbeast.model import CHOICES

    own = (own_flags.PolyBeast, own_flags.Connection, own_flags.Servers)
    return FlagParser(
        "PolyBeast: IMPALA with environments in server processes.",
        (*declared_flags.TRAINING, *own, *parts.groups()),
        CHOICES,
        num_actors=None,
        num_servers=None,
        pipes_basename=None,  # a new name for each run
    )


def uses_ray(flags: Flags) -> bool:
    return getattr(flags, "launcher", "") == "ray"


def resolve_layout(flags: Flags) -> Flags:
    from torchbeast.polybeast import learner as polybeast_learner

    is_ray = uses_ray(flags)
    own = {"listen"} if is_ray else set()
    foreign = {"server_addresses", "bind", "listen", "join"} - own
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
        name = f"{own_flags.PIPES_BASENAME}-{secrets.token_hex(4)}"
        flags.pipes_basename = name
    if flags.num_servers is None or is_ray:
        flags.num_actors = flags.num_actors or NUM_SERVERS
        one_each = flags.sync or is_ray
        # More server processes than cores would only take memory.
        most = flags.num_actors if one_each else num_cpus()
        flags.num_servers = min(flags.num_actors, most)
    return polybeast_learner.resolve_layout(flags)


def train(start: Start) -> int:
    """Trains until flags.total_steps or a stop signal. Returns the exit status."""
    from torchbeast.base import ranks
    from torchbeast.polybeast import learner as polybeast_learner

    if ranks.rank():  # each learner has servers of its own
        name = f"{start.flags.pipes_basename}-{ranks.rank()}"
        start = start._replace(flags=start.flags.replace(pipes_basename=name))
    flags = start.flags
    if uses_ray(flags):
        from torchbeast.extras.ray.servers import ray_servers  # optional

        with ray_servers(flags) as (address, check):
            return polybeast_learner.train(start, check, listen=address)
    # Not forked, because gRPC does not work in a forked process.
    context = mp.get_context("spawn")
    servers = context.Process(
        target=polybeast_env.run_for_learner,
        args=(flags.replace(metrics_port=0),),  # the learner's
        name="servers",
    )
    try:
        with children.starting_children():
            servers.start()
        return polybeast_learner.train(start, lambda: are_starting(servers, flags))
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
    return not any(
        os.path.exists(address.removeprefix("unix:"))
        for address in polybeast_env.addresses(flags)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 finished, 1 failed, 128 + n ended by signal n."""
    from torchbeast.play.evaluate import evaluate
    from torchbeast.polybeast.evaluate import find_player

    return run_script(
        make_parser(), argv, resolve_layout, train, lambda x: evaluate(x, find_player)
    )
