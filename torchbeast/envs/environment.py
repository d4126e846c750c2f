"""E environments stepped together: one row per step for all of them.

A row is a dict of arrays with leading dimension E. make_env.py makes each environment.
docs/your_environment.md is the manual.
"""

import argparse
import contextlib
import contextvars
import functools
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from torchbeast.base.nested import flatten, map_nested
from torchbeast.envs import make_env
from torchbeast.envs.extra_fields import EXTRA_FIELDS, FIELDS, TAKEN, make_fields
from torchbeast.envs.seeded_games import game_seed, make_games
from torchbeast.envs.values import (
    InvalidEnvironmentError,
    agent_is_present,
    num_options,
    plain_space,
    policy_space,
)

log = logging.getLogger(__name__)


def example_environment(flags: argparse.Namespace, index: int = 0) -> "Environment":
    """One environment; of vector environments as many as a run has in one object."""
    several = make_env.first("vector_maker", flags, None, index)
    E = getattr(flags, "envs_per_actor", None) if several else 1
    env = Environment(flags, E, index)
    make_env.first("examine", env)
    return env


# What is added up, [4, E] float64: float32 loses digits in long games.
TOTALS = "episode_return", "episode_step", "game_return", "game_step"


def add_step(totals: np.ndarray, reward: np.ndarray, counts: Any = 1) -> np.ndarray:
    """Adds a step with rewards [E], where it counts: bool [E], or for all."""
    totals = totals.copy()
    totals[::2] += reward
    totals[1::2] += counts
    return totals


def restart(totals: np.ndarray, done: np.ndarray, game_over: np.ndarray) -> np.ndarray:
    """Begins new episodes where done [E], and new games where game_over [E]."""
    return np.where([done, done, game_over, game_over], 0, totals)


def total_fields(totals: np.ndarray) -> dict[str, np.ndarray]:
    """These fields of a row; returns as float32, steps as int64."""
    return {k: x.astype(FIELDS[k]) for k, x in zip(TOTALS, totals, strict=True)}


