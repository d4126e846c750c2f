"""The environments of PolyBeast's learner: their addresses and their properties.

Either the learner connects to servers, or it listens and environments connect to it.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

import libtorchbeast
from torchbeast.base import parts, ranks
from torchbeast.base.errors import FlagError, UserError
from torchbeast.base.hardware import memory_limit
from torchbeast.core import rollout
from torchbeast.core.distributions import make_distribution
from torchbeast.envs import make_env
from torchbeast.envs.extra_fields import EXTRA_FIELDS, LEARNER_FIELDS
from torchbeast.envs.values import as_stack, check_mask
from torchbeast.flags import Flags
from torchbeast.local.env_spec import EnvSpec
from torchbeast.polybeast import env_connection, security

log = logging.getLogger(__name__)

PATIENCE = 5.0  # least seconds without a step until others get their turn, see settle


# --- Spaces ---------------------------------------------------------------------------


def make_space(description: dict[str, Any]) -> spaces.Space:
    """Makes a Gymnasium space from a server's description."""
    kind = description["type"]
    if kind == "Box":
        shape, dtype = description["shape"], np.dtype(description["dtype"])
        bounds = ((description["low"], -np.inf), (description["high"], np.inf))
        low, high = (np.broadcast_to(make_bound(*x, dtype), shape) for x in bounds)
        return spaces.Box(low, high, shape, dtype=dtype.type)
    if kind in ("Discrete", "MultiDiscrete"):
        make = getattr(spaces, kind)
        return make(description["n"], start=description["start"])
    if kind == "MultiBinary":
        return spaces.MultiBinary(description["shape"])
    items = description["spaces"]
    if kind == "Tuple":
        return spaces.Tuple([make_space(item) for item in items])
    # Pairs keep their order; Gymnasium sorts the names of a dict.
    return spaces.Dict([(key, make_space(item)) for key, item in items.items()])


def make_bound(bound: Any, unbounded: float, dtype: np.dtype) -> np.ndarray:
    """A Box's low or high in its dtype: of None, a float, or a float64 array."""
    bound = unbounded if bound is None else bound
    if dtype.kind == "f":
        with np.errstate(over="ignore"):  # beyond the dtype's range: unbounded
            return np.asarray(bound, dtype)
    limits = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    low, high = map(int, limits)
    # Python compares a float with an int exactly; float64 rounds int64's maximum up.
    clip = np.frompyfunc(lambda x: int(min(max(x, low), high)), 1, 1)
    return np.asarray(clip(bound)).astype(dtype)


def make_env_spec(flags: Flags, found: dict[str, Any], where: str) -> EnvSpec:
    """Makes an EnvSpec of what probe() has found; FlagError if it can't be used."""
    try:
        if found["action_space"] is None:
            raise ValueError("action_space is missing; the policy is made for it")
        observation_space = make_space(found["observation_space"])
        action_space = make_space(found["action_space"])
        check_mask(observation_space, action_space)
        distribution = make_distribution(action_space)
        if flags.num_actions not in (None, getattr(action_space, "n", None)):
            raise ValueError(f"--num_actions {flags.num_actions}, got {action_space}")
        num_rows = flags.num_actors * (flags.unroll_length + 1)
        if num_rows * found["step_bytes"] > memory_limit() // 2 // ranks.size():
            raise ValueError(
                f"{num_rows:,} rows of {found['step_bytes']:,} bytes are more than "
                "half of the memory: lower --num_actors or --unroll_length"
            )
        # Atari's stacks are not on the wire.
        atari = parts.optional("envs.atari")
        if atari and atari.is_stack(flags, observation_space):
            observation_space = as_stack(observation_space)
        check_fields(rollout.env_fields(observation_space, distribution), found, where)
    except (ValueError, AssertionError, OverflowError) as error:
        raise FlagError(f"the environments at {where}: {error}") from error
    check_batches(flags, found["num_envs"])
    words = {"num_envs": found["num_envs"], "hello": found["hello"]}
    frames_per_step = make_env.first("frames_per_step", flags) or 1
    return EnvSpec(observation_space, action_space, frames_per_step, **words)


def check_fields(spec: dict[str, Any], found: dict[str, Any], where: str) -> None:
    """Raises ValueError if a field has not the shape and dtype that `spec` has."""
    if missing := EXTRA_FIELDS.keys() - found["extra_fields"].keys():
        names = ", ".join(sorted(missing))
        log.warning("The environments at %s lack EXTRA_FIELDS: %s.", where, names)
    for name, field in found["extra_fields"].items():
        dtype = rollout.to_torch_dtype(field["dtype"])
        seen = rollout.Spec(tuple(field["shape"]), dtype)
        if name in LEARNER_FIELDS or seen != spec.get(name, seen):
            raise ValueError(
                f"the field {name!r} is {field['dtype']} {list(field['shape'])}, and "
                f"the learner's field of this name is {spec.get(name, 'its own')}"
            )


