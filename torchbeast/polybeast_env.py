"""PolyBeast's environment servers: processes that step environments for a learner.

    python -m torchbeast.polybeast_env --env PongNoFrameskip-v4 --num_servers 4
    python -m torchbeast.polybeast_env --bind 0.0.0.0:5000 --tls_cert ... --tls_key ...
    python -m torchbeast.polybeast_env --join learner:5000 --tls_ca ...

Server i listens at PIPES_BASENAME.i, or, with --bind HOST:PORT, at HOST:PORT+i. Each
stream that a learner opens gets --envs_per_actor environments of its own. With --join
they dial a learner that listens, one stream each, and again whenever it is gone. A
server that dies is started again. Ctrl-C or SIGTERM ends them all.

Nothing here imports torch: a machine for environments needs none.
"""

if __name__ == "__main__":
    from torchbeast.core import processes

    processes.exit_on_stop_signals()  # the imports below take a moment

import argparse
import contextlib
import faulthandler
import itertools
import logging
import multiprocessing as mp
import os
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any

from torchbeast.core import env_connection, processes
from torchbeast.core import flags as flags_lib
from torchbeast.core.environment import (
    Environment,
    MissingPackageError,
    UnknownEnvironmentError,
    UnsupportedSpaceError,
)
from torchbeast.core.errors import UserError
from torchbeast.core.flags import FlagError, Flags
from torchbeast.core.streams import open_missing_streams

log = logging.getLogger("torchbeast.polybeast_env")

NUM_SERVERS = 4
PIPES_BASENAME = "unix:/tmp/polybeast"
ENVS_PER_ACTOR = 8
SHUTDOWN_SECONDS = 5.0  # granted to servers to end by themselves
START_SECONDS = 300.0  # granted to servers to import and to make an environment
# A server that has lived for so long was not started in vain.
HEALTHY_SECONDS = 10.0
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 10.0  # seconds before a restart
WATCH_SECONDS = 0.5  # between two looks at a client
REPEAT_SECONDS = 60.0  # until it is said again that a client waits

# What a person can put right.
EXPECTED_ERRORS = (
    UserError,
    UnknownEnvironmentError,
    UnsupportedSpaceError,
    MissingPackageError,
)


class ServerError(RuntimeError):
    """An environment server did not start, died too often, or is refused for good."""


class RefusedForGood(RuntimeError):
    """To dial the learner again would not help."""


class EnvironmentFailed(RuntimeError):
    """The environment of a client raised; the text has its traceback."""


# --- A server process -----------------------------------------------------------------


def serve(
    flags: Flags,
    index: int,
    address: str,
    first_stream: int,
    pipe: Any,
) -> None:
    """The process: serves until SIGTERM, or until its parent is gone.

    The learner numbers its streams; one that does not finds streams numbered from
    first_stream, no two of this command alike.
    """
    processes.begin_child(ends_by=[signal.SIGTERM])
    faulthandler.register(signal.SIGUSR1)  # prints the stack of a stuck server
    os.nice(5)  # where cores are short, the learner comes first
    pipe = SharedPipe(pipe)
    try:
        with user_errors():
            server = make_server(flags, index, address, first_stream)
        processes.end_after_parent(lambda: end(server), SHUTDOWN_SECONDS)
        # Before anyone can dial: those would be told of the error, too.
        description = describe(flags)
        # Until here SIGTERM has ended this process at once, whatever hangs.
        signal.signal(signal.SIGTERM, lambda number, frame: end(server))
        if not flags.join:
            with user_errors():
                server.start()
            address = server.address
        pipe.send("ready", address, description)
        if flags.join:
            run_client(flags, server, pipe)
        else:
            server.run()
    except RefusedForGood as error:
        pipe.send("refused", str(error))
        sys.exit(1)
    except (EnvironmentFailed, ServerError) as error:
        pipe.send("error", str(error))
        sys.exit(1)
    except EXPECTED_ERRORS as error:
        pipe.send("error", f"{type(error).__name__}: {error}")
        sys.exit(1)
    except BaseException:
        pipe.send("error", traceback.format_exc())
        sys.exit(1)


