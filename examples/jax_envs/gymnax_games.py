"""The environments of gymnax, which are written in JAX, as vector environments.

README.md says how to train on them.
"""

import functools
import json
import os
from typing import ClassVar

import gymnasium
import jax
import numpy as np
from gymnasium.vector import AutoresetMode

# Programs so small are faster in one thread.
ONE_THREAD = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


class GymnaxGames(gymnasium.vector.VectorEnv):
    """E games of one id.

    Args:
      game: an id such as "Breakout-MinAtar"; gymnax.registered_envs has all.
      params: changes of its default parameters, {"max_steps_in_episode": 500}.
      arguments: of gymnax.make.
    """

    # gymnax's step() starts the next game itself.
    metadata: ClassVar = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs, game="Breakout-MinAtar", params=None, **arguments):
        # An actor has one core. JAX reads these when it starts, which is in the import.
        os.environ["NPROC"] = "1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}"
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        from gymnax.environments import spaces

        self.num_envs = num_envs
        self.env, default_params = make(game, json.dumps(arguments))
        self.params = default_params.replace(**(params or {}))
        observation_space = self.env.observation_space(self.params)
        action_space = self.env.action_space(self.params)
        convert = spaces.gymnax_space_to_gym_space
        self.single_observation_space = convert(observation_space)
        self.single_action_space = convert(action_space)
        self.key = jax.random.key(0)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.key = jax.random.key(seed)
        outputs = reset(self.env, self.num_envs, self.key, self.params)
        self.key, (observation, self.state) = outputs
        return self.to_numpy(observation), {}

    def step(self, actions):
        self.key, outputs = step(self.env, self.key, self.state, actions, self.params)
        observation, self.state, reward, terminated, truncated, info = outputs
        final = {"final_obs": self.to_numpy(info["final_observation"])}
        ends = np.asarray(terminated), np.asarray(truncated)
        return self.to_numpy(observation), np.asarray(reward), *ends, final

    def to_numpy(self, observation):
        # Copies, because JAX's arrays are read-only. Some games return another dtype
        # than they declare. (A Dict has None, which keeps the dtypes.)
        dtype = self.single_observation_space.dtype
        return jax.tree.map(lambda x: np.array(x, dtype), observation)


@functools.cache  # one object per process, so that its games are compiled once
def make(game, arguments):
    import gymnax

    return gymnax.make(game, **json.loads(arguments))


@functools.partial(jax.jit, static_argnums=(0, 1))
def reset(env, num_envs, key, params):
    keys = jax.random.split(key, num_envs + 1)
    return keys[0], jax.vmap(env.reset, (0, None))(keys[1:], params)


@functools.partial(jax.jit, static_argnums=0)
def step(env, key, state, actions, params):
    keys = jax.random.split(key, len(actions) + 1)
    step_all = jax.vmap(env.step, (0, 0, 0, None))
    return keys[0], step_all(keys[1:], state, actions, params)
