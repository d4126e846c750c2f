"""Time per section of a loop, and PolyBeast's bottleneck."""

import logging
import time
from collections import Counter
from collections.abc import Mapping

log = logging.getLogger(__name__)

ALWAYS_BUSY = 0.9  # share of the time


class Timings:
    """Seconds per named section of a loop, for one thread.

    The time between the last `time` and the next `reset` is not counted. Each call
    costs well under a microsecond. GPU work counts only until it is queued, unless the
    section waits for its result.

    Attributes:
      seconds: total seconds per section, in the order of their first use.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.reset()

    def reset(self) -> None:
        """Starts the clock."""
        self._last = time.perf_counter()

    def time(self, name: str) -> None:
        """Adds the time since the last `reset` or `time` to section `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def shares(self) -> dict[str, float]:
        """Each section's share of the total time; the sum is 1."""
        total = sum(self.seconds.values()) or 1.0
        return {name: s / total for name, s in self.seconds.items()}


def format_shares(shares: Mapping[str, float]) -> str:
    """Formats shares as "wait 20 %, learn 80 %"."""
    parts = (f"{name} {100 * share:.0f} %" for name, share in shares.items())
    return ", ".join(parts) or "nothing timed"


def stream_shares(counts: Counter[str]) -> dict[str, float]:
    """Where PolyBeast's streams spend their time.

    A stream spends its time in its environments, on the wire, in the batcher (waiting
    for the previous batch), in inference, or waiting for the learner's full queue.

    Args:
      counts: Streams.counts(), or the difference of two.
    """
    batches = counts["num_batches"] or 1.0
    computing = counts["inference_infer"] * counts["num_items"] / batches
    computing = min(computing, counts["inference_wait_seconds"])
    spent = {
        "environments": counts["env_seconds"],
        "wire": max(0.0, counts["env_wait_seconds"] - counts["env_seconds"]),
        "batcher": counts["inference_wait_seconds"] - computing,
        "inference": computing,
        "learner's queue": counts["queue_wait_seconds"],
    }
    total = sum(spent.values()) or 1.0
    return {name: seconds / total for name, seconds in spent.items()}


def bottleneck(counts: Counter[str]) -> str:
    """Describes where PolyBeast spends its time, and which part limits the speed.

    If the learner or the inference threads are always busy, they are the limit.
    Otherwise the limit is the part where streams spend most of their time.
    """

    def busy(work: float, wait: float) -> float:
        return work / (work + wait) if work else 0.0

    learner = busy(counts["learner_learn"], counts["learner_wait"])
    inference = busy(counts["inference_infer"], counts["inference_wait"])
    batches, shares = counts["num_batches"] or 1.0, stream_shares(counts)
    if learner > ALWAYS_BUSY:
        limit = "learner"
    elif inference > ALWAYS_BUSY:
        limit = "inference"
    else:
        limit = max(shares, key=lambda name: shares[name])
    return (
        f"Learner busy {100 * learner:.0f} %, inference threads busy "
        f"{100 * inference:.0f} %. Streams' time: {format_shares(shares)}. Mean "
        f"inference batch {counts['num_entries'] / batches:.1f}, mean queue "
        f"{counts['queue_sum'] / (counts['queue_samples'] or 1.0):.1f}. Reconnects "
        f"{counts['num_reconnects']:.0f}, dropped steps "
        f"{counts['num_dropped_steps']:.0f}. Bottleneck: {limit}."
    )
