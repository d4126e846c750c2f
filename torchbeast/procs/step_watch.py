"""Finds processes that run environments and take no steps."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Container

import torch


class StepWatch:
    """Watches the steps of processes. Its methods are for the watching process.

    Args:
      steps: [count] int64 in shared memory; each process counts its steps here. See
        rollout.step_counters.
      timeout: seconds without a step after which a process is stuck.

    Attributes:
      awake: seconds of watching, without the time in which the run is suspended.
    """

    def __init__(self, steps: torch.Tensor, timeout: float) -> None:
        self.steps, self.timeout = steps, timeout
        self._seen = [(-1, 0.0)] * len(steps)  # steps, and `awake` at the last one
        self.awake = 0.0
        self._checked_at = time.monotonic()

    def restart(self, index: int) -> None:
        """Gives a process its full time, for example after it was idle."""
        self._seen[index] = (-1, self.awake)

    def find_stuck(self, watched: Container[int]) -> int | None:
        """The number of a watched process that is stuck. Call it once per second."""
        now = time.monotonic()
        # A longer gap between two calls means that the run was suspended.
        self.awake += min(now - self._checked_at, 2.0)
        self._checked_at = now
        for index, steps in enumerate(self.steps.tolist()):
            seen, since = self._seen[index]
            if steps != seen:
                self._seen[index] = (steps, self.awake)
            elif index in watched and self.awake - since > self.timeout:
                return index
        return None

    def explain(self, index: int, who: str, pid: int) -> str:
        """Prints the stack of a stuck process; returns the text of an error."""
        print_stack(pid)
        return (
            f"{who} (pid {pid}) made no step for {self.timeout:g} s. Its stack is "
            "printed above, if the process could print it. If the environment is that "
            "slow, raise --actor_timeout"
        )


def print_stack(pid: int) -> None:
    """Makes a process print its Python stack; it has registered faulthandler."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
