"""Faults on demand: an environment and a learner that fail if a file says so.

--env faulty:Environment works until the file named by FAULT_FILE exists; from then on
it does what the file says, once a step: the name of one of its methods. So a test
decides when a fault comes, in all environments at once.

`python faulty.py ...` runs MonoBeast with a loss that does the same.
"""

if __name__ == "__main__":
    from torchbeast.procs import processes

    processes.exit_on_stop_signals()

import contextlib
import ctypes
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


def wanted_fault() -> str:
    """The content of FAULT_FILE; empty if there is no such file or variable."""
    with (
        contextlib.suppress(KeyError, FileNotFoundError),
        open(os.environ["FAULT_FILE"], encoding="utf-8") as file,
    ):
        return file.read().strip()
    return ""


class Environment(gymnasium.Env):
    """Episodes of 9 steps with random observations and rewards."""

    LENGTH = 9
    observation_space: Any = spaces.Box(-1, 1, (3,), np.float32)
    action_space: Any = spaces.Discrete(5)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.observation, self.reward = self._observation(), float(action == 2)
        fault = wanted_fault()
        if fault and hasattr(self, fault):
            getattr(self, fault)()
        over = self.steps == self.LENGTH
        return self.observation, self.reward, over, False, {}

    def _observation(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def raise_error(self) -> None:
        raise ValueError("the ball left the table")

    def raise_a_long_error(self) -> None:
        raise RuntimeError("x" * 20_000_000)

    def lose_connection(self) -> None:
        raise ConnectionResetError("the simulator hung up")

    def leave(self) -> None:
        os._exit(3)

    def hang(self) -> None:
        while True:
            time.sleep(0.1)

    def step_slowly(self) -> None:
        """With a timer."""
        signal.signal(signal.SIGALRM, lambda number, frame: None)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        time.sleep(0.3)
        signal.setitimer(signal.ITIMER_REAL, 0)

    def hold_the_lock(self) -> None:
        """Hangs in C and holds Python's lock: no other thread, no handler runs."""
        ctypes.PyDLL(None).sleep(1000)

    def one_holds_the_lock(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.environ["FAULT_FILE"])
            self.hold_the_lock()

    def nan_reward(self) -> None:
        self.reward = float("nan")

    def nan_observation(self) -> None:
        self.observation[1] = np.nan


class WithProgram(Environment):
    """Starts another program, as simulators do, and never ends it.

    The program inherits all descriptors that this process has not marked as private.
    """

    def __init__(self) -> None:
        self.program = subprocess.Popen(["sleep", "1000"], close_fds=False)


class UsesTorch(Environment):
    """Differentiates in step(), and draws from the generators of the whole process.

    Writes what each process has drawn first into the folder DRAWN_IN.
    """

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        import torch  # servers don't need it

        file = pathlib.Path(os.environ["DRAWN_IN"], str(os.getpid()))
        if not file.exists():
            numpy_draw = np.random.get_bit_generator().random_raw()
            drawn = random.random(), numpy_draw, torch.rand(()).item()
            file.write_text(" ".join(map(str, drawn)))
        x = torch.ones(2, requires_grad=True)
        (3 * x).sum().backward()
        assert x.grad is not None
        return super().step(action)


class SlowToMake(WithProgram):
    """Starts its program, and its constructor never returns."""

    def __init__(self) -> None:
        super().__init__()
        pathlib.Path(os.environ["FAULT_FILE"] + f".{os.getpid()}").touch()
        self.hold_the_lock()


class SlowToClose(WithProgram):
    """Its close() never returns."""

    def close(self) -> None:
        self.hold_the_lock()


class HangsAfterAnError(Environment):
    """Its close() never returns once it has raised, as if a simulator had died."""

    has_raised = False

    def raise_error(self) -> None:
        self.has_raised = True
        super().raise_error()

    def close(self) -> None:
        while self.has_raised:
            time.sleep(0.1)


class LongerInRank1(Environment):
    """One of two learners gets its first complete episodes much later."""

    LENGTH = 40 if os.environ.get("RANK") == "1" else 4


def main() -> int:
    """MonoBeast with a loss that fails when FAULT_FILE says so."""
    from torchbeast import learner, monobeast
    from torchbeast.runs import checkpoint

    impala_loss = learner.impala_loss

    def faulty_loss(*arguments: Any, **more: Any) -> Any:
        fault = wanted_fault()
        if fault == "raise_in_loss":
            raise ZeroDivisionError("no baseline to divide by")
        while fault == "hang_in_loss":
            pathlib.Path(os.environ["FAULT_FILE"] + ".hangs").touch()
            time.sleep(0.1)
        return impala_loss(*arguments, **more)

    save = checkpoint.save

    def faulty_save(*arguments: Any, **more: Any) -> None:
        while wanted_fault() == "save_slowly":
            pathlib.Path(os.environ["FAULT_FILE"] + ".saves").touch()
            time.sleep(0.1)
        save(*arguments, **more)

    learner.impala_loss = faulty_loss
    checkpoint.save = faulty_save
    return monobeast.main()


if __name__ == "__main__":
    sys.exit(main())
