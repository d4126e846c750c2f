"""Calls of Ray, and the child process that makes them.

Ray ends a process that calls it, at once and without an exception, if its connection to
the raylet breaks or the GCS is gone for long. So the learner calls no function of Ray.
"""

import faulthandler
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import exceptions

from torchbeast.base.errors import UserError
from torchbeast.envs.environment import Environment
from torchbeast.flags import Flags
from torchbeast.procs import children, processes

START_SECONDS = 300.0  # least time limit of actors that have room: to import PyTorch
HINT = (
    ". Ray ends it if the raylet of this machine or the GCS of the cluster has died "
    "(out of memory? see dmesg and /tmp/ray/session_latest/logs)"
)


class ClusterError(UserError, RuntimeError):
    """A Ray actor has raised, or is lost."""


def start_caller(
    group: children.Children, main: Callable[..., None], flags: Flags, *args: Any
) -> tuple[children.Child, Any]:
    """Starts the process that calls Ray, and there main(flags, *args, pipe).

    Returns the process, and its first message. Raises UserError if no cluster is at
    flags.ray_address, or what `main` raised.
    """
    child = group.start("the process that calls Ray", _call_ray, main, flags, *args)
    child.hints = {**children.HINTS, 1: HINT, -signal.SIGABRT: HINT}
    while not (message := child.receive()):
        children.wait([child], 1.0)
    return child, message


def _call_ray(main: Callable[..., None], flags: Flags, *args: Any) -> None:
    """The main function of the process; see start_caller."""
    children.begin_child()
    with children.sending_errors(args[-1], "Ray failed"):
        handlers = {n: signal.getsignal(n) for n in processes.handled_signals()}
        connect(flags.ray_address)
        for number, handler in handlers.items():  # Ray replaces that of SIGTERM
            signal.signal(number, handler)
        main(flags, *args)


def connect(address: str | None) -> None:
    """Connects to this cluster, or starts a local one. Raises UserError if it can't."""
    try:
        host, _, port = (address or "").rpartition(":")
        if port.isdigit() and "/" not in host:
            # Ray would wait for minutes if nothing listens there.
            socket.create_connection((host, int(port)), 5).close()
        ray.init(
            address=address or "local",
            configure_logging=False,
            include_dashboard=False if address is None else None,
        )
    except (Exception, SystemExit) as error:  # of many types
        place = f"no Ray cluster at --ray_address {address}"
        what = place if address else "Ray can not be started"
        raise UserError(f"{what}: {error}") from error


def limit_steps(seconds: float) -> None:
    """Prints the stack and ends this process if environments take longer, in C, too."""

    def limited(method: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)
            try:
                return method(*arguments, **named)
            finally:
                faulthandler.cancel_dump_traceback_later()

        return call

    # The class, since other files make the objects. This process has no other use.
    for name in ("__init__", "initial", "step"):
        setattr(Environment, name, limited(getattr(Environment, name)))


def start_actors(
    kind: type, arguments: Sequence[tuple], limit: str, seconds: float
) -> tuple[list[Any], str]:
    """Starts Ray actors of a class, one per tuple of arguments. Each needs a CPU.

    `limit` is the flag with the limit until there are so many CPUs, `seconds` its
    value. Returns the actors, and where they run, in words.
    """
    began, needed = time.monotonic(), len(arguments)
    # Ray starts a dead one again, on any machine with room, and repeats its call.
    remote: Any = ray.remote(
        num_cpus=1, max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD"
    )(kind)
    actors = [remote.remote(*words) for words in arguments]
    node = ray.util.get_node_ip_address  # called in each of them
    places = [actor.__ray_call__.remote(lambda _: node()) for actor in actors]
    while ray.wait(places, num_returns=needed, timeout=1.0)[1]:
        cpus = ray.cluster_resources().get("CPU", 0)
        most = seconds if cpus < needed else max(seconds, START_SECONDS)
        if time.monotonic() - began > most:
            raise UserError(
                f"Ray did not start {needed} actors within {most:g} s, with {cpus:g} "
                f"CPUs: lower --num_actors, add machines or raise --{limit}"
            )
    nodes = [result(place, "a Ray actor") for place in places]
    count = ", ".join(f"{n} ({nodes.count(n)})" for n in sorted(set(nodes)))
    return actors, f"Ray runs {needed} actors on {count}."


def result(reference: Any, who: str) -> Any:
    """The result of an actor's call. Raises ClusterError if it raised or is lost."""
    try:
        return ray.get(reference)
    except exceptions.RayTaskError as error:
        raise ClusterError(f"{who} failed:\n{error.cause}") from error
    except exceptions.RayError as error:
        raise ClusterError(f"{who} is lost: {error}") from error
