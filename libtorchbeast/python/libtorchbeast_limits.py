"""Decides when peers end a run of libtorchbeast.ActorPool, which says what happens.

One peer never ends the run of the others. A peer is a server's address, or a machine
from which environments join.
"""

from collections import Counter, deque
from math import inf
from typing import Any

from libtorchbeast import RefusedError, TransportError

MINUTE = 60.0
# Environments that join may be on their way back: a client pauses for up to 10 s.
RETURN_SECONDS = 15.0


class EnvironmentsFailed(RuntimeError):
    """Environments fail too often."""


class RunLimits:
    """Decides when peers end a run.

    Args:
      maximum_downtime: seconds without a sound stream.
      max_env_failures: environments that may raise or break a rule within a minute;
        0: the first that does ends the run.

    Raises:
      ValueError: max_env_failures is negative.
    """

    def __init__(self, maximum_downtime: float, max_env_failures: int) -> None:
        if max_env_failures < 0:
            raise ValueError(
                f"max_env_failures must be at least 0, got {max_env_failures}"
            )
        self.maximum_downtime = maximum_downtime
        self.max_env_failures = max_env_failures
        self.failures: deque[tuple[float, str]] = deque()  # times and peers
        self.up_at = -inf  # when a sound stream was there last that had made a step

    def check(self, facts: dict[str, Any]) -> None:
        """Takes what has happened since the last call.

        Args:
          facts: by name
            time: now, in seconds
            was_suspended: whether the process was, before this call
            peers: dict from each peer to a tuple:
              is_present: a stream is there that has made a step, or may still make
                its first
              has_delivered: a stream is there that has given a rollout
              proven_at: when a stream was there last that had made a step; long ago
                if there was none since the last call
              num_failures: environments that have raised or broken a rule since the
                last call
            last_failure: what an environment has raised, or which rule it broke, last
            last_error: why a stream was lost or refused last; empty: none has been
            num_servers: addresses that the learner dials
            num_refusing: of these, refuse this learner for good
            listener: the address at which environments join; empty: they do not

        Raises:
          EnvironmentsFailed: they fail too often; with the last one's traceback.
          RefusedError: all servers refuse.
          TransportError: there was no stream for too long.
        """
        now, peers = facts["time"], facts["peers"]
        if self.up_at == -inf or facts["was_suspended"]:
            self.up_at = now  # the time before does not count
        for peer, (*_, num_failures) in peers.items():
            self.failures.extend([(now, peer)] * num_failures)
        while self.failures and now - self.failures[0][0] > MINUTE:
            self.failures.popleft()
        counts = Counter(peer for _, peer in self.failures)
        # A stream is sound if its peer does not fail too often, or if it has given a
        # rollout.
        is_up = False
        for peer, (is_present, has_delivered, proven_at, _) in peers.items():
            if has_delivered or counts[peer] <= self.max_env_failures:
                is_up |= is_present
                self.up_at = max(self.up_at, proven_at)
        down = now - self.up_at

        if counts and self.max_env_failures == 0:
            raise EnvironmentsFailed(facts["last_failure"])
        if self.fails_too_often(counts, is_up, down, bool(facts["listener"])):
            raise EnvironmentsFailed(
                f"more than {self.max_env_failures} environments have raised within a "
                f"minute. The last: {facts['last_failure']}"
            )
        if not facts["listener"] and facts["num_refusing"] == facts["num_servers"]:
            raise RefusedError(facts["last_error"])
        if not is_up and down > self.maximum_downtime:
            self.raise_downtime(facts["listener"], facts["last_error"])

    def fails_too_often(
        self, counts: Counter[str], is_up: bool, down: float, listens: bool
    ) -> bool:
        """Whether failures end the run.

        While a sound stream is there, peers that alone exceed the limit don't count,
        nor does the worst of the rest. Without one, all count; environments that join
        get some time to come back.
        """
        if is_up:
            rest = [n for n in counts.values() if n <= self.max_env_failures]
            return sum(rest) - max(rest, default=0) > self.max_env_failures
        if counts.total() <= self.max_env_failures:
            return False
        return not listens or down > min(RETURN_SECONDS, self.maximum_downtime)

    def raise_downtime(self, listener: str, error: str) -> None:
        time = f"{self.maximum_downtime:.10g} s"
        if listener:
            more = f"; the last error: {error}" if error else ""
            raise TransportError(
                f"no environment has joined at {listener} for {time}{more}"
            )
        if error:  # servers are dialled at least once
            raise TransportError(f"no connection for {time}: {error}")
