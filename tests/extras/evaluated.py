"""Environments that fail in the process of --eval_interval only."""

import os
import time
from pathlib import Path

import faulty


class OnlyTraining(faulty.Environment):
    def step(self, action):
        if os.nice(0) == 19:
            raise FileNotFoundError("no such level")  # also an OSError
        return super().step(action)


class HangsInTests(faulty.Environment):
    """Makes the file HANGS, if this is set, as soon as it hangs."""

    def step(self, action):
        if os.nice(0) == 19 and "HANGS" in os.environ:
            Path(os.environ["HANGS"]).touch()
        while os.nice(0) == 19:
            time.sleep(0.1)
        return super().step(action)
