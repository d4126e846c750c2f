"""PolyBeast's servers and learner, started apart, each in a session of its own.

This is a pytest plugin with the fixtures serve, learn and pipes.
"""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys

import pytest
import runs
import watched_runs
from watched_runs import END_SECONDS, processes_of_session, starter, wait_until

T, E = 5, 3
SHARED = {"env": "CartPole-v1", "envs_per_actor": E}
LEARNER = {
    "module": "torchbeast.polybeast_learner",
    "num_actors": None,
    "unroll_length": T,
    "batch_size": 2 * E,
    "reward_clipping": "none",
    **SHARED,
}


class Servers:
    """`python -m torchbeast.polybeast_env` in its own session."""

    def __init__(self, folder, prefix=(), env_vars=None, **flags):
        self.console_path = folder / f"servers-{len(list(folder.glob('servers-*')))}"
        words = [sys.executable, "-m", "torchbeast.polybeast_env"]
        for name, value in {**SHARED, "num_servers": 1, **flags}.items():
            words += [f"--{name}", str(value)]
        with self.console_path.open("wb") as console:
            self.process = subprocess.Popen(
                [*prefix, *words],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env={**runs.environment(), **(env_vars or {})},
                start_new_session=True,
            )
        self.pid = self.process.pid

    @property
    def console(self):
        return self.console_path.read_text(errors="replace")

    def addresses(self, number=1):
        """The servers' addresses, when `number` of them listen."""

        def found():
            assert self.process.poll() is None, self.console
            return re.findall(r"Server \d+ at (\S+): ", self.console)

        wait_until(lambda: len(found()) >= number, "servers listen")
        return found()

    def children(self):
        """The server processes by pid, oldest first."""
        found = processes_of_session(self.pid)
        return [p.pid for p in found if "spawn_main" in p.command]

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        self.wait_for_end(128 + number)

    def wait_for_end(self, status):
        try:
            code = self.process.wait(runs.patience(END_SECONDS * 2))
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end:\n{self.console}")
        assert code == status, self.console
        wait_until(lambda: not processes_of_session(self.pid), "no process left")

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def serve(tmp_path):
    """Starts servers; what is left of them is killed after the test."""
    yield from starter(functools.partial(Servers, tmp_path))


@pytest.fixture
def learn(tmp_path):
    """Starts learners; what is left of them is killed after the test."""

    def make(xpid="run", **flags):
        return watched_runs.Run(tmp_path, xpid, **{**LEARNER, **flags})

    yield from starter(make)


@pytest.fixture
def pipes(tmp_path):
    """--pipes_basename; the test must leave no socket of this name."""
    yield f"unix:{tmp_path}/pipe"
    assert not list(tmp_path.glob("pipe*"))


def rows_of(run):
    return runs.read_logs(run.savedir, run.xpid)


def assert_whole_updates(run):
    """Every update learned from B whole unrolls."""
    rows, size = rows_of(run), 2 * E * T
    steps = [int(row["step"]) for row in rows]
    assert steps == list(range(steps[0], steps[0] + size * len(rows), size))
    assert steps[0] % size == 0
    return rows


def assert_says(run, *words):
    """The log ends with one error, of one line, that has all these words."""
    run.assert_error()
    (error,) = [line for line in run.console.splitlines() if "[ERROR " in line]
    assert all(word in error for word in words), error
