"""Pauses of inference, and of a whole process, that cost no stream."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import runs
from servers import Run, ServerProcess
from test_actor_pool import act, check, initial_state


@pytest.mark.slow
def test_inference_may_pause(address):
    """Longer than a network may be cut until TCP's pings notice it."""
    calls = itertools.count()

    def pausing(inputs):
        if next(calls) == 3:
            time.sleep(30)
        return act(inputs)

    with (
        ServerProcess("Coded", address),
        Run([address], pausing, initial_state()) as run,
    ):
        check(itertools.islice(run.queue, 4), {})
        stats = run.pool.stats()
    assert stats["inference_wait_seconds"] > 30
    assert stats["num_reconnects"] == 0
    assert stats["last_error"] == ""


def suspend(program, *arguments):
    """The output of a program that suspends itself, and goes on after 4 s."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        time.sleep(4)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=runs.patience(60))
    return output


def test_suspended_time_does_not_count(tmp_path):
    """The process stops in a step, for longer than a step may take."""
    program = textwrap.dedent(
        """
        import itertools, os, signal, sys, time
        import numpy as np
        import servers

        calls = itertools.count()

        class Env(servers.Counting):
            def step(self, action):
                if next(calls) == 7:
                    os.kill(os.getpid(), signal.SIGSTOP)
                    time.sleep(0.5)
                return super().step(action)

        def zeros(inputs):
            return (np.zeros((1, 1), np.int64),), ()

        server = servers.Server(Env, sys.argv[1])
        server.start()
        with servers.Run([server.address], zeros, step_timeout_s=2) as run:
            for _ in range(3):
                next(run.queue)
            print(run.pool.stats())
        server.stop()
        """
    )
    output = suspend(program, f"unix:{tmp_path}/socket")
    assert "'num_dropped_steps': 0" in output
    assert "'last_error': ''" in output


def test_suspended_time_is_no_downtime(tmp_path):
    """The process stops while no stream is there, for longer than a run may be so."""
    program = textwrap.dedent(
        """
        import os, signal, sys, time
        import servers

        with servers.Run([sys.argv[1]], None, maximum_downtime_s=1.5) as run:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGSTOP)
            began = time.monotonic()
            print(run.error(), time.monotonic() - began, sep="\\n")
        """
    )
    error, seconds = suspend(program, f"unix:{tmp_path}/nobody").splitlines()
    assert "no connection for 1.5 s" in error
    assert float(seconds) > 1.4