class SharedPipe:
    """The pipe to the supervisor; threads may send at once."""

    def __init__(self, pipe: connection.Connection) -> None:
        self.pipe = pipe
        self.lock = threading.Lock()

    def send(self, kind: str, *rest: str) -> None:
        # A supervisor that has ended needs to hear nothing.
        with self.lock, contextlib.suppress(OSError):
            self.pipe.send((kind, *rest))


def run_client(flags: Flags, client: Any, pipe: SharedPipe) -> None:
    """Steps environments for the learner until SIGTERM, however long it takes to come.

    Raises:
      RefusedForGood: the learner says no, or no connection with it can ever work.
      EnvironmentFailed: the environment raised.
    """
    import libtorchbeast

    faults: list[str] = []
    over = threading.Event()
    threading.Thread(
        target=watch_client, args=(flags, client, pipe, over, faults), daemon=True
    ).start()
    try:
        client.run()
    except (libtorchbeast.TransportError, libtorchbeast.WireError) as error:
        raise RefusedForGood(str(error)) from error
    except RuntimeError as error:  # with the traceback in its text
        raise EnvironmentFailed(str(error)) from error
    finally:
        over.set()
    if faults:
        raise RefusedForGood(faults[0])


def watch_client(
    flags: Flags,
    client: Any,
    pipe: SharedPipe,
    over: threading.Event,
    faults: list[str],
) -> None:
    """A thread: says what the client waits for, and stops one that waits in vain.

    Why goes into `faults`.
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
            fault = env_connection.tls_fault(flags.join, flags)
            if fault:
                faults.append(f"the learner at {flags.join}: {fault}")
                client.stop()
                return
            pipe.send("waiting", env_connection.plain_reason(error))
            said, said_at = error, time.monotonic()


def make_server(flags: Flags, index: int, address: str, first_stream: int) -> Any:
    """A libtorchbeast.Server whose streams get environments of their own.

    With --join it is a libtorchbeast.Client, which has one stream.

    Stream n of the learner steps environments number n * E and on: those that actor n
    of MonoBeast would step.
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
            # For a learner that does not number its streams.
            place = next(numbers) * flags.num_servers + index
            super().__init__(flags, E, first_index=place * E)

        def begin_stream(self, seed: int, stream: int) -> None:
            self.set_seed(seed, stream * E)

    settings = env_connection.environment_settings(flags)
    shared = {"name": flags.env, "settings": settings, **security(flags)}
    if flags.join:
        return libtorchbeast.Client(
            StreamEnvironment, address, maximum_downtime_s=None, **shared
        )
    return libtorchbeast.Server(StreamEnvironment, address, **shared)


def describe(flags: Flags) -> str:
    """What is served; tries an environment, so that faults show before the start."""
    with contextlib.closing(Environment(flags, 1)) as env:
        env.try_out()
        return (
            f"{flags.envs_per_actor} x {flags.env} a stream, observation "
            f"{env.observation_space}, action {env.action_space}"
        )


