"""A pause of a whole process, which costs no stream."""

import os
import signal
import subprocess
import sys
import time

import runs

PROGRAM = """
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


def test_suspended_time_does_not_count(tmp_path):
    """The process stops in a step, for longer than a step may take."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, f"unix:{tmp_path}/socket"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        time.sleep(4)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=runs.patience(60))
    assert "'num_dropped_steps': 0" in output
    assert "'last_error': ''" in output
