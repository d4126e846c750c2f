"""PolyBeast's environment servers: processes that step environments for a learner.

    python -m torchbeast.polybeast_env --env PongNoFrameskip-v4 --num_servers 4
    python -m torchbeast.polybeast_env --bind 0.0.0.0:5000 --tls_cert ... --tls_key ...
    python -m torchbeast.polybeast_env --join learner:5000 --tls_ca ...

Server i listens at PIPES_BASENAME.i, or, with --bind HOST:PORT, at HOST:PORT+i. Each
stream that a learner opens gets --envs_per_actor new environments. Those of one stream
live in the server's main thread, those of further streams in threads of their own. With
--join each server connects to a learner that listens, with one stream, and reconnects
if the connection is lost. A server that dies is restarted. Ctrl-C or SIGTERM ends all
servers.

This module does not import torch, so a machine for environments needs no PyTorch.
"""

if __name__ == "__main__":
    from torchbeast.procs import processes

    processes.exit_on_stop_signals()  # the imports below take a moment

import contextlib
import functools
import itertools
import logging
import multiprocessing as mp
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from typing import Any

from torchbeast import flags as declared_flags
from torchbeast.base.errors import FlagError, text_of
from torchbeast.base.flag import FlagParser
from torchbeast.envs.environment import Environment, example_environment
from torchbeast.envs.make_env import MissingPackageError
from torchbeast.procs import processes
from torchbeast.remote import env_connection
from torchbeast.remote.security import (
    ServerError,
    check_security,
    make_private_folder,
    security,
    warn_of_exposed_token,
)
from torchbeast.remote.supervisor import STOP_SECONDS, Servers, SharedPipe
from torchbeast.runs import flagset, script
from torchbeast.runs.flagset import Flags

log = logging.getLogger("torchbeast.polybeast_env")

WATCH_SECONDS = 0.5  # between two checks of a client
PAUSE_SECONDS = 1.0  # before others replace environments that have raised
REPEAT_SECONDS = 60.0  # between equal messages about a waiting client


class RefusedForGood(RuntimeError):
    """The learner refuses, and trying again would not help."""


class EnvironmentFailed(RuntimeError):
    """An environment of a client has failed; the text says why."""


# --- A server process -----------------------------------------------------------------


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
    processes.begin_child(ends_by=[signal.SIGTERM])
    os.nice(5)  # the learner has priority
    pipe = SharedPipe(pipe)
    try:
        with user_errors():
            server = make_server(flags, index, address, first_stream)
        # Before the supervisor kills the process, so that it can name what hangs.
        stop = functools.partial(server.stop, STOP_SECONDS - 1)
        processes.end_on_request(stop, STOP_SECONDS, pipe.pipe)
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


# --- All servers ----------------------------------------------------------------------


def absolute(address: str) -> str:
    kind, colon, path = address.partition(":")
    return f"unix:{os.path.abspath(path)}" if kind == "unix" and colon else address


def addresses(flags: Flags) -> list[str]:
    """The address of each server; with --join, of the learner that it connects to.

    Paths are absolute, because environments may change the working directory.
    """
    if flags.join:
        return [absolute(flags.join)] * flags.num_servers
    if not flags.bind:
        base = absolute(flags.pipes_basename)
        return [f"{base}.{i}" for i in range(flags.num_servers)]
    host, _, port = flags.bind.rpartition(":")
    if not host or not port.isdigit() or int(port) + flags.num_servers > 65536:
        raise FlagError(
            f"--bind must be HOST:PORT, with {flags.num_servers} ports from PORT on, "
            f"got {flags.bind!r}"
        )
    first = int(port)  # 0: each server gets a free port
    return [f"{host}:{first + i if first else 0}" for i in range(flags.num_servers)]


# --- Command line ---------------------------------------------------------------------


def check_ports(flags: Flags) -> None:
    """Raises FlagError if servers can't listen at --bind, before any is started."""
    for address in addresses(flags) if flags.bind else ():
        host, _, port = address.rpartition(":")
        problem: OSError | None = None
        try:
            found = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )
        except OSError as error:
            raise FlagError(f"--bind {host}: {error.strerror}") from error
        except UnicodeError as error:
            raise FlagError(f"--bind {host}: not a host name: {error}") from error
        for family, kind, protocol, _, place in found:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(place)
                break
            except OSError as error:
                problem = error
        else:
            assert problem
            raise FlagError(f"--bind: can't listen at {address}: {problem.strerror}")


def make_parser() -> FlagParser:
    of_environments = (declared_flags.Environment, declared_flags.Atari)
    of_servers = (declared_flags.Servers, declared_flags.Connection)
    return declared_flags.make_parser(
        "PolyBeast's environment servers.",
        groups=(declared_flags.OfServers, *of_environments, *of_servers),
    )


def check(flags: Flags) -> None:
    for name in ("bind", "join"):
        if getattr(flags, name) == "":
            raise FlagError(f"--{name} is empty; give an address, or leave it out")
    if flags.bind and flags.join:
        raise FlagError(
            "give --bind, to wait for a learner, or --join, to connect to one, but not "
            "both"
        )
    flagset.check_ranges(flags)


def run(flags: Flags, until: Sequence[Any] = ()) -> int:
    """Serves until a stop signal, or until one of the sentinels `until` is ready.

    Returns:
      128 + the signal's number, or 0 without a signal.

    Raises:
      FlagError: a flag has a value that is not allowed.
      ServerError: a server can't start, or crashes again and again.
    """
    check_security(flags)
    check_ports(flags)
    warn_of_exposed_token(flags, addresses(flags))
    if not (flags.bind or flags.join):
        make_private_folder(flags.pipes_basename)
    with processes.StopSignals() as signals:
        servers = Servers(serve, flags, addresses(flags))

        def should_stop() -> bool:
            return bool(signals.number or connection.wait(until, 0))

        try:
            servers.start(should_stop)
            while not should_stop():
                servers.watch(1.0, [signals.wake_pipe.reader, *until])
        finally:
            servers.stop()
    if not signals.number:
        return 0
    log.info("%s: all servers have ended.", signal.Signals(signals.number).name)
    return 128 + signals.number


def run_for_learner(flags: Flags) -> None:
    """The main function of torchbeast.polybeast's child process, until SIGTERM.

    A Ctrl-C or the end of a terminal also reaches this process, but only the learner
    reacts to it.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGINT, signal.SIGHUP])
    learner = mp.parent_process()
    assert learner is not None
    with script.reported() as outcome:
        if flags.suppress_logs:
            script.print_warnings_only()
        outcome.status = run(flags, [learner.sentinel])
    sys.exit(outcome.status)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 128 + n ended by signal n, 1 failed."""
    flags = flagset.parse(make_parser(), argv)
    processes.require_native()
    with script.reported() as outcome:
        check(flags)
        outcome.status = run(flags.freeze())
    return outcome.status


if __name__ == "__main__":
    processes.run_script(main)
