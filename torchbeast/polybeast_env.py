"""PolyBeast's environment servers: processes that step environments for a learner.

    python -m torchbeast.polybeast_env --env PongNoFrameskip-v4 --num_servers 4
    python -m torchbeast.polybeast_env --bind 0.0.0.0:5000 --tls_cert ... --tls_key ...
    python -m torchbeast.polybeast_env --join learner:5000 --tls_ca ...

Server i listens at PIPES_BASENAME.i, or, with --bind HOST:PORT, at HOST:PORT+i. Each
stream that a learner opens gets --envs_per_actor environments of its own. With --join
they dial a learner that listens, one stream each, and again whenever it is gone. A
server that dies is started again. SIGINT and SIGTERM end them all.

Nothing here imports torch: a machine for environments needs none.
"""

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

from torchbeast.core import env_connection
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
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
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
    signal.signal(signal.SIGINT, lambda number, frame: None)  # the parent decides
    faulthandler.register(signal.SIGUSR1)  # prints the stack of a stuck server
    os.nice(5)  # where cores are short, the learner comes first
    pipe = SharedPipe(pipe)
    try:
        server = make_server(flags, index, address, first_stream)
        signal.signal(signal.SIGTERM, lambda number, frame: end(server))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        threading.Thread(target=end_after_parent, args=(server,), daemon=True).start()
        # Before anyone can dial: those would be told of the error, too.
        description = describe(flags)
        if not flags.join:
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
    except EnvironmentFailed as error:
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


def end_after_parent(server: Any) -> None:
    parent = mp.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    end(server)
    time.sleep(SHUTDOWN_SECONDS)
    os._exit(1)  # an environment hangs


# --- All of them ----------------------------------------------------------------------


class Servers:
    """The server processes, seen from their parent, which starts them again."""

    def __init__(self, flags: Flags) -> None:
        self.flags = flags
        self.context = mp.get_context("spawn")  # gRPC can't be forked
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

    def start(self) -> None:
        for index in range(len(self.addresses)):
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
        process.start()
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
        process.join(SHUTDOWN_SECONDS)
        how = (
            f"has failed: {error}"
            if error
            else f"has died, {how_it_ended(process.exitcode)}"
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
        """Ends all processes and removes their sockets."""
        processes = [process for process in self.processes if process is not None]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
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


def how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        hint = " (out of memory? see dmesg)" if code == -signal.SIGKILL else ""
        return f"by signal {signal.Signals(-code).name}{hint}"
    return f"with exit status {code}"


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
    """Arguments of libtorchbeast that the connection flags stand for."""
    token = None
    if flags.token_file:
        try:
            with open(flags.token_file) as file:
                token = file.read().strip()
        except OSError as error:
            raise FlagError(f"--token_file: {error}") from error
        if not token:
            raise FlagError(f"--token_file {flags.token_file} is empty")
    return {
        "tls_cert": flags.tls_cert,
        "tls_key": flags.tls_key,
        "tls_ca": flags.tls_ca,
        "token": token,
        "tls_server_name": flags.tls_server_name,
        "insecure": flags.insecure,
    }


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
    if flags.bind and flags.join:
        raise FlagError(
            "give --bind, to wait for a learner, or --join, to dial one, but not both"
        )
    flags_lib.check_ranges(flags)


@contextlib.contextmanager
def noting(signals: Sequence[int], wake_writer: int) -> Iterator[Callable[[], int]]:
    """Notes signals instead of dying; yields a function that gives the first, or 0."""
    got = 0

    def note(number: int, frame: Any) -> None:
        nonlocal got
        got = got or number

    old_handlers = {number: signal.signal(number, note) for number in signals}
    old_wakeup = signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    try:
        yield lambda: got
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_wakeup)


def run(flags: Flags, until: Sequence[Any] = ()) -> int:
    """Serves until SIGINT or SIGTERM, or until one of the sentinels `until` is ready.

    Returns:
      128 + the signal's number; 0 if there was none.

    Raises:
      ServerError: a server can't start, or dies again and again.
    """
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_reader, False)
    os.set_blocking(wake_writer, False)
    with noting(STOP_SIGNALS, wake_writer) as signal_number:
        servers = Servers(flags)
        try:
            servers.start()
            while not signal_number() and not connection.wait(until, 0):
                servers.watch(1.0, [wake_reader, *until])
        finally:
            servers.stop()
    os.close(wake_reader)
    os.close(wake_writer)
    if not signal_number():
        return 0
    log.info("%s: all servers have ended.", signal.Signals(signal_number()).name)
    return 128 + signal_number()


def run_for_learner(flags: Flags) -> None:
    """A child process of torchbeast.polybeast, which ends it with SIGTERM.

    A Ctrl-C reaches every process of the terminal; the learner decides what it means.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
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
    sys.exit(main())
