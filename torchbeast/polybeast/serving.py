"""A server process: steps environments for a learner, until SIGTERM.

This module does not import torch.
"""

import contextlib
import functools
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any

from torchbeast.base.errors import text_of
from torchbeast.base.seldom import Seldom
from torchbeast.envs.environment import Environment, example_environment
from torchbeast.flags import Flags
from torchbeast.polybeast import supervisor
from torchbeast.polybeast.env_connection import environment_settings
from torchbeast.polybeast.security import ServerError, security, tls_fault
from torchbeast.procs import children, processes

log = logging.getLogger("torchbeast.polybeast_env")

WATCH_SECONDS = 0.5  # between two checks of a client


def serve(flags: Flags, index: int, address: str, pipe: Any) -> None:
    """The main function of a server process, until SIGTERM or its parent's end."""
    children.begin_child()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(5)  # the learner has priority
    pipe = supervisor.SharedPipe(pipe)
    try:
        server = make_server(flags, index, address)
        # Before the supervisor kills the process, so that it can name what hangs.
        stop = functools.partial(server.stop, supervisor.STOP_SECONDS - 1)
        _end_on_request(stop, supervisor.STOP_SECONDS, pipe.pipe)
        # Before the server listens, so that no learner gets a faulty environment.
        description = try_environment(flags)
        # Until now SIGTERM ended this process at once, even if an environment hangs.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        if not flags.join:
            with user_errors():
                server.start(here=True)
            address = server.address
        pipe.send(("ready", address, description))
        pipe.give_signs_of_life()
        if flags.join:
            run_client(flags, server, lambda x: pipe.send(("log", x)), here=True)
        else:
            server.run()
    except BaseException as error:
        known = isinstance(error, ServerError)
        pipe.send(error if known else ServerError(text_of(error)))
        sys.exit(1)


def _end_on_request(
    end: Callable[[], None], seconds: float, pipe: connection.Connection
) -> None:
    """Starts a thread that waits for a request to end, calls `end`, and exits later.

    A request is SIGTERM, if there is a handler, or the end of the other side of the
    pipe: the parent has died, or closes it because environments may ignore SIGTERM.
    `end` asks the main thread to exit. After `seconds` the process exits all the same.
    """
    signals = processes.WakePipe()
    signals.wake_on_signals()

    def wait() -> None:
        while pipe not in (ready := connection.wait([pipe, signals.reader])):
            if ready and signal.SIGTERM in signals.drain():
                break
        end()
        time.sleep(seconds)
        os._exit(1)  # still here: an environment hangs

    threading.Thread(target=wait, daemon=True).start()


def run_client(
    flags: Flags, client: Any, say: Callable[[str], None], here: bool = False
) -> None:
    """Steps environments for the learner until SIGTERM. Waits for it without a limit.

    Args:
      say: logs a message; called in another thread.
      here: the environments live in this thread, and another one stops the client.

    Raises:
      RefusedForGood: the learner refuses, or no connection with it can work.
      ServerError: the environment raised, or the learner refused its step.
    """
    import libtorchbeast

    assert flags.join
    learner, over, faults = flags.join, threading.Event(), []

    def watch() -> None:
        """Logs why the client waits. Stops it if the connection can't work."""
        is_new, steps, waits = Seldom(supervisor.REPEAT_SECONDS), 0, False
        while not over.wait(WATCH_SECONDS):
            stats = client.stats()
            if stats["num_steps"] > steps:
                if waits:
                    say(f"Joined the learner at {learner}.")
                steps, waits = stats["num_steps"], False
            elif stats["last_error"] and not stats["connected"]:
                waits = True
                if not is_new(stats["last_error"]):
                    continue
                if fault := tls_fault(learner, flags):
                    faults.append(f"the learner at {learner}: {fault}")
                    client.stop()
                    return
                why = stats["last_error"].rpartition("last error: ")[2]
                say(f"Waiting for a learner at {learner}: {why}")

    threading.Thread(target=watch, daemon=True).start()
    try:
        client.run(here=here)
    except RuntimeError as error:  # its text has the traceback of an environment
        of_stream = libtorchbeast.TransportError, libtorchbeast.WireError
        # After some steps, new environments may do better.
        if client.stats()["num_steps"] > 0 or not isinstance(error, of_stream):
            raise ServerError(str(error)) from error
        faults.append(str(error))
    finally:
        over.set()
    if faults:
        raise supervisor.RefusedForGood(f"can't join: {faults[0]}")


def make_server(flags: Flags, index: int, address: str) -> Any:
    """A libtorchbeast.Server that makes new environments for each stream.

    With --join it is a libtorchbeast.Client, which has one stream.

    Stream n of the learner gets the environments n * E to (n + 1) * E - 1, like actor n
    of MonoBeast.

    Raises:
      ServerError: the address can't be used.
    """
    import libtorchbeast

    E = flags.envs_per_actor
    numbers = itertools.count()

    class StreamEnvironment(Environment):
        """The environments of one stream."""

        def __init__(self) -> None:
            # If the learner does not number its streams:
            place = next(numbers) * flags.num_servers + index
            super().__init__(flags, E, first_index=place * E)

        def begin_stream(self, seed: int, stream: int) -> None:
            self.set_seed(seed, stream * E)

    kind, options = libtorchbeast.Server, {}
    if flags.join:
        kind, options = libtorchbeast.Client, {"maximum_downtime_s": None}
    with user_errors():
        return kind(
            StreamEnvironment,
            address,
            name=flags.env,
            settings=environment_settings(flags),
            security=security(flags),
            **options,
        )


def try_environment(flags: Flags) -> str:
    """Makes, resets and steps an environment. Returns a description for the log."""
    with contextlib.closing(example_environment(flags)) as env:
        env.try_out()
        return (
            f"{flags.envs_per_actor} x {flags.env} per stream, observation "
            f"{env.observation_space}, action {env.action_space}"
        )


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns libtorchbeast's errors of addresses and certificates into user errors."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise ServerError(str(error)) from None
