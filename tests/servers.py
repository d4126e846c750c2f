"""Environments with predictable rows, servers for them, and pools that play.

Run as a program it serves one of ENVIRONMENTS, or listens as a learner, until its
standard input ends:

    python servers.py '{"env": "Coded", "address": "unix:/tmp/socket"}'

Other keys are arguments of libtorchbeast.Server. This process never imports torch.
"""

import contextlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from gymnasium import spaces

from libtorchbeast import (
    ActorPool,
    BatchingQueue,
    DynamicBatcher,
    Listener,
    Security,
    Server,
)

NUM_ACTIONS = 7
_numbers = itertools.count()


def episode_length(number, episode):
    return 3 + (number + 2 * episode) % 4


class Coded:
    """One environment with predictable rows, see `rows`; Gymnasium's API."""

    observation_space = spaces.Box(-1, 2**31 - 1, (4,), np.int32)
    action_space = spaces.Discrete(NUM_ACTIONS, start=2)

    def __init__(self):
        self.number = next(_numbers)
        self.episode = -1

    def reset(self):
        self.episode += 1
        self.step_number = 0
        return self.observation(-1), {}

    def observation(self, action):
        """The environment of the process, the episode, the step, the last action."""
        row = [self.number, self.episode, self.step_number, action]
        return np.array(row, np.int32)

    def step(self, action):
        assert type(action) is int
        action -= self.action_space.start
        assert 0 <= action < NUM_ACTIONS
        self.step_number += 1
        over = self.step_number == episode_length(self.number, self.episode)
        reward = 0.5 * self.step_number + action
        # Odd episodes are truncated.
        terminated, truncated = over and self.episode % 2 == 0, over
        return self.observation(action), reward, terminated, truncated, {}


def rows(number, policy):
    """Computes Coded's rows: (observation, reward, done, step, return)."""
    reward, done, steps, total = 0.0, True, 0, 0.0
    for episode in itertools.count():
        observation = (number, episode, 0, -1)
        yield observation, reward, True, steps, total
        total = 0.0
        for steps in range(1, episode_length(number, episode) + 1):
            action = policy(observation)
            observation = (number, episode, steps, action)
            reward = 0.5 * steps + action
            total += reward
            done = steps == episode_length(number, episode)
            if not done:
                yield observation, reward, False, steps, total


class CodedVector:
    """E of Coded in lockstep, with extra fields and a nested observation."""

    num_envs = 3

    observation_space = spaces.Dict(
        {
            "code": Coded.observation_space,
            "again": spaces.Tuple([Coded.observation_space]),
        }
    )
    action_space = Coded.action_space

    def __init__(self):
        self.envs = [Coded() for _ in range(self.num_envs)]
        self.final_observation = None

    def row(self, code, reward, done, truncated):
        self.step_number[:] += 1
        self.total += reward
        row = {
            "observation": {"code": code, "again": (code[:, ::-1],)},
            "reward": reward,  # float64
            "done": done,
            "episode_step": self.step_number.copy(),
            "episode_return": self.total.copy(),
            "truncated": truncated,
            # No power of two, not contiguous.
            "noise": np.arange(2 * 5 * self.num_envs).reshape(5, 2, -1).T,
        }
        self.step_number[done] = 0
        self.total[done] = 0
        return row

    def initial(self):
        E = self.num_envs
        self.step_number, self.total = np.full(E, -1), np.zeros(E)
        code = np.stack([env.reset()[0] for env in self.envs])
        return self.row(code, np.zeros(E), np.ones(E, bool), np.zeros(E, bool))

    def step(self, actions):
        assert (actions.dtype, actions.shape) == (np.int64, (self.num_envs,))
        code, reward, ended, cut = [], [], [], []
        final = np.zeros((self.num_envs, 4), np.int32)
        for e, env in enumerate(self.envs):
            observation, r, terminated, truncated, _ = env.step(int(actions[e]) + 2)
            ended.append(terminated or truncated)
            cut.append(truncated and not terminated)
            if ended[-1]:
                final[e] = observation
                observation, _ = env.reset()
            code.append(observation)
            reward.append(r)
        cut, last = np.array(cut), {"code": final, "again": (final[:, ::-1],)}
        self.final_observation = last if cut.any() else None
        return self.row(np.stack(code), np.array(reward), np.array(ended), cut)


