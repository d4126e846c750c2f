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
from torchbeast.base import ranks
from torchbeast.base.errors import FlagError, UserError
from torchbeast.base.hardware import memory_limit
from torchbeast.core import rollout
from torchbeast.core.distributions import make_distribution
from torchbeast.envs import atari
from torchbeast.envs.extra_fields import EXTRA_FIELDS
from torchbeast.envs.values import as_stack, check_mask
from torchbeast.flags import Flags
from torchbeast.local.env_spec import EnvSpec
from torchbeast.polybeast.env_connection import (
    environment_settings,
    reachable_first,
    server_addresses,
)
from torchbeast.polybeast.security import (
    ServerError,
    security,
    tls_fault,
    warn_of_exposed_token,
)

log = logging.getLogger(__name__)

PATIENCE = 5.0  # least seconds without a step until others get their turn, see settle


def make_space(description: dict[str, Any]) -> spaces.Space:
    """Makes a Gymnasium space from a server's description."""
    kind = description["type"]
    if kind == "Box":
        shape, dtype = description["shape"], np.dtype(description["dtype"])
        low, high = (
            np.broadcast_to(make_bound(description[end], end, dtype), shape)
            for end in ("low", "high")
        )
        return spaces.Box(low, high, shape, dtype=dtype.type)
    if kind in ("Discrete", "MultiDiscrete"):
        make = getattr(spaces, kind)
        return make(description["n"], start=description["start"])
    if kind == "MultiBinary":
        return spaces.MultiBinary(description["shape"])
    if kind == "Tuple":
        return spaces.Tuple([make_space(item) for item in description["spaces"]])
    items = description["spaces"].items()
    # Pairs keep their order; Gymnasium sorts the names of a dict.
    return spaces.Dict([(key, make_space(item)) for key, item in items])


def make_bound(bound: Any, end: str, dtype: np.dtype) -> np.ndarray:
    """A Box's low or high in its dtype. The wire has float64.

    Args:
      bound: None (no bound), a float for all elements, or a float64 array.
      end: "low" or "high".
    """
    if bound is None:
        bound = -np.inf if end == "low" else np.inf
    if dtype.kind == "f":
        with np.errstate(over="ignore"):  # beyond the dtype's range: unbounded
            return np.asarray(bound, dtype)
    limits = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    low, high = map(int, limits)
    # Python compares a float with an int exactly; float64 rounds int64's maximum up.
    clip = np.frompyfunc(lambda x: int(min(max(x, low), high)), 1, 1)
    return np.asarray(clip(bound)).astype(dtype)