def check_batches(flags: Flags, E: int) -> None:
    """Raises FlagError if batches can't be made of whole streams."""
    B, total = flags.batch_size, flags.num_actors * E
    if flags.sync and total % B:
        raise FlagError(f"--sync: --batch_size {B} must divide {total} environments")
    if not flags.sync and B % E and E % B:
        text = f"--batch_size {B} and the {E} environments of a stream"
        raise FlagError(f"{text}: one must be a multiple of the other")


# --- Connections ----------------------------------------------------------------------


def expected_environment(flags: Flags) -> dict[str, Any]:
    """The properties that the flags require of all environments."""
    settings = env_connection.environment_settings(flags)
    number = flags.envs_per_actor or 0  # 0: that of the first stream
    return {"name": flags.env, "num_envs": number, "settings": settings}


def is_final(error: Exception) -> bool:
    """Whether the same server would give the same error again."""
    lost = isinstance(error, libtorchbeast.TransportError)
    return not lost or isinstance(error, libtorchbeast.RefusedError)


class RemoteEnvs:
    """Connects to environment servers, or listens for environments.

    Attributes:
      addresses: of servers, one per stream; empty if the learner listens.
      listener: accepts environments; None if the learner connects to servers.
      seed: of the environments; each stream gets it, with a different number.
      expected: the required properties of environments, for libtorchbeast.
    """

    def __init__(self, flags: Flags, seed: int) -> None:
        """Raises ServerError if the learner can't listen at --listen."""
        self.flags, self.seed = flags, seed
        self.expected = expected_environment(flags)
        self.security = security.security(flags)
        self.peer_log = PeerLog()
        self.addresses: list[str] = []
        self.listener: Any = None
        self.patience = PATIENCE
        self.passed_over: bytes | None = None  # a hello; others have their turn
        if not flags.listen:
            servers, n = env_connection.server_addresses(flags), flags.num_actors
            self.addresses = [servers[i % len(servers)] for i in range(n)]
            if n != len(servers):
                log.info("%d streams share %d servers.", n, len(servers))
            return
        try:
            limits: Any = {"max_streams": flags.num_actors}
            limits["hello_timeout_s"] = flags.actor_timeout
            words = {"expected": self.expected, "security": self.security, "seed": seed}
            self.listener = libtorchbeast.Listener(flags.listen, **limits, **words)
            self.listener.start()
        except (ValueError, RuntimeError) as error:
            raise security.ServerError(f"--listen: {error}") from error
        log.info("Listening at %s", self.listener.address)

    def find_env_spec(
        self,
        check_servers: Callable[[], Any],
        check: Callable[[EnvSpec], Any] = lambda spec: None,
    ) -> EnvSpec:
        """Waits for the first usable environments.

        Args:
          check_servers: called before each server is asked. May raise to end the wait;
            while it returns True, servers still start, and the time does not count.
          check: raises UserError if the environments can't be used.

        Raises:
          TransportError: there were none within --connect_timeout seconds.
          UserError, RuntimeError: none is usable; the message has the reason.
        """
        limit, is_first = self.flags.connect_timeout, True
        deadline = time.monotonic() + limit
        places = list(dict.fromkeys(self.addresses)) or [self.listener.address]
        while True:
            failed: dict[str, Exception] = {}
            for where in places:
                are_starting = check_servers()
                try:
                    if is_first and not self.listener and security.is_off(where):
                        raise libtorchbeast.TransportError(f"{where} is not reachable")
                    env = self._ask(where, check)
                except (UserError, RuntimeError) as error:
                    failed[where] = error
                else:
                    for other, why in failed.items():
                        log.warning("%s can't be used for now: %s", other, why)
                    return env
                finally:
                    self.report()
                    if are_starting:  # not before, because asking takes time, too
                        deadline = time.monotonic() + limit
            final = [error for error in failed.values() if is_final(error)]
            is_late = time.monotonic() > deadline
            if final and (is_late or len(final) == len(failed)):
                raise final[0]
            if is_late:
                why = failed[places[0]]
                text = f"no environments within {limit:g} s (--connect_timeout): {why}"
                raise libtorchbeast.TransportError(text)
            if is_first:
                log.info("Waiting for environments at %s.", ", ".join(failed))
            is_first = False
            time.sleep(0.2)

    def _ask(self, where: str, check: Callable[[EnvSpec], Any]) -> EnvSpec:
        """Asks a server, or the first that have joined. TransportError: none yet."""
        # The first reset may come before the hello, and has as long as a step.
        seconds = min(self.flags.actor_timeout, self.flags.connect_timeout)
        words = {"expected": self.expected, "security": self.security}
        try:
            if self.listener:
                found = self.listener.probe(2.0, other_than=self.passed_over)
            else:
                found = libtorchbeast.probe(where, seconds, **words)
        except ValueError as error:  # not an address
            raise FlagError(str(error)) from error
        except libtorchbeast.TransportError as error:
            raise self._explained(error, where) from None
        try:
            env = make_env_spec(self.flags, found, where)
            check(env)
            return env
        except UserError as error:
            self.refuse(found["hello"], error)
            raise libtorchbeast.TransportError(str(error)) from error

    def _explained(self, error: Exception, where: str) -> Exception:
        if self.listener:
            refusal = self.listener.stats()["last_refusal"] or "none"
            text = f"none has joined at {where}; the last that was refused: {refusal}"
            return libtorchbeast.TransportError(text)
        if not is_final(error) and (fault := security.tls_fault(where, self.flags)):
            text = f"no connection with the environment server at {where}: {fault}"
            return libtorchbeast.RefusedError(text)
        return error

    def refuse(self, hello: bytes, error: UserError) -> None:
        """Refuses environments that have joined, and waits for others; else raises."""
        if not self.listener:
            raise error
        self.listener.refuse(hello, str(error))

    def settle(
        self, group: Any, spec: EnvSpec, checks: Sequence[Callable[[], object]]
    ) -> bool:
        """Waits for the first batch of a learner that listens; `checks` may raise.

        Until then, environments with other spaces are told to try again. It is their
        turn if those with these spaces have left or are silent: then it returns False.
        """
        steps, since = 0, time.monotonic()
        wait = min(self.patience, self.flags.actor_timeout)
        while group.queue.size() < group.items_per_batch:
            for check in checks:
                check()
            self.report([group])
            now, stats = time.monotonic(), group.pool.stats()
            if stats["num_steps"] != steps:
                steps, since = stats["num_steps"], now
            have_left = steps > 0 and not stats["num_connected"]
            if stats["num_different"] and (have_left or now - since > wait):
                log.warning("Environments with other spaces get their turn.")
                self.patience, self.passed_over = self.patience * 2, spec.hello
                return False
            time.sleep(0.1)
        group.pool.settle()
        return True

    def report(self, groups: Sequence[Any] = ()) -> None:
        """Logs events of streams, also of those that the listener refused."""
        for source in filter(None, [self.listener, *(x.pool for x in groups)]):
            self.peer_log.report(source.events())

    def close(self) -> None:
        if self.listener:
            self.listener.close()
        self.report()


