"""Environments that fail in the process of --eval_interval only."""

import os
import time

import faulty


class OnlyTraining(faulty.Environment):
    def step(self, action):
        if os.nice(0) == 19:
            raise FileNotFoundError("no such level")  # also an OSError
        return super().step(action)


class HangsInTests(faulty.Environment):
    def step(self, action):
        while os.nice(0) == 19:
            time.sleep(0.1)
        return super().step(action)
