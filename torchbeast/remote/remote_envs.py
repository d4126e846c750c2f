"""The environments of PolyBeast's learner: their addresses and their properties.

Either the learner connects to servers, or it listens and environments connect to it.
"""

import argparse
import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

import libtorchbeast
from torchbeast.base.errors import FlagError, UserError
from torchbeast.core import rollout
from torchbeast.core.distributions import make_distribution
from torchbeast.envs import atari
from torchbeast.envs.action_masks import check_mask
from torchbeast.envs.space_checks import as_stack, check_observation_space
from torchbeast.local.env_spec import EnvSpec
from torchbeast.remote.env_connection import (
    environment_settings,
    reachable_first,
    tls_fault,
)
from torchbeast.remote.peer_log import PeerLog
from torchbeast.remote.security import (
    ServerError,
    security,
    warn_of_exposed_token,
)
from torchbeast.runs.flagset import Flags

log = logging.getLogger(__name__)

MAX_ROLLOUT_BYTES = 2 << 30  # of one stream
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
    if kind == "Discrete":
        return spaces.Discrete(description["n"], start=description["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(description["n"], start=description["start"])
    if kind == "MultiBinary":
        return spaces.MultiBinary(description["shape"])
    if kind == "Tuple":
        return spaces.Tuple([make_space(item) for item in description["spaces"]])
    items = description["spaces"].items()
    # Pairs keep their order; Gymnasium sorts the names of a dict.
    return spaces.Dict([(key, make_space(item)) for key, item in items])


def make_bound(bound: Any, end: str, dtype: np.dtype) -> np.ndarray:
    """A Box's low or high in its dtype. The wire has float64, and no infinite bounds.

    Args:
      bound: None (no bound), a float for all elements, or a float64 array.
      end: "low" or "high".
    """
    if bound is None:
        bound = -np.inf if end == "low" else np.inf
    if dtype.kind == "f":
        with np.errstate(over="ignore"):  # beyond the dtype's range: unbounded
            return np.asarray(bound, dtype)
    if dtype.kind == "b":
        return np.asarray(np.clip(bound, 0, 1), dtype)
    limits = np.iinfo(dtype)
    bound = np.clip(bound, float(limits.min), float(limits.max))
    with np.errstate(invalid="ignore"):  # float64 rounds int64's maximum up
        inside = bound.astype(dtype)
    return np.where(bound < float(limits.max), inside, dtype.type(limits.max))


class RemoteEnvs:
    """Connects to environment servers, or listens for environments.

    Attributes:
      addresses: of servers, one per stream; empty if the learner listens.
      listener: accepts environments; None if the learner connects to servers.
      seed: of the environments; each stream gets it, with a different number.
      expected: the required properties of environments, for libtorchbeast.

    Raises:
      FlagError: --listen is not an address.
      ServerError: the learner can't listen there.
    """

    def __init__(self, flags: Flags, seed: int) -> None:
        self.flags = flags
        self.seed = seed
        self.expected = expected_environment(flags)
        self.security = security(flags)
        self.peer_log = PeerLog(log)
        self.addresses: list[str] = []
        self.listener: Any = None
        self.patience = PATIENCE
        if flags.listen:
            warn_of_exposed_token(flags, [flags.listen])
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
            except ValueError as error:
                raise FlagError(f"--listen: {error}") from error
            except RuntimeError as error:
                raise ServerError(f"--listen: {error}") from error
            log.info("Listening at %s", self.listener.address)
        else:
            servers = server_addresses(flags)
            warn_of_exposed_token(flags, servers)
            self.addresses = [
                servers[i % len(servers)] for i in range(flags.num_actors)
            ]
            if len(servers) < flags.num_actors:
                log.info(
                    "%d streams share %d servers. A server steps the environments of "
                    "one stream in its main thread, all others outside of it. If they "
                    "need it (signals, windows, OpenGL), start %d servers",
                    *(flags.num_actors, len(servers), flags.num_actors),
                )
            if len(servers) > flags.num_actors:
                log.warning(
                    "%d of %d servers are not used: --num_actors is %d",
                    *(len(servers) - flags.num_actors, len(servers), flags.num_actors),
                )

    def find_env_spec(
        self,
        check_servers: Callable[[], None],
        check: Callable[[EnvSpec], None] | None = None,
    ) -> EnvSpec:
        """Waits for the first usable environments.

        Args:
          check_servers: called before each server is asked; may raise to end the wait.
          check: raises UserError if the environments can't be used; None: any can.

        Raises:
          TransportError: there were none within --connect_timeout seconds, after each
            was asked at least once; or no connection with them can work.
          UserError, RefusedError, WireError, RuntimeError: none is usable; the message
            has the reason.
        """
        deadline = time.monotonic() + self.flags.connect_timeout
        said = False
        warned: set[str] = set()
        while True:
            failed: dict[str, Exception] = {}
            final: list[Exception] = []  # errors that would occur again
            places = list(dict.fromkeys(self.addresses or [self.listener.address]))
            for where in reachable_first(places):
                check_servers()
                try:
                    env = self._ask(where, check)
                except (UserError, RuntimeError) as error:
                    failed[where] = error
                    fault = None
                    if not is_final(error) and not self.listener:
                        fault = tls_fault(where, self.flags)
                    if fault:
                        failed[where] = libtorchbeast.TransportError(
                            "no connection with the environment server at "
                            f"{where}: {fault}"
                        )
                    if fault or is_final(error):
                        final.append(failed[where])
                except ValueError as error:  # not an address
                    raise FlagError(f"--server_addresses: {error}") from error
                else:
                    for other, why in failed.items():
                        log.warning("%s can't be used for now: %s", other, why)
                    return env
                finally:
                    self.report()
            if len(final) == len(failed):
                raise final[0]
            if time.monotonic() > deadline:
                raise (final or list(failed.values()))[0]
            for where, why in failed.items():
                if why in final and where not in warned:
                    log.warning("%s can't be used: %s", where, why)
                    warned.add(where)
            if not said:
                log.info("Waiting for environments at %s.", ", ".join(failed))
                said = True
            time.sleep(0.2)

    def _ask(self, where: str, check: Callable[[EnvSpec], None] | None) -> EnvSpec:
        """The properties of a server's environments, or of those that have connected.

        Raises:
          TransportError: there are none yet.
          UserError, RefusedError, WireError, RuntimeError: they are not usable.
        """

        def usable(found: dict[str, Any]) -> EnvSpec:
            env = make_env_spec(self.flags, found, where)
            if check:
                check(env)
            return env

        if not self.listener:
            # The first reset may come before the hello, and has as long as a step.
            seconds = min(self.flags.actor_timeout, self.flags.connect_timeout)
            found = libtorchbeast.probe(
                where,
                seconds,
                expected=self.expected,
                security=self.security,
            )
            return usable(found)
        try:
            found = self.listener.probe(1.0)
        except libtorchbeast.TransportError:
            refusal = self.listener.stats()["last_refusal"]
            raise libtorchbeast.TransportError(
                f"no environment has joined at {where} within "
                f"{self.flags.connect_timeout:g} s (--connect_timeout)"
                + (f"; the last that was refused: {refusal}" if refusal else "")
            ) from None
        try:
            return usable(found)
        except UserError as error:  # wait for others
            self.listener.refuse(found["hello"], str(error))
            raise libtorchbeast.TransportError(str(error)) from error

    def settle(
        self, group: Any, spec: EnvSpec, checks: Sequence[Callable[[], object]]
    ) -> bool:
        """Waits for the first batch of a learner that listens.

        Until then, environments with other spaces wait. They get their turn if those
        with these spaces have left, or have made no step for a while.

        Args:
          group: a StreamGroup, whose pool runs.
          checks: called ten times a second; may raise to end the wait.

        Returns:
          Whether the first batch is there; if not, others have their turn.
        """
        steps, since = 0, time.monotonic()
        while group.queue.size() < group.items_per_batch:
            for check in checks:
                check()
            self.report([group])
            if self.listener.wants_other(spec.hello):
                log.warning(
                    "The first environments have left, or make no steps. Those with "
                    "other spaces get their turn."
                )
                self.patience *= 2
                return False
            now = time.monotonic()
            if group.pool.count() != steps:
                steps, since = group.pool.count(), now
            elif now - since > min(self.patience, self.flags.actor_timeout):
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
        self.peer_log.close()


def is_final(error: Exception) -> bool:
    """Whether the same server would give the same error again."""
    lost = isinstance(error, libtorchbeast.TransportError)
    return not lost or isinstance(error, libtorchbeast.RefusedError)


def make_env_spec(flags: Flags, found: dict[str, Any], where: str) -> EnvSpec:
    """Makes an EnvSpec from the result of `libtorchbeast.probe`.

    Raises:
      FlagError: the learner can't use these environments; the message has the reason.
    """
    is_atari = atari.atari_game(flags.env) is not None
    if found["action_space"] is None:
        raise FlagError(
            f"the environments at {where}: action_space is missing. Give them one, "
            "such as gymnasium.spaces.Discrete(n): the policy is made for it"
        )
    try:
        observation_space, action_space = (
            make_space(found[name]) for name in ("observation_space", "action_space")
        )
        check_observation_space(observation_space)
        distribution = make_distribution(action_space)
        check_mask(observation_space, action_space)
    except (ValueError, AssertionError, OverflowError) as error:
        raise FlagError(f"the environments at {where}: {error}") from error
    if is_atari and observation_space.shape == atari.STACK_SHAPE:  # not on the wire
        observation_space = as_stack(observation_space)
    env = EnvSpec(
        observation_space,
        action_space,
        flags.frame_skip if is_atari else 1,
        num_envs=found["num_envs"],
        hello=found["hello"],
    )
    n = getattr(env.action_space, "n", None)
    if flags.num_actions not in (None, n):
        raise FlagError(
            f"--num_actions is {flags.num_actions}, but {where} has "
            f"{env.action_space}; the flag may be left out"
        )
    num_bytes = found["step_bytes"] * (flags.unroll_length + 1)
    if num_bytes > MAX_ROLLOUT_BYTES:
        raise FlagError(
            f"a rollout of the {env.num_envs} environments at {where} would have "
            f"{num_bytes:,} bytes (--unroll_length {flags.unroll_length}), at most "
            f"{MAX_ROLLOUT_BYTES:,} are allowed"
        )
    spec = rollout.env_fields(env.observation_space, distribution)
    for name, field in found["extra_fields"].items():
        if name in rollout.REPLAY_FIELDS:
            raise FlagError(
                f"the environments at {where} have a field {name!r}, which is the name "
                "of one of the learner's own: rename it"
            )
        dtype = rollout.to_torch_dtype(field["dtype"])
        seen = rollout.Spec(tuple(field["shape"]), dtype)
        if name in spec and seen != spec[name]:
            raise FlagError(
                f"the environments at {where} have the field {name!r} as "
                f"{field['dtype']} {list(field['shape'])}, and this learner needs "
                f"{spec[name].dtype} {list(spec[name].shape)}"
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
            f"--sync learns from all {flags.num_actors * E} environments in turn "
            f"({flags.num_actors} streams of {E}): --batch_size must divide that, "
            f"got {B}"
        )
    if not flags.sync and B % E and E % B:
        raise FlagError(
            f"--batch_size {B} and the {E} environments of a stream: one must be a "
            "multiple of the other, because a batch has whole streams"
        )


def server_addresses(flags: argparse.Namespace) -> list[str]:
    """The addresses of --server_addresses, or those of local servers."""
    given = flags.server_addresses
    if not given:
        return [f"{flags.pipes_basename}.{i}" for i in range(flags.num_servers)]
    if given.startswith("@"):
        try:
            given = Path(given[1:]).read_text()
        except OSError as error:
            raise FlagError(f"--server_addresses: {error}") from error
    addresses = []
    for word in given.replace(",", " ").split():
        ports = re.fullmatch(r"(.+):(\d+)-(\d+)", word)  # host:5000-5007
        if not ports or word.startswith("unix:"):
            addresses.append(word)
            continue
        first, last = int(ports[2]), int(ports[3])
        if last < first:
            raise FlagError(
                f"--server_addresses: {word} has no ports: {last} < {first}"
            )
        addresses += [f"{ports[1]}:{port}" for port in range(first, last + 1)]
    if not addresses:
        raise FlagError("--server_addresses names no address")
    return addresses