# --- The log --------------------------------------------------------------------------

# At most so many lines per SECONDS: of a peer, and of all that were refused.
LINES, MOST_REFUSED, SECONDS = 10, 100, 10.0

# By kind of libtorchbeast's events.
MESSAGES = {
    "lost": "A stream is lost: %s",
    "returned": "A stream is back: %s",
    "refused": "A stream is refused: %s",
    "env_error": "An environment raised, so its stream starts again: %s",
}

# The first peer that a text names is the one that it is about. The port of one that has
# connected differs each time.
PEER = re.compile(
    r"joined from (ipv[46]:\S+(?=:\d)|this machine)|environment server at \S*[^\s:,;]"
)


class PeerLog:
    """Logs events at a limited rate per peer. libtorchbeast has escaped the texts."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.lines: Counter[str] = Counter()  # by peer and by kind, since then

    def report(self, events: tuple[list[tuple[float, str, str]], int]) -> None:
        """Takes (time, kind, text) of each event, and the number of lost ones."""
        if time.monotonic() - self.began > SECONDS:
            self.began, self.lines = time.monotonic(), Counter()
        for _, kind, text in events[0]:
            found = PEER.search(text)
            peer = found[0] if found else "others"
            is_flood = kind == "refused" and self.lines[kind] >= MOST_REFUSED
            if self.lines[peer] < LINES and not is_flood:
                self.lines.update([peer, kind])
                level = logging.INFO if kind == "returned" else logging.WARNING
                log.log(level, MESSAGES[kind], text)