class RemoteEnvs:
    """Connects to environment servers, or listens for environments.

    Attributes:
      addresses: of servers, one per stream; empty if the learner listens.
      listener: accepts environments; None if the learner connects to servers.
      seed: of the environments; each stream gets it, with a different number.
      expected: the required properties of environments, for libtorchbeast.

    Raises:
      ServerError: the learner can't listen at --listen.
    """

    def __init__(self, flags: Flags, seed: int) -> None:
        self.flags = flags
        self.seed = seed
        self.expected = expected_environment(flags)
        self.security = security(flags)
        self.peer_log = PeerLog()
        self.addresses: list[str] = []
        self.listener: Any = None
        self.patience = PATIENCE
        if not flags.listen:
            servers, n = server_addresses(flags), flags.num_actors
            self.addresses = [servers[i % len(servers)] for i in range(n)]
            if n != len(servers):  # docs/operations.md says what this means
                share = n, min(n, len(servers)), len(servers)
                log.info("%d streams share %d of %d servers.", *share)
        warn_of_exposed_token(flags)
        if flags.listen:
            try:
                self.listener = libtorchbeast.Listener(
                    flags.listen,
                    max_streams=flags.num_actors,
                    expected=self.expected,
                    seed=seed,
                    hello_timeout_s=flags.actor_timeout,
                    security=self.security,
                )
                self.listener.start()
            except (ValueError, RuntimeError) as error:
                raise ServerError(f"--listen: {error}") from error
            log.info("Listening at %s", self.listener.address)

    def find_env_spec(
        self,
        check_servers: Callable[[], Any],
        check: Callable[[EnvSpec], None] | None = None,
    ) -> EnvSpec:
        """Waits for the first usable environments.

        Args:
          check_servers: called before each server is asked. May raise to end the wait;
            while it returns True, servers still start, and the time does not count.
          check: raises UserError if the environments can't be used; None: any can.

        Raises:
          TransportError: there were none within --connect_timeout seconds, after each
            was asked at least once.
          UserError, RefusedError, WireError, RuntimeError: none is usable, or no
            connection with any can work; the message has the reason.
        """
        limit, waits = self.flags.connect_timeout, False
        deadline = time.monotonic() + limit
        while True:
            failed: dict[str, Exception] = {}
            places = list(dict.fromkeys(self.addresses or [self.listener.address]))
            for where in reachable_first(places):
                if check_servers():
                    deadline = time.monotonic() + limit
                try:
                    env = self._ask(where, check)
                except (UserError, RuntimeError) as error:
                    failed[where] = error
                else:
                    for other, why in failed.items():
                        log.warning("%s can't be used for now: %s", other, why)
                    return env
                finally:
                    self.report()
            final = [error for error in failed.values() if is_final(error)]
            if final and (len(final) == len(failed) or time.monotonic() > deadline):
                raise final[0]
            if time.monotonic() > deadline:
                raise libtorchbeast.TransportError(
                    f"no environments within {limit:g} s (--connect_timeout): "
                    f"{next(iter(failed.values()))}"
                )
            if not waits:
                log.info("Waiting for environments at %s.", ", ".join(failed))
                waits = True
            time.sleep(0.2)

    def _ask(self, where: str, check: Callable[[EnvSpec], None] | None) -> EnvSpec:
        """The properties of a server's environments, or of those that have connected.

        Raises TransportError if there are none yet, others as find_env_spec.
        """
        found = self._probe_listener(where) if self.listener else self._probe(where)
        try:
            env = make_env_spec(self.flags, found, where)
            if check:
                check(env)
            return env
        except UserError as error:
            self.refuse(found["hello"], error)
            raise libtorchbeast.TransportError(str(error)) from error

    def refuse(self, hello: bytes, error: UserError) -> None:
        """Refuses environments that have joined, and waits for others; else raises."""
        if not self.listener:
            raise error
        self.listener.refuse(hello, str(error))

    def _probe(self, where: str) -> dict[str, Any]:
        # The first reset may come before the hello, and has as long as a step.
        seconds = min(self.flags.actor_timeout, self.flags.connect_timeout)
        words = {"expected": self.expected, "security": self.security}
        try:
            return libtorchbeast.probe(where, seconds, **words)
        except ValueError as error:  # not an address
            raise FlagError(str(error)) from error
        except libtorchbeast.TransportError as error:
            if is_final(error) or not (fault := tls_fault(where, self.flags)):
                raise
            raise libtorchbeast.RefusedError(
                f"no connection with the environment server at {where}: {fault}"
            ) from error

    def _probe_listener(self, where: str) -> dict[str, Any]:
        try:
            return self.listener.probe(1.0)
        except libtorchbeast.TransportError:
            refusal = self.listener.stats()["last_refusal"]
            raise libtorchbeast.TransportError(
                f"none has joined at {where}"
                + (f"; the last that was refused: {refusal}" if refusal else "")
            ) from None

    def settle(
        self, group: Any, spec: EnvSpec, checks: Sequence[Callable[[], object]]
    ) -> bool:
        """Waits for the first batch of a learner that listens.

        Until then, environments with other spaces wait. They get their turn if those
        with these spaces have left, make no step for a while, or are very slow. Then
        it returns False.

        Args:
          group: a StreamGroup, whose pool runs.
          checks: called ten times a second; may raise to end the wait.
        """
        steps, since = 0, (begun := time.monotonic())
        while group.queue.size() < group.items_per_batch:
            for check in checks:
                check()
            self.report([group])
            if self.listener.wants_other(spec.hello):
                log.warning("Environments with other spaces get their turn.")
                self.patience *= 2
                return False
            now = time.monotonic()
            if group.pool.count() != steps:
                steps, since = group.pool.count(), now
            wait = min(self.patience, self.flags.actor_timeout)
            if now - since > wait or now - begun > 10 * self.patience:
                self.listener.pass_over()
            time.sleep(0.1)
        self.listener.settle(spec.hello)
        return True

    def report(self, groups: Sequence[Any] = ()) -> None:
        """Logs events of streams, also of those that the listener refused."""
        sources = [group.pool for group in groups]
        for source in [self.listener, *sources] if self.listener else sources:
            self.peer_log.report(source.events())

    def close(self) -> None:
        if self.listener:
            self.listener.close()
        self.report()