def end(server: Any) -> None:
    """Ends a server from a signal handler, which must not wait for its own thread."""
    threading.Thread(target=server.stop, daemon=True).start()


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """What libtorchbeast says of addresses and certificates needs no traceback."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise ServerError(str(error)) from None


# --- All of them ----------------------------------------------------------------------


class Servers:
    """The server processes, seen from their parent, which starts them again."""

    def __init__(self, flags: Flags) -> None:
        self.flags = flags
        self.context = mp.get_context("spawn")  # gRPC can't be forked
        self.guardian = processes.Guardian(SHUTDOWN_SECONDS)
        self.addresses = addresses(flags)
        count = len(self.addresses)
        self.processes: list[Any] = [None] * count
        self.pipes: list[Any] = [None] * count
        self.started = [0.0] * count  # when
        self.ready = [False] * count
        self.due = [0.0] * count  # when to start it, if there is no process
        self.in_vain = [0] * count  # deaths in a row, each soon after the start
        self.restarts = 0
        self.ever_ready = False
        self.said: dict[str, float] = {}  # when; what servers wait for

    def start(self, enough: Callable[[], Any]) -> None:
        """Starts all servers; `enough` may end that early."""
        for index in range(len(self.addresses)):
            if enough():
                break
            self._start(index, 0)

    def watch(self, timeout: float, wake_up: Sequence[Any]) -> None:
        """Waits for something to happen, and starts again who has died.

        Args:
          timeout: seconds to wait at most.
          wake_up: what ends the wait when it is ready.

        Raises:
          ServerError: a server can't start, or dies again and again.
        """
        now = time.monotonic()
        for index, process in enumerate(self.processes):
            if process is None:
                if now >= self.due[index]:
                    self.restarts += 1
                    self._start(index, self.restarts << 16)
                else:
                    timeout = min(timeout, self.due[index] - now)
        alive = [i for i, process in enumerate(self.processes) if process is not None]
        objects = list(wake_up)
        objects += [self.processes[i].sentinel for i in alive]
        objects += [self.pipes[i] for i in alive]
        connection.wait(objects, timeout)
        for index in alive:
            self._look_at(index)

    def _start(self, index: int, first_stream: int) -> None:
        self.pipes[index], child = self.context.Pipe(duplex=False)
        process = self.context.Process(
            target=serve,
            name=f"server-{index}",
            args=(self.flags, index, self.addresses[index], first_stream, child),
            daemon=True,
        )
        self.guardian.start(process)
        child.close()
        self.processes[index] = process
        self.started[index] = time.monotonic()
        self.ready[index] = False

    def _look_at(self, index: int) -> None:
        process, pipe = self.processes[index], self.pipes[index]
        lived = time.monotonic() - self.started[index]
        error = ""
        with contextlib.suppress(EOFError, OSError):
            while pipe.poll():
                kind, *rest = pipe.recv()
                if kind == "ready":
                    self.ready[index] = self.ever_ready = True
                    log.info("Server %d at %s: %s", index, *rest)
                elif kind == "waiting":
                    self._say_waiting(*rest)
                elif kind == "joined":
                    log.info("Server %d has joined the learner at %s.", index, *rest)
                    self.said.clear()
                elif kind == "refused":
                    self._raise(index, f"can't join: {rest[0]}")
                else:
                    (error,) = rest
                    break
        if error and not self.ever_ready:
            self._raise(index, f"cannot start: {error}")
        if process.is_alive() and not error:
            if not self.ready[index] and lived > START_SECONDS:
                self._raise(index, f"was not ready after {START_SECONDS:g} s")
            return
        self.guardian.end([process], SHUTDOWN_SECONDS)
        how = (
            f"has failed: {error}"
            if error
            else f"has died, {processes.how_it_ended(process.exitcode)}"
        )
        self.in_vain[index] = 0 if lived > HEALTHY_SECONDS else self.in_vain[index] + 1
        if self.in_vain[index] > self.flags.max_restarts:
            self._raise(
                index,
                f"{how}. It is number {self.in_vain[index]} of deaths in a row within "
                f"{HEALTHY_SECONDS:g} s of the start (--max_restarts "
                f"{self.flags.max_restarts})",
            )
        backoff = min(FIRST_BACKOFF * 2 ** self.in_vain[index], LONGEST_BACKOFF)
        log.warning("Server %d %s; starting it again in %.1f s.", index, how, backoff)
        pipe.close()
        self.processes[index] = None
        self.due[index] = time.monotonic() + backoff

    def _say_waiting(self, why: str) -> None:
        """Once a minute, though each of many servers says it."""
        now = time.monotonic()
        if now - self.said.get(why, -REPEAT_SECONDS) >= REPEAT_SECONDS:
            self.said[why] = now
            log.info("Waiting for a learner at %s: %s", self.flags.join, why)

    def _raise(self, index: int, why: str) -> None:
        raise ServerError(f"environment server {index} {why}")

    def stop(self) -> None:
        """Ends all processes and what they have started, and removes their sockets."""
        alive = [process for process in self.processes if process is not None]
        for process in alive:
            process.terminate()
        self.guardian.end(alive, SHUTDOWN_SECONDS)
        self.guardian.close()
        for address in self.addresses:
            kind, _, path = address.partition(":")
            if kind == "unix" and not self.flags.join:
                remove_dead_socket(path)


def remove_dead_socket(path: str) -> None:
    """Removes the socket of a server that was killed, and nothing else of that name."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def addresses(flags: Flags) -> list[str]:
    """Where the servers listen, one each; with --join, where the learner does."""
    if flags.join:
        return [flags.join] * flags.num_servers
    if not flags.bind:
        return [f"{flags.pipes_basename}.{i}" for i in range(flags.num_servers)]
    host, _, port = flags.bind.rpartition(":")
    if not host or not port.isdigit() or int(port) + flags.num_servers > 65536:
        raise FlagError(
            f"--bind must be HOST:PORT, with {flags.num_servers} ports from PORT on, "
            f"got {flags.bind!r}"
        )
    return [f"{host}:{int(port) + i}" for i in range(flags.num_servers)]