class Environment:
    """E environments stepped together. One thread at a time.

    `initial()` and `step()` return a row: a dict of new arrays with leading dimension
    E. The caller may keep them.

        observation       nested as the space is
        reward            float32, not clipped, of the step that led to the observation
        done              bool, the observation is the first of a new episode
        truncated         bool, the last episode was truncated, not terminated
        episode_return    float32, of the episode so far; if done, of the last episode
        episode_step      int64, of the episode so far; if done, of the last episode
        game_return       float32 and int64, the same for the game. If a lost life ends
        game_step         an episode, a game has several episodes
        game_over         bool, a game has ended, not only an episode
        last_action       the action of the step that led to the observation
        ...               EXTRA_FIELDS, see extra_fields.py
        final_...         the EXTRA_FIELDS of the observation, at the end of truncated
                          episodes; else zero

    An environment is reset in the step that ends its episode. In the row of `initial()`
    done is true; only the observation and its fields are set, all else is zero.

    `final_observation` holds the real last observations, nested [E, ...], after a step
    that truncated episodes, valid for these; else None.

    Actions are int64 [E] (Discrete), int64 [E, K] (MultiDiscrete; MultiBinary, whose
    action_space here is a MultiDiscrete of K bits) or float32 [E, *shape] (Box).
    Integers count from 0 for any `start` of the space. Floats are clipped to bounds.
    """

    def __init__(
        self,
        flags: argparse.Namespace,
        num_envs: int | None,
        first_index: int = 0,
        render_mode: str | None = None,
        around: AbstractContextManager | None = None,
    ):
        """Makes the environments first_index to first_index + num_envs - 1 of the run.

        Without num_envs it makes one, or as many as a game has agents. `around`
        surrounds all calls of environments. Raises what `create_env` raises.
        """
        if taken := EXTRA_FIELDS.keys() & TAKEN:
            raise InvalidEnvironmentError(f"EXTRA_FIELDS declares {', '.join(taken)}")
        self._around = around or contextlib.nullcontext()
        # What environments set by np.seterr() stays among them.
        self._run = contextvars.copy_context().run
        self.flags = flags
        self.frames_per_step = make_env.first("frames_per_step", flags) or 1
        made = make_games, flags, num_envs, render_mode, first_index
        self.envs: Any = self._call(*made)
        self.num_envs: int = self.envs.num_envs
        self.games: list[Any] = getattr(self.envs, "envs", [])  # can be replayed
        self.exact_resume = bool(self.games)
        self.observation_space = plain_space(self.envs.single_observation_space)
        self.action_space = policy_space(self.envs.single_action_space)
        self.final_observation: Any = None
        self.set_seed(flags.seed, first_index)

    def _call(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls code of environments."""
        with self._around:
            return self._run(function, *args, **kwargs)

    def set_seed(self, seed: int, first_index: int) -> None:
        """Makes the games those of a new object. `initial()` has to follow."""
        self.seed = seed
        self.indices = range(first_index, first_index + self.num_envs)
        self._initial_calls = 0
        for i, game in enumerate(self.games):  # a game has one agent or several
            game.set_seed(seed, first_index + i * self.num_envs // len(self.games))

    @np.errstate(all="ignore")  # or warnings, which environments may make errors
    def initial(self) -> dict[str, Any]:
        """Starts new games and returns the first row."""
        # Games that can be resumed compute their own seeds; the others use these.
        seeds = [game_seed(self.seed, i, self._initial_calls) for i in self.indices]
        self._initial_calls += 1
        observation, infos = self._call(self.envs.reset, seed=seeds)
        self._totals = np.zeros((4, self.num_envs))
        none = np.zeros(self.num_envs, np.bool_)
        self._row = {
            "observation": observation,
            "reward": np.zeros(self.num_envs, np.float32),
            "done": ~none,
            "truncated": none,
            **total_fields(self._totals),
            "game_over": none.copy(),
            "last_action": np.zeros(*_actions_of(self.action_space, self.num_envs)),
            **make_fields(infos, ~none, none),
        }
        self.final_observation = None
        return self._row

    @np.errstate(all="ignore")
    def step(self, actions: np.ndarray) -> dict[str, Any]:
        """Takes one action in each environment and returns the next row."""
        space = self.envs.single_action_space
        env_actions = to_env_actions(space, self.num_envs, np.asarray(actions))
        result = self._call(self.envs.step, env_actions)
        observation, reward, terminated, truncated, infos = result
        done = terminated | truncated
        truncated = truncated & ~terminated
        counts = agent_is_present(self._row["observation"])
        self._totals = add_step(self._totals, reward, counts)
        reward = reward.astype(np.float32)
        if not math.isfinite(sum(reward.tolist())):
            raise InvalidEnvironmentError(
                f"--env {self.flags.env}: step() returned the rewards {reward.tolist()}"
            )
        game_over, self.final_observation = done.copy(), None
        if done.any():
            game_over &= infos["final_info"]["game_over"]
        if truncated.any():
            self.final_observation = self._stack_final(infos["final_obs"], truncated)
        self._row = {
            "observation": observation,
            "reward": reward,
            "done": done,
            "truncated": truncated,
            **total_fields(self._totals),
            "game_over": game_over,
            "last_action": np.array(actions),
            **make_fields(infos, done, truncated),
        }
        self._totals = restart(self._totals, done, game_over)
        return self._row

    def _stack_final(self, final: Any, truncated: np.ndarray) -> Any:
        if not isinstance(final, np.ndarray) or final.dtype != object:
            return final  # [E, ...] already
        pairs = zip(final, truncated, strict=True)
        return self._stack([x if y else final[truncated.argmax()] for x, y in pairs])

    def _stack(self, observations: Sequence[Any]) -> Any:
        """Joins one observation of each environment: nested [E, ...]."""
        out: Any = create_empty_array(self.observation_space, self.num_envs)
        return concatenate(self.observation_space, observations, out)

    def render(self) -> np.ndarray | None:
        """Draws the first environment: [H, W, 3] uint8, or None if it has a window."""
        return self._call(self.envs.render)[0]

    def close(self) -> None:
        """Closes the environments. What close() raises is only a warning."""
        for env in self.games or [self.envs]:
            try:
                self._call(env.close)
            except (Exception, SystemExit):
                log.warning("close() of %s raised:", self.flags.env, exc_info=True)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs: tensors and plain Python values."""
        assert self.exact_resume
        assert self.flags.sync, "the actions are not logged"
        space = self.envs.single_action_space  # not the policy's
        shape = -1, *(space.shape or ())
        logs = [np.array(game.actions, space.dtype) for game in self.games]
        state = {
            "row": self._row,
            "final_observation": self.final_observation,
            "episode_so_far": self._totals[:2],
            "game_so_far": self._totals[2:],
            "games": [game.game for game in self.games],
            "actions": [actions.reshape(shape) for actions in logs],
        }
        import torch  # late: a process that only steps is several times smaller

        return map_nested(
            lambda x: torch.tensor(x) if isinstance(x, np.ndarray) else x, state
        )

    def load_state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """Restores it and returns its row. Warns if the games are not the same."""
        # No import of torch, see state_dict.
        state = map_nested(
            lambda x: x.numpy().copy() if hasattr(x, "numpy") else x, state
        )
        replays = zip(self.games, state["games"], state["actions"], strict=True)
        last = [x for game, *y in replays for x in self._call(game.replay, *y)]
        observation, saved = self._stack(last), state["row"]["observation"]
        same = functools.partial(np.array_equal, equal_nan=True)
        if not all(map(same, flatten(observation), flatten(saved))):
            text = "%s is not deterministic: this run is no exact continuation"
            log.warning(text, self.flags.env)
        self._totals = np.concatenate([state["episode_so_far"], state["game_so_far"]])
        self.final_observation = state["final_observation"]
        self._row = {**state["row"], "observation": observation}
        return self._row


def to_env_actions(
    space: spaces.Space, num_envs: int, actions: np.ndarray
) -> np.ndarray:
    """Converts actions of a policy [num_envs, ...] to the space's, or ValueError."""
    shape, dtype = _actions_of(space, num_envs)
    if actions.shape != shape or actions.dtype != dtype:
        raise ValueError(
            f"actions must be {np.dtype(dtype)} {list(shape)} for {space}, got "
            f"{actions.dtype} {list(actions.shape)}"
        )
    if isinstance(space, spaces.Box):
        return np.clip(actions, space.low, space.high).astype(space.dtype)
    choices: Any = policy_space(space)
    if not ((actions >= 0) & (actions < num_options(choices))).all():
        raise ValueError(f"{actions.tolist()} are not in 0 to {choices} - 1")
    actions = (actions + choices.start).astype(space.dtype)
    return actions.reshape(num_envs, *(space.shape or ()))


def _actions_of(space: spaces.Space, num_envs: int) -> tuple[tuple[int, ...], type]:
    """Shape and dtype of a policy's actions in `num_envs` environments."""
    dtype = np.float32 if isinstance(space, spaces.Box) else np.int64
    return (num_envs, *(policy_space(space).shape or ())), dtype