def is_final(error: Exception) -> bool:
    """Whether the same server would give the same error again."""
    lost = isinstance(error, libtorchbeast.TransportError)
    return not lost or isinstance(error, libtorchbeast.RefusedError)


def make_env_spec(flags: Flags, found: dict[str, Any], where: str) -> EnvSpec:
    """Makes an EnvSpec from the result of `libtorchbeast.probe`.

    Raises FlagError if the learner can't use these environments.
    """
    is_atari = atari.atari_game(flags.env) is not None
    try:
        if found["action_space"] is None:
            raise ValueError("action_space is missing; the policy is made for it")
        observation_space, action_space = (
            make_space(found[name]) for name in ("observation_space", "action_space")
        )
        check_mask(observation_space, action_space)
        distribution = make_distribution(action_space)
        if flags.num_actions not in (None, getattr(action_space, "n", None)):
            raise ValueError(f"--num_actions {flags.num_actions}, got {action_space}")
        num_rows = flags.num_actors * (flags.unroll_length + 1)
        most = memory_limit() // 2 // ranks.size()
        if num_rows * found["step_bytes"] > most:
            raise ValueError(
                f"{num_rows:,} rows of {found['step_bytes']:,} bytes are more than "
                "half of the memory: lower --num_actors or --unroll_length"
            )
        # Atari's stacks are not on the wire.
        if is_atari and observation_space.shape == atari.STACK_SHAPE:
            observation_space = as_stack(observation_space)
        spec = rollout.env_fields(observation_space, distribution)
        if missing := EXTRA_FIELDS.keys() - found["extra_fields"].keys():
            names = ", ".join(sorted(missing))
            log.warning("The environments at %s lack EXTRA_FIELDS: %s.", where, names)
        for name, field in found["extra_fields"].items():
            dtype = rollout.to_torch_dtype(field["dtype"])
            seen = rollout.Spec(tuple(field["shape"]), dtype)
            needed = None if name in rollout.REPLAY_FIELDS else spec.get(name, seen)
            if seen != needed:
                raise ValueError(
                    f"the field {name!r} is {field['dtype']} {list(field['shape'])}, "
                    f"and the learner's field of this name is {needed or 'its own'}"
                )
    except (ValueError, AssertionError, OverflowError) as error:
        raise FlagError(f"the environments at {where}: {error}") from error
    env = EnvSpec(
        observation_space,
        action_space,
        flags.frame_skip if is_atari else 1,
        num_envs=found["num_envs"],
        hello=found["hello"],
    )
    check_batches(flags, env)
    return env


def expected_environment(flags: Flags) -> dict[str, Any]:
    """The properties that the flags require of all environments."""
    return {
        "name": flags.env,
        "num_envs": flags.envs_per_actor or 0,  # 0: the number of the first stream
        "settings": environment_settings(flags),
    }


def check_batches(flags: Flags, env: EnvSpec) -> None:
    """Raises FlagError if batches can't be made of whole streams."""
    B, E = flags.batch_size, env.num_envs
    if flags.sync and flags.num_actors * E % B:
        raise FlagError(
            f"--batch_size {B} must divide the {flags.num_actors * E} environments, "
            "all of which --sync learns from in turn"
        )
    if not flags.sync and B % E and E % B:
        raise FlagError(
            f"--batch_size {B} and the {E} environments of a stream: one must be a "
            "multiple of the other"
        )


# --- The log --------------------------------------------------------------------------

# At most so many lines of a peer per SECONDS, of so many peers and of all others.
LINES, SECONDS, MAX_PEERS = 10, 10.0, 100

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

# (time, kind, text) of each event of a pool or listener, and the number of lost ones.
Events = tuple[list[tuple[float, str, str]], int]


class PeerLog:
    """Logs events of streams, at a limited rate per peer.

    The texts come from libtorchbeast, which escapes what peers say.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.lines: Counter[str] = Counter()  # by peer, since then

    def report(self, events: Events) -> None:
        if time.monotonic() - self.began > SECONDS:
            self.began, self.lines = time.monotonic(), Counter()
        for _, kind, text in events[0]:
            found = PEER.search(text)
            peer = found[0] if found else "others"
            is_new = kind == "refused" and peer not in self.lines
            if is_new and len(self.lines) >= MAX_PEERS:
                peer = "others"
            self.lines[peer] += 1
            if self.lines[peer] <= LINES:
                level = logging.INFO if kind == "returned" else logging.WARNING
                log.log(level, MESSAGES[kind], text)