# --- Command line ---------------------------------------------------------------------


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("environment servers").add_argument
    add("--bind", help="HOST:PORT of the first server, for learners elsewhere")
    add("--join", help="HOST:PORT or unix:PATH of a learner with --listen to dial")
    add(
        "--max_restarts",
        type=int,
        default=5,
        help="times in a row that a server may die right after its start",
    )


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    """What environment servers and learner must agree on."""
    add = parser.add_argument_group("connection").add_argument
    add(
        "--pipes_basename",
        default=PIPES_BASENAME,
        help="the servers' sockets on one machine are this name with .0, .1, ... "
        "(torchbeast.polybeast: a new name per run)",
    )
    add("--num_servers", type=int, default=NUM_SERVERS, help="server processes")
    add(
        "--envs_per_actor",
        type=int,
        default=ENVS_PER_ACTOR,
        help="environments of one stream; a learner by itself takes any, by default",
    )
    add("--tls_server_name", help="for who dials: the name in the other's certificate")
    add("--tls_cert", help="PEM file of this side's certificate")
    add("--tls_key", help="PEM file of its key")
    add("--tls_ca", help="PEM file of who signed the other side's certificate")
    add("--token_file", help="file of a secret that both sides know")
    add(
        "--insecure",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="allow plain TCP beyond this machine",
    )


def security(flags: argparse.Namespace) -> dict[str, Any]:
    """Arguments of libtorchbeast that the connection flags stand for.

    Raises:
      FlagError: one of the files can't be used.
    """
    token = None
    if flags.token_file:
        try:
            with open(flags.token_file, encoding="utf-8") as file:
                token = file.read().strip()
        except OSError as error:
            raise FlagError(
                f"--token_file {flags.token_file}: {error.strerror}"
            ) from error
        except UnicodeDecodeError as error:
            raise FlagError(
                f"--token_file {flags.token_file} is not text in UTF-8: {error}"
            ) from error
        if not token:
            raise FlagError(f"--token_file {flags.token_file} is empty")
    check_certificates(flags)
    return {
        "tls_cert": flags.tls_cert,
        "tls_key": flags.tls_key,
        "tls_ca": flags.tls_ca,
        "token": token,
        "tls_server_name": flags.tls_server_name,
        "insecure": flags.insecure,
    }