class OldGym(Coded):
    """Coded in the old Gym API."""

    def reset(self):
        return super().reset()[0]

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, info


class Counting:
    """Fast, and without an observation space."""

    action_space = spaces.Discrete(NUM_ACTIONS)

    def __init__(self):
        self.steps = 0

    def reset(self):
        return np.zeros((2, 3), np.uint8)

    def step(self, action):
        self.steps += 1
        return np.full((2, 3), self.steps % 256, np.uint8), 1.0, False, {}


class Dying(Coded):
    """Its process ends in its 8th step."""

    def step(self, action):
        if (self.episode, self.step_number) == (2, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Forking(Coded):
    """A fork of its process outlives it, until standard input ends."""

    def reset(self):
        if self.episode == 1 and os.fork() == 0:
            os._exit(len(os.read(0, 1)))
        return super().reset()


ENVIRONMENTS = {
    env.__name__: env for env in (Coded, CodedVector, OldGym, Dying, Counting, Forking)
}


class Run:
    """A pool that plays, with inference by `act`; `result` is the future of run()."""

    def __init__(self, addresses, act, state=(), *, T=5, batch=1, **arguments):
        self.queue = BatchingQueue(1, batch, batch, maximum_queue_size=4)
        self.batcher = DynamicBatcher(timeout_ms=1)
        places = self.queue, self.batcher, addresses, state
        self.pool = ActorPool(T, *places, **{"max_env_failures": 0, **arguments})
        self.act = act
        self.threads = ThreadPoolExecutor(2)
        self.inference = self.threads.submit(self.infer)
        self.result = self.threads.submit(self.run)

    def infer(self):
        for batch in self.batcher:
            try:
                batch.set_outputs(self.act(batch.get_inputs()))
            except Exception as error:
                batch.set_error(repr(error))
                raise

    def run(self):
        try:
            self.pool.run()
        finally:  # ends `for rollout in queue`
            if not self.queue.is_closed():
                self.queue.close()

    def error(self):
        """What run() raises."""
        for _ in self.queue:
            pass
        return self.result.exception(timeout=30)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pool.close()
        self.result.exception(timeout=30)
        if not self.batcher.is_closed():
            self.batcher.close()
        self.threads.shutdown()


@contextlib.contextmanager
def serving(env_class, address, **arguments):
    """A server in this process."""
    server = Server(env_class, address, **arguments)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def listening(listener, num_files=None, token=None):
    """A learner that plays with whoever joins, with so many descriptors at most."""
    if num_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
    place = Listener(**listener, security=Security(token=token))
    place.start()
    with Run([], play_first, listener=place, max_env_failures=1000) as run:
        drain = threading.Thread(target=lambda: [None for _ in run.queue])
        drain.start()
        yield place
        run.pool.close()
        drain.join()
    place.close()


def play_first(inputs):
    (observation, *_), state = inputs
    return (np.zeros(observation.shape[:2], np.int64),), state


class Process:
    """This file as a program; `address` is where it listens."""

    def __init__(self, **arguments):
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.address = self.process.stdout.readline().strip()
        assert self.address, "it did not start"

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        """End it and return its exit status."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(timeout=60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class ServerProcess(Process):
    """A server in another process; it listens at `address`."""

    def __init__(self, env, address, **arguments):
        super().__init__(env=env, address=address, **arguments)


def main():
    arguments = json.loads(sys.argv[1])
    if env := arguments.pop("env", None):
        place = serving(ENVIRONMENTS[env], **arguments)
    else:
        place = listening(**arguments)
    with place as server:
        sys.stdout.write(server.address + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
