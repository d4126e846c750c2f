"""--env evaluated:OnlyTraining raises in the process of --eval_interval only."""

import os

import faulty


class OnlyTraining(faulty.Environment):
    def step(self, action):
        if os.nice(0) == 19:
            raise ZeroDivisionError
        return super().step(action)
