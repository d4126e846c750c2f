"""An environment that treats its process as its own: --env selfish:Environment."""

import gc
import locale
import os
import random
import signal
import sys
import threading
import warnings
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

FOLDER = os.path.abspath("own")


def change_everything(folder):
    """Everything that a process has once, as simulators and their wrappers do."""
    import torch

    np.seterr(all="raise")
    np.set_printoptions(precision=1)
    np.random.seed(0)  # noqa: NPY002 # the global one is meant
    warnings.simplefilter("error")
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    locale.setlocale(locale.LC_ALL, "C")
    sys.setrecursionlimit(5000)
    gc.disable()
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    os.umask(0o777)
    os.environ.clear()


class Environment(gymnasium.Env):
    """Episodes of 7 steps. What it has changed stays as it is for this environment."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        change_everything(FOLDER)
        self.check()

    def check(self):
        import torch

        assert np.geterr()["under"] == "raise"
        assert torch.get_default_dtype() == torch.float64
        assert torch.empty(0).device.type == "meta"
        assert threading.current_thread() is threading.main_thread()
        assert os.getcwd() == FOLDER
        signal.setitimer(signal.ITIMER_REAL, 0)

    def observe(self):
        return np.array([1e-50, 0, 1.7e9])  # the first is too small for float32

    def reset(self, *, seed=None, options=None):
        self.check()
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        self.check()
        self.steps += 1
        return self.observe(), 1e-50, self.steps == 7, False, {}

    def render(self):
        self.check()
        return np.zeros((32, 32, 3), np.uint8)

    def close(self):
        self.check()
        raise RuntimeError("the display is gone")
