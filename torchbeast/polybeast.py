"""PolyBeast on one machine: environment servers and learner, started together.

    python -m torchbeast.polybeast --env PongNoFrameskip-v4

The servers are a process of their own with children (polybeast_env.py), the learner is
this one (polybeast_learner.py). Ctrl-C saves and ends both; so does the end of training
or the failure of either.
"""

from __future__ import annotations

if __name__ == "__main__":
    from torchbeast.core import processes

    processes.exit_on_stop_signals()  # the learner's imports take seconds

# Not the learner, and so not torch: the servers' processes import this file too.
import argparse
import multiprocessing as mp
import secrets
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchbeast import polybeast_env
from torchbeast.core import connection_flags, processes
from torchbeast.core.flags import FlagError, Flags

if TYPE_CHECKING:
    from torchbeast.core import resume


def make_parser() -> argparse.ArgumentParser:
    from torchbeast import polybeast_learner

    parser = polybeast_learner.make_parser()
    parser.description = "PolyBeast: IMPALA with environments in servers of their own."
    parser.set_defaults(
        num_servers=None, envs_per_actor=connection_flags.ENVS_PER_ACTOR
    )
    polybeast_env.add_server_flags(parser)
    # By default a name that no other run on this machine has.
    parser.set_defaults(pipes_basename=None)
    return parser


def resolve_layout(flags: Flags) -> Flags:
    from torchbeast import polybeast_learner

    for name in ("server_addresses", "bind", "listen", "join"):
        if name not in flags.typed:  # of a checkpoint, made with other scripts
            setattr(flags, name, None)
    if flags.server_addresses or flags.bind or flags.listen or flags.join:
        raise FlagError(
            "this starts servers of its own, on this machine. For others, start "
            "torchbeast.polybeast_env with --bind there and "
            "torchbeast.polybeast_learner with --server_addresses here; or that one "
            "with --listen, and the environments with --join"
        )
    if flags.pipes_basename is None:
        name = f"{connection_flags.PIPES_BASENAME}-{secrets.token_hex(4)}"
        flags.pipes_basename = name
    if flags.num_servers is None:
        flags.num_actors = flags.num_actors or connection_flags.NUM_SERVERS
        # A core can't do more than one process's work; more would only take memory.
        cores = flags.num_actors if flags.sync else processes.num_cpus()
        flags.num_servers = min(flags.num_actors, cores)
    polybeast_env.check(flags)
    return polybeast_learner.resolve_layout(flags)


def train(start: resume.Start) -> int:
    """Trains until flags.total_steps, or until a stop signal; see the learner's."""
    from torchbeast import polybeast_learner
    from torchbeast.core import resume

    flags = start.flags
    resume.announce_environment(flags, start.saved)
    # Not forked: gRPC could not be used in the child.
    context = mp.get_context("spawn")
    servers = context.Process(
        target=polybeast_env.run_for_learner, args=(flags,), name="servers"
    )
    try:
        with processes.starting_children():
            servers.start()
        return polybeast_learner.train(start, lambda: check_servers(servers))
    finally:
        if servers.pid is not None:
            servers.terminate()
            servers.join(2 * polybeast_env.SHUTDOWN_SECONDS)
            if servers.is_alive():
                servers.kill()
                servers.join()


def check_servers(servers: Any) -> None:
    """Raises ServerError if the servers are gone."""
    if not servers.is_alive():
        how = processes.how_it_ended(servers.exitcode)
        raise connection_flags.ServerError(f"the environment servers ended {how}")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 finished, 1 failed, 128 + n ended by signal n."""
    try:
        import libtorchbeast  # noqa: F401 # whether it is there
    except ImportError as error:
        sys.exit(str(error))  # which says what to do
    from torchbeast.core import flags as flags_lib
    from torchbeast.core import resume, script
    from torchbeast.evaluate import evaluate

    parser = make_parser()
    with script.reported() as outcome:
        if flags_lib.parse(parser, argv).mode == "train":
            with resume.begin(parser, argv, resolve_layout) as start:
                outcome.status = 0 if start.is_finished() else train(start)
        else:
            evaluate(parser, argv)
    return outcome.status


if __name__ == "__main__":
    processes.run_script(main)
