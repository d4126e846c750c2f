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
from collections.abc import Iterator
from typing import Any

from torchbeast.base.errors import text_of
from torchbeast.envs.environment import Environment, example_environment
from torchbeast.envs.make_env import MissingPackageError
from torchbeast.procs import children
from torchbeast.remote import env_connection
from torchbeast.remote.security import ServerError, security
from torchbeast.remote.supervisor import STOP_SECONDS, SharedPipe
from torchbeast.runs import script
from torchbeast.runs.flagset import Flags

log = logging.getLogger("torchbeast.polybeast_env")

WATCH_SECONDS = 0.5  # between two checks of a client
PAUSE_SECONDS = 1.0  # before others replace environments that have raised
REPEAT_SECONDS = 60.0  # between equal messages about a waiting client


class RefusedForGood(RuntimeError):
    """The learner refuses, and trying again would not help."""


class EnvironmentFailed(RuntimeError):
    """An environment of a client has failed; the text says why."""


def serve(
    flags: Flags,
    index: int,
    address: str,
    first_stream: int,
    pipe: Any,
) -> None:
    """The main function of a server process: serves until SIGTERM or its parent's end.

    If the learner does not number its streams, they are numbered from first_stream. No
    two streams of this command have the same number.
    """
    children.begin_child(ends_by=[signal.SIGTERM])
    os.nice(5)  # the learner has priority
    pipe = SharedPipe(pipe)
    try:
        with user_errors():
            server = make_server(flags, index, address, first_stream)
        # Before the supervisor kills the process, so that it can name what hangs.
        stop = functools.partial(server.stop, STOP_SECONDS - 1)
        children.end_on_request(stop, STOP_SECONDS, pipe.pipe)
        # Before the server listens, so that no learner gets a faulty environment.
        description = try_environment(flags)
        # Until now SIGTERM ended this process at once, even if an environment hangs.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        if not flags.join:
            with user_errors():
                server.start(here=True)
            address = server.address
        pipe.send("ready", address, description)
        pipe.give_signs_of_life()
        if flags.join:
            run_client(flags, server, pipe, here=True)
        else:
            server.run()
    except RefusedForGood as error:
        pipe.send("refused", str(error))
        sys.exit(1)
    except (EnvironmentFailed, ServerError) as error:
        pipe.send("error", str(error))
        sys.exit(1)
    except BaseException as error:
        pipe.send("error", text_of(error))
        sys.exit(1)


def serve_under_ray(flags: Flags, index: int) -> None:
    """What a Ray actor does as server `index`: it joins the learner until it is killed.

    If an environment raises, the learner gets the error, and then new environments.

    Raises:
      ServerError: the environments can't be made, or the learner refuses them.
    """
    script.configure_logging()  # Ray prints it where the learner runs
    try:
        try_environment(flags)
    except Exception as error:
        raise ServerError(text_of(error)) from None
    assert flags.join
    while True:
        with user_errors():
            client = make_server(flags, index, flags.join, 0)
        try:
            return run_client(flags, client, Log())
        except EnvironmentFailed:
            time.sleep(PAUSE_SECONDS)  # the learner logs the reason
        except RefusedForGood as error:
            raise ServerError(f"can't join: {error}") from None


class Log:
    """Logs a server's messages. Under Ray it stands for the supervisor's pipe."""

    def send(self, kind: str, *rest: str) -> None:
        log.info("%s: %s", kind, *rest)


def run_client(flags: Flags, client: Any, pipe: Any, here: bool = False) -> None:
    """Steps environments for the learner until SIGTERM. Waits for it without a limit.

    Args:
      pipe: takes messages, as SharedPipe.send does. Thread-safe.
      here: the environments live in this thread. Then another one has to stop the
        client; Ray's signal handlers can't.

    Raises:
      RefusedForGood: the learner refuses, or no connection with it can work.
      EnvironmentFailed: the environment raised, or the learner refused its step.
    """
    import libtorchbeast

    faults: list[str] = []
    over = threading.Event()
    threading.Thread(
        target=watch_client, args=(flags, client, pipe, over, faults), daemon=True
    ).start()
    try:
        client.run(here=here)
    except (libtorchbeast.TransportError, libtorchbeast.WireError) as error:
        if client.stats()["num_steps"] > 0:  # new environments may do better
            raise EnvironmentFailed(str(error)) from error
        raise RefusedForGood(str(error)) from error
    except RuntimeError as error:  # its text has the traceback
        raise EnvironmentFailed(str(error)) from error
    finally:
        over.set()
    if faults:
        raise RefusedForGood(faults[0])


def watch_client(
    flags: Flags,
    client: Any,
    pipe: Any,
    over: threading.Event,
    faults: list[str],
) -> None:
    """A thread: reports why the client waits; stops it if the connection can't work.

    In that case it adds the reason to `faults`.
    """
    said, said_at, steps = "", 0.0, 0
    while not over.wait(WATCH_SECONDS):
        stats = client.stats()
        if stats["num_steps"] > steps:
            steps = stats["num_steps"]
            if said:
                pipe.send("joined", flags.join)
            said = ""
            continue
        error = stats["last_error"]
        if stats["connected"] or not error:
            continue
        if error != said or time.monotonic() - said_at > REPEAT_SECONDS:
            assert flags.join
            fault = env_connection.tls_fault(flags.join, flags)
            if fault:
                faults.append(f"the learner at {flags.join}: {fault}")
                client.stop()
                return
            pipe.send("waiting", env_connection.plain_reason(error))
            said, said_at = error, time.monotonic()


def make_server(flags: Flags, index: int, address: str, first_stream: int) -> Any:
    """A libtorchbeast.Server that makes new environments for each stream.

    With --join it is a libtorchbeast.Client, which has one stream.

    Stream n of the learner gets the environments n * E to (n + 1) * E - 1, like actor n
    of MonoBeast.
    """
    try:
        import libtorchbeast
    except ImportError as error:
        raise MissingPackageError(str(error)) from error

    E = flags.envs_per_actor
    numbers = itertools.count(first_stream)

    class StreamEnvironment(Environment):
        """The environments of one stream."""

        def __init__(self) -> None:
            # If the learner does not number its streams:
            place = next(numbers) * flags.num_servers + index
            super().__init__(flags, E, first_index=place * E)

        def begin_stream(self, seed: int, stream: int) -> None:
            self.set_seed(seed, stream * E)

    settings = env_connection.environment_settings(flags)
    shared = {"name": flags.env, "settings": settings, "security": security(flags)}
    if flags.join:
        return libtorchbeast.Client(
            StreamEnvironment, address, maximum_downtime_s=None, **shared
        )
    return libtorchbeast.Server(StreamEnvironment, address, **shared)


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
