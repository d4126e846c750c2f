"""A server process: steps environments for a learner, until SIGTERM. Loads no torch."""

import contextlib
import itertools
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any

from torchbeast.base.errors import text_of
from torchbeast.envs.environment import Environment, example_environment
from torchbeast.envs.seeded_games import check_same_spaces
from torchbeast.envs.values import InvalidEnvironmentError, mask_space
from torchbeast.flags import Flags
from torchbeast.polybeast import supervisor
from torchbeast.polybeast.env_connection import environment_settings
from torchbeast.polybeast.security import (
    ServerError,
    make_private_folder,
    security,
    tls_fault,
)
from torchbeast.procs import children, processes

log = logging.getLogger("torchbeast.polybeast_env")

WATCH_SECONDS = 0.5  # between two checks of a client
tried: list[Environment] = []  # by this process


def serve(flags: Flags, index: int, address: str, pipe: connection.Connection) -> None:
    """The main function of a server process, until SIGTERM or its parent's end."""
    children.begin_child()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(5)  # the learner has priority
    lock = threading.Lock()

    def send(message: Any) -> None:
        # The send fails if the supervisor has exited.
        with lock, contextlib.suppress(OSError):
            pipe.send(message)

    try:
        make_private_folder(address)  # it may have been removed
        server = make_server(flags, index, address)
        _watch(flags, server, pipe, send)
        # Before the server listens, so that no learner gets a faulty environment.
        description = try_environment(flags, index * flags.envs_per_actor)
        # Until now SIGTERM ended this process at once, even if an environment hangs.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        if not flags.join:
            with user_errors():
                server.start(here=True)
            address = server.address
        send(("ready", address, description))
        if flags.join:
            run_client(flags, server, lambda text: send(("log", text)))
            if server.stats()["finished"]:
                send(("finished",))
        else:
            server.run()
    except BaseException as error:
        known = isinstance(error, ServerError)
        send(error if known else ServerError(text_of(error)))
        sys.exit(1)


def _watch(
    flags: Flags, server: Any, pipe: connection.Connection, send: Callable[[Any], None]
) -> None:
    """Starts a thread that stops the server at SIGTERM, or if the pipe ends.

    It also sends beats, unless an environment holds Python's lock. A server takes other
    streams while one hangs; a client has only one, so it then sends none.
    """
    signals = processes.WakePipe()
    signals.wake_on_signals()
    main, steps = threading.get_ident(), 0
    # Not by the loop's own pauses: environments may have timers, which end them early.
    is_due = supervisor.Seldom(supervisor.BEAT_SECONDS / 2)

    def is_stuck() -> bool:
        nonlocal steps
        before, steps = steps, server.stats()["num_steps"]
        is_waiting = sys._current_frames()[main].f_code is run_client.__code__
        return bool(flags.join) and steps == before and not is_waiting

    def wait() -> None:
        seconds = supervisor.BEAT_SECONDS
        while pipe not in (ready := connection.wait([pipe, signals.reader], seconds)):
            if ready and signal.SIGTERM in signals.drain():
                break
            if is_due() and not is_stuck():
                send(("beat", server.stats().get("num_streams")))
        # A second before the supervisor kills the process: it can name what hangs.
        server.stop(supervisor.STOP_SECONDS - 1)
        time.sleep(supervisor.STOP_SECONDS)
        os._exit(1)  # still here: an environment hangs

    threading.Thread(target=wait, daemon=True).start()


def run_client(flags: Flags, client: Any, say: Callable[[str], None]) -> None:
    """Steps environments for the learner until its run is complete, or SIGTERM.

    `say` logs a message, in another thread. Raises RefusedForGood if no connection can
    work, and ServerError if an environment raised or the learner refused its step.
    """
    import libtorchbeast

    assert flags.join
    learner, over, faults = flags.join, threading.Event(), []

    def watch() -> None:
        is_new = supervisor.Seldom(supervisor.REPEAT_SECONDS)
        while not over.wait(WATCH_SECONDS):
            stats = client.stats()
            why = "" if stats["connected"] else stats["last_error"]
            if not (why and is_new(why)):
                continue
            if fault := tls_fault(learner, flags):
                faults.append(f"the learner at {learner}: {fault}")
                client.stop()
                return
            why = why.rpartition("last error: ")[2]
            say(f"Waiting for a learner at {learner}: {why}")

    threading.Thread(target=watch, daemon=True).start()
    try:
        client.run(here=True)
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
    """A libtorchbeast.Server, or with --join a Client, which has one stream.

    Stream n of the learner gets new environments with the numbers n * E to
    (n + 1) * E - 1, like actor n of MonoBeast. Their spaces must be those of
    try_environment(). Raises ServerError.
    """
    from libtorchbeast_gym import UnusableError

    import libtorchbeast

    E = flags.envs_per_actor
    numbers = itertools.count()

    class StreamEnvironment(Environment):
        def __init__(self) -> None:
            # If the learner does not number its streams:
            place = next(numbers) * flags.num_servers + index
            try:
                super().__init__(flags, E, first_index=place * E)
                for env in tried:
                    check_same_spaces(flags.env, env, self)
            except InvalidEnvironmentError as error:
                if hasattr(self, "envs"):
                    self.close()
                raise UnusableError(error) from None  # the learner gets no traceback

        def begin_stream(self, seed: int, stream: int) -> None:
            self.set_seed(seed, stream * E)

    options: dict[str, Any] = {"name": flags.env, "security": security(flags)}
    options["settings"] = environment_settings(flags)
    with user_errors():
        if not flags.join:
            return libtorchbeast.Server(StreamEnvironment, address, **options)
        options["maximum_downtime_s"] = None
        return libtorchbeast.Client(StreamEnvironment, address, **options)


def try_environment(flags: Flags, index: int = 0) -> str:
    """Makes, resets and steps environment `index`. Returns a text for the log."""
    with contextlib.closing(example_environment(flags, index)) as env:
        tried.append(env)
        env.set_seed(secrets.randbits(31), 0)
        row = env.initial()
        if not mask_space(env.observation_space):  # of action 0
            env.step(row["last_action"])
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