def check_certificates(flags: argparse.Namespace) -> None:
    """Raises FlagError for TLS files that can't be used; gRPC would not say why."""
    names = ("tls_cert", "tls_key", "tls_ca")
    if not any(getattr(flags, name) for name in names):
        return
    import ssl  # slow

    for name in names:
        path = getattr(flags, name)
        if path:
            try:
                with open(path, "rb") as file:
                    found = b"-----BEGIN " in file.read()
            except OSError as error:
                raise FlagError(f"--{name} {path}: {error.strerror}") from error
            if not found:
                raise FlagError(
                    f"--{name} {path} is not a PEM file: it has no line with -----BEGIN"
                )
    if bool(flags.tls_cert) != bool(flags.tls_key):
        given, missing = ("cert", "key") if flags.tls_cert else ("key", "cert")
        raise FlagError(f"--tls_{given} is of no use without --tls_{missing}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # weak ones are not our business
    checking = ""
    try:
        if flags.tls_cert:
            checking = f"--tls_cert {flags.tls_cert} and --tls_key {flags.tls_key}"
            # A password: gRPC can't ask for one, and this must not.
            context.load_cert_chain(flags.tls_cert, flags.tls_key, lambda: "")
        if flags.tls_ca:
            checking = f"--tls_ca {flags.tls_ca}"
            context.load_verify_locations(flags.tls_ca)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        raise FlagError(f"{checking} can't be used: {reason}") from error


def check_ports(flags: Flags) -> None:
    """Raises FlagError if servers can't listen at --bind; gRPC would not say why."""
    for address in addresses(flags) if flags.bind else ():
        host, _, port = address.rpartition(":")
        problem: OSError | None = None
        try:
            found = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )
        except OSError as error:
            raise FlagError(f"--bind {host}: {error.strerror}") from error
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


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="PolyBeast's environment servers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    presets = sorted(flags_lib.PRESETS)
    parser.add_argument("--preset", choices=presets, help="a named set of flags")
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="of the environments, if the learner gives none: one of an older version",
    )
    flags_lib.add_environment_flags(parser)
    add_server_flags(parser)
    add_connection_flags(parser)
    return parser


def check(flags: Flags) -> None:
    for name in ("bind", "join"):
        if getattr(flags, name) == "":
            raise FlagError(f"--{name} is empty; give an address, or leave it out")
    if flags.bind and flags.join:
        raise FlagError(
            "give --bind, to wait for a learner, or --join, to dial one, but not both"
        )
    flags_lib.check_ranges(flags)


def run(flags: Flags, until: Sequence[Any] = ()) -> int:
    """Serves until a stop signal, or until one of the sentinels `until` is ready.

    Returns:
      128 + the signal's number; 0 if there was none.

    Raises:
      FlagError: the flags can't work.
      ServerError: a server can't start, or dies again and again.
    """
    security(flags)
    check_ports(flags)
    with processes.StopSignals() as signals:
        servers = Servers(flags)

        def enough() -> bool:
            return bool(signals.number or connection.wait(until, 0))

        try:
            servers.start(enough)
            while not enough():
                servers.watch(1.0, [signals.wake_reader, *until])
        finally:
            servers.stop()
    if not signals.number:
        return 0
    log.info("%s: all servers have ended.", signal.Signals(signals.number).name)
    return 128 + signals.number


def run_for_learner(flags: Flags) -> None:
    """A child process of torchbeast.polybeast, which ends it with SIGTERM.

    A Ctrl-C or the end of a terminal reaches this process, too; the learner decides
    what it means.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGINT, signal.SIGHUP])
    learner = mp.parent_process()
    assert learner is not None
    sys.exit(guarded(lambda: run(flags, [learner.sentinel])))


def guarded(work: Callable[[], int]) -> int:
    """The exit status of `work`; errors that tell all are logged without traceback."""
    open_missing_streams()
    logging.basicConfig(
        level=logging.INFO, format="[%(levelname)s %(asctime)s %(name)s] %(message)s"
    )
    try:
        return work()
    except (*EXPECTED_ERRORS, ServerError) as error:
        log.error("%s: %s", type(error).__name__, error)
        return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 128 + n ended by signal n, 1 failed."""
    flags = flags_lib.parse(make_parser(), argv)

    def work() -> int:
        check(flags)
        return run(flags.freeze())

    return guarded(work)


if __name__ == "__main__":
    processes.run_script(main)
