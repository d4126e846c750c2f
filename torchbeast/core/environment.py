"""E environments stepped together: one row per step for all of them.

A row is a dict of arrays with leading dimension E. make_env.py makes each environment,
docs/environments.md is the manual.
"""

import argparse
import copy
import dataclasses
import logging
import math
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from torchbeast.core import atari_wrappers
from torchbeast.core.env_checks import (
    Checker,
    InvalidEnvironmentError,
)
from torchbeast.core.make_env import create_env
from torchbeast.core.nested import flatten, map_nested

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ExtraField:
    """A field of every row that is taken from the environment's info.

    Where an episode ends, the row shows the first observation of the next one, so the
    field has to say what it belongs to:

        "step"         the step that led to the row, as the reward does: a cost, lives
                       left. From step()'s info; where an episode ends, from its last
                       step. Zero in the row of initial().
        "observation"  the observation in the row: a goal, a task number, a mask. Where
                       an episode begins, from reset()'s info; else from step()'s.
    """

    shape: tuple[int, ...]  # of one environment's value
    dtype: Any  # NumPy's
    of: Literal["step", "observation"]

    def __post_init__(self) -> None:
        if self.of not in ("step", "observation"):
            raise ValueError(f'of must be "step" or "observation", got {self.of!r}')


# Per-step fields taken from the environment's info, declared here and nowhere else.
# They are part of every row, zero if the info lacks them. Examples:
# {"lives": ExtraField((), np.int64, of="step")}
# {"goal": ExtraField((2,), np.float32, of="observation")}
EXTRA_FIELDS: dict[str, ExtraField] = {}


def final_name(name: str) -> str:
    """What rows call a field of the observation at the end of truncated episodes."""
    return f"final_{name}"


def game_seed(seed: int, index: int, game: int) -> int:
    """The seed, in [0, 2**31), of game number `game` of environment number `index`."""
    return int(np.random.SeedSequence([seed, index, game]).generate_state(1)[0] >> 1)


_logged: set[str] = set()  # keys, of all environments of this process


def log_warning(key: str, message: str) -> None:
    """Logs a warning about an environment, unless one with this key was logged."""
    if key not in _logged:
        _logged.add(key)
        log.warning("%s", message)


class SeededGames(gymnasium.Wrapper):
    """Seeds each game, so that it is a function of (seed, index, game, actions).

    Every reset() starts the next game, except the one after a step with
    info["game_over"] False, which goes on with the game (a lost life). Logs the actions
    of the current game if asked to, for `replay`. Of each info it keeps the fields in
    EXTRA_FIELDS and, where an episode ends, "game_over". Checks what the environment
    returns, at the first calls and then at some.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        seed: int,
        index: int,
        log_actions: bool,
        checker: Checker,
    ):
        super().__init__(env)
        self.seed = seed
        self.index = index
        self.log_actions = log_actions
        self.checker = checker
        self.until_check = 0  # calls; counted here, because each step passes here
        self.game = -1
        self.actions: list[np.ndarray] = []
        self.game_goes_on = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        arguments: dict[str, Any] = {"options": options}
        if not self.game_goes_on:
            self.game += 1
            self.actions = []
            arguments["seed"] = game_seed(self.seed, self.index, self.game)
        self.game_goes_on = False
        self.until_check -= 1
        if self.until_check < 0:
            observation, info = self.checker.call("reset", self.env.reset, **arguments)
            self.until_check = self.checker.until_next()
            self._check_fields(info)
        else:
            observation, info = self.env.reset(**arguments)
        return observation, _extra_fields(info, "observation")

    def _check_fields(self, info: dict[str, Any]) -> None:
        for name, field in EXTRA_FIELDS.items():
            if field.of == "observation" and name not in info:
                self.checker.warn(
                    f"EXTRA_FIELDS {name}",
                    f"EXTRA_FIELDS declares {name!r} as of the observation, but the "
                    "info of reset() lacks it: rows that begin an episode hold 0",
                )

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.log_actions:
            self.actions.append(np.array(action))
        self.until_check -= 1
        if self.until_check < 0:
            result = self.checker.call("step", self.env.step, action)
            self.until_check = self.checker.until_next()
        else:
            result = self.env.step(action)
        observation, reward, terminated, truncated, info = result
        kept: dict[str, Any] = _extra_fields(info)
        self.game_goes_on = False
        if terminated or truncated:
            kept["game_over"] = bool(info.get("game_over", True))
            self.game_goes_on = not kept["game_over"]
            # The reset to come may write over it.
            observation = copy.deepcopy(observation)
        return observation, reward, terminated, truncated, kept

    def replay(self, game: int, actions: Sequence[Any]) -> Any:
        """Go to where `actions` led in game `game`; return the observation there."""
        self.game = game - 1
        self.game_goes_on = False
        observation, _ = self.reset()
        for action in actions:
            observation, _, terminated, truncated, _ = self.step(action)
            if terminated or truncated:
                observation, _ = self.reset()
        return observation


def _extra_fields(
    info: dict[str, Any], of: Literal["step", "observation"] | None = None
) -> dict[str, np.ndarray]:
    """The values in an info of EXTRA_FIELDS, or of those of one kind."""
    kept = {}
    for name, field in EXTRA_FIELDS.items():
        if name in info and of in (None, field.of):
            value = np.asarray(info[name], field.dtype)
            if value.shape != field.shape:
                raise InvalidEnvironmentError(
                    f"EXTRA_FIELDS declares {name!r} with shape {field.shape}, but the "
                    f"environment's info holds one of shape {value.shape}"
                )
            kept[name] = value
    return kept


class Environment:
    """E environments stepped together; what actors use.

    `initial()` and `step()` return a row: a dict of arrays with leading dimension E,
    made anew at each step, so that they may be kept.

        observation       as the space: arrays in nested dicts and tuples
        reward            float32, raw, of the step that led here
        done              bool, the observation is the first of a new episode
        truncated         bool, the episode that ended was cut off, not terminated
        episode_return    float32, of the episode so far; where done, of the ended one
        episode_step      int64, likewise
        game_return       float32, the same over the whole game: a game is several
        game_step         int64    episodes where a lost life ends one
        game_over         bool, done by the end of a game, not by a lost life
        last_action       the action of the step that led here, as given to step()
        env_warnings      int64, how many suspect values the checks found in this step
        ...               EXTRA_FIELDS; where done, those of the step are from the end
                          of the ended episode, those of the observation from the reset
        final_...         fields of the observation at the end of truncated episodes;
                          zero elsewhere

    Environments reset in the step that ends an episode. In the row of `initial()` done
    is true, and all else but the observation and the fields that belong to it is zero:
    no episode has ended there.

    After a step with truncated environments, `final_observation` holds the real last
    observations before the reset, nested [E, ...] and valid where the row is truncated;
    otherwise it is None.

    What an environment returns is checked by core/env_checks.py: at its first calls,
    and then at some. Rewards are checked at every step. What is suspect is counted in
    env_warnings, and `on_warning(key, message)` is called once for every key. It logs
    the message, unless you replace it.

    Actions are int64 [E] (Discrete), int64 [E, K] (MultiDiscrete) or float32
    [E, *shape] (Box). Integers count from 0, whatever the `start` of the space; floats
    are clipped into its bounds.

    Reads the flags env, seed, sync and, for Atari, atari_backend and those of
    atari_wrappers.py.
    Rendering always takes the Python path.
    """

    def __init__(
        self,
        flags: argparse.Namespace,
        num_envs: int,
        first_index: int = 0,
        render_mode: str | None = None,
    ):
        """Make environments number first_index to first_index + num_envs - 1.

        The numbers count over the whole run; each gives its environment its own seed.
        Raises what `create_env` raises.
        """
        self.flags = flags
        self.num_envs = num_envs
        self.seed = flags.seed
        self._everywhere = np.ones(num_envs, np.bool_)
        self._no_warnings = np.zeros(num_envs, np.int64)
        self._warnings = self._no_warnings.copy()  # since the last row
        self._has_warnings = False
        self._warned: set[str] = set()
        self.on_warning: Callable[[str, str], None] = log_warning
        self.indices = range(first_index, first_index + num_envs)
        self.log_actions = getattr(flags, "sync", False)
        if flags.atari_backend not in ("native", "python"):
            raise ValueError(
                f"--atari_backend must be native or python, got {flags.atari_backend!r}"
            )
        is_atari = atari_wrappers.atari_game(flags.env) is not None
        self.frames_per_step: int = flags.frame_skip if is_atari else 1
        self.exact_resume = not (
            is_atari and flags.atari_backend == "native" and render_mode is None
        )
        self.envs: Any
        if self.exact_resume:
            self.envs = gymnasium.vector.SyncVectorEnv(
                [partial(self._create, i, render_mode) for i in self.indices],
                autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP,
            )
        else:
            self.envs = atari_wrappers.make_atari_vec(flags, num_envs)
        self.observation_space: spaces.Space = self.envs.single_observation_space
        self.action_space: spaces.Space = self.envs.single_action_space
        self.final_observation: Any = None
        self._initial_calls = 0
        self._row: dict[str, Any] = {}

    def _create(self, index: int, render_mode: str | None) -> SeededGames:
        env = create_env(self.flags, render_mode)
        warn = partial(self._warn, index - self.indices.start)
        checker = Checker(self.flags.env, env.observation_space, warn)
        return SeededGames(env, self.seed, index, self.log_actions, checker)

    def set_seed(self, seed: int, first_index: int) -> None:
        """Take another seed and other numbers; only before the first `initial()`."""
        self.seed = seed
        self.indices = range(first_index, first_index + self.num_envs)
        if self.exact_resume:
            for env, index in zip(self.envs.envs, self.indices, strict=True):
                env.seed, env.index = seed, index

    def _warn(self, e: int, key: str, message: str) -> None:
        self._warnings[e] += 1
        self._has_warnings = True
        if key not in self._warned:
            self._warned.add(key)
            self.on_warning(key, message)

    def initial(self) -> dict[str, Any]:
        """Start new games and return the first row."""
        # SeededGames finds its own seeds; the native path takes these.
        seeds = [game_seed(self.seed, i, self._initial_calls) for i in self.indices]
        self._initial_calls += 1
        observation, infos = self.envs.reset(seed=seeds)
        self._zero_counts()
        action_shape, action_dtype = self._action_shape_and_dtype()
        none = np.zeros(self.num_envs, np.bool_)
        self._row = self._make_row(
            observation=observation,
            reward=np.zeros(self.num_envs, np.float32),
            done=~none,
            truncated=none,
            game_over=none.copy(),
            last_action=np.zeros(action_shape, action_dtype),
            infos=infos,
        )
        self.final_observation = None
        return self._row

    def step(self, actions: np.ndarray) -> dict[str, Any]:
        """Take one action in each environment and return the row that they lead to."""
        actions = np.asarray(actions)
        observation, reward, terminated, truncated, infos = self.envs.step(
            self._to_env_actions(actions)
        )
        done = terminated | truncated
        truncated = truncated & ~terminated
        reward = reward.astype(np.float32)
        self._episode_return += reward
        self._episode_step += 1
        self._game_return += reward
        self._game_step += 1
        if not math.isfinite(sum(reward.tolist())):
            self._warn_of_rewards(reward)
        game_over, self.final_observation = done.copy(), None
        if done.any():
            game_over &= infos["final_info"]["game_over"]
        if truncated.any():
            self.final_observation = self._stack_final(infos["final_obs"], truncated)
        self._row = self._make_row(
            observation, reward, done, truncated, game_over, actions.copy(), infos
        )
        self._episode_return[done] = 0
        self._episode_step[done] = 0
        self._game_return[game_over] = 0
        self._game_step[game_over] = 0
        return self._row

    def _zero_counts(self) -> None:
        self._episode_return = np.zeros(self.num_envs, np.float32)
        self._episode_step = np.zeros(self.num_envs, np.int64)
        self._game_return = np.zeros(self.num_envs, np.float32)
        self._game_step = np.zeros(self.num_envs, np.int64)

    def _make_row(
        self,
        observation: Any,
        reward: np.ndarray,
        done: np.ndarray,
        truncated: np.ndarray,
        game_over: np.ndarray,
        last_action: np.ndarray,
        infos: dict[str, Any],
    ) -> dict[str, Any]:
        warnings = self._no_warnings
        if self._has_warnings:
            warnings, self._warnings = self._warnings, warnings.copy()
            self._has_warnings = False
        return {
            "observation": observation,
            "reward": reward,
            "done": done,
            "truncated": truncated,
            "episode_return": self._episode_return.copy(),
            "episode_step": self._episode_step.copy(),
            "game_return": self._game_return.copy(),
            "game_step": self._game_step.copy(),
            "game_over": game_over,
            "last_action": last_action,
            "env_warnings": warnings,
            **(self._extra_fields(infos, done, truncated) if EXTRA_FIELDS else {}),
        }

    def _extra_fields(
        self, infos: dict[str, Any], done: np.ndarray, truncated: np.ndarray
    ) -> dict[str, np.ndarray]:
        # If a step ended an episode, infos are from the reset that came after it.
        ended = infos.get("final_info", {})
        fields = {}
        for name, field in EXTRA_FIELDS.items():
            if field.of == "step":
                fields[name] = self._field(name, (infos, ~done), (ended, done))
            else:
                fields[name] = self._field(name, (infos, self._everywhere))
                fields[final_name(name)] = self._field(name, (ended, truncated))
        return fields

    def _field(
        self, name: str, *sources: tuple[dict[str, Any], np.ndarray]
    ) -> np.ndarray:
        """From infos, each with a mask [E] of the environments that it is asked for."""
        field = EXTRA_FIELDS[name]
        values = np.zeros((self.num_envs, *field.shape), field.dtype)
        for infos, valid in sources:
            if name in infos:
                # Gymnasium marks by "_name" which environments' info has the name.
                valid = valid & infos.get(f"_{name}", True)
                values[valid] = infos[name][valid]
        return values

    def _warn_of_rewards(self, reward: np.ndarray) -> None:
        for e in np.flatnonzero(~np.isfinite(reward)):
            message = f"--env {self.flags.env}: step() returned the reward {reward[e]}"
            self._warn(int(e), "reward", message)

    def _stack_final(self, final: np.ndarray, truncated: np.ndarray) -> Any:
        if final.dtype != object:  # native: [E, ...] already
            return final
        filler = final[np.flatnonzero(truncated)[0]]
        return self._stack(
            [final[e] if truncated[e] else filler for e in range(self.num_envs)]
        )

    def _stack(self, observations: Sequence[Any]) -> Any:
        """Join one observation of each environment: nested [E, ...]."""
        out: Any = create_empty_array(self.observation_space, self.num_envs)
        return concatenate(self.observation_space, observations, out)

    def _action_shape_and_dtype(self) -> tuple[tuple[int, ...], type]:
        dtype = np.float32 if isinstance(self.action_space, spaces.Box) else np.int64
        return (self.num_envs, *(self.action_space.shape or ())), dtype

    def _to_env_actions(self, actions: np.ndarray) -> np.ndarray:
        """From the policy's actions to those of the space."""
        space = self.action_space
        shape, dtype = self._action_shape_and_dtype()
        if actions.shape != shape or actions.dtype != dtype:
            raise ValueError(
                f"actions must be {np.dtype(dtype)} {list(shape)} for {space}, got "
                f"{actions.dtype} {list(actions.shape)}"
            )
        if isinstance(space, spaces.Box):
            return np.clip(actions, space.low, space.high).astype(space.dtype)
        assert isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
        sizes = space.n if isinstance(space, spaces.Discrete) else space.nvec
        if not ((actions >= 0) & (actions < sizes)).all():
            raise ValueError(
                f"actions must be in 0 to {sizes} - 1, got {actions.tolist()}"
            )
        return (actions + space.start).astype(space.dtype)

    def try_out(self) -> None:
        """Reset and step each environment once, which shows most of what is wrong.

        The games are none of the run's. Raises what the environments raise, or
        InvalidEnvironmentError.
        """
        if self.exact_resume:  # the native path is known to be right
            self.on_warning = lambda key, message: None  # servers log it
            self.set_seed(secrets.randbits(31), self.indices.start)
            self.initial()
            shape, dtype = self._action_shape_and_dtype()
            self.step(np.zeros(shape, dtype))

    def render(self) -> np.ndarray | None:
        """The first environment's picture [H, W, 3] uint8; None if it has a window."""
        try:
            return self.envs.render()[0]
        except Exception as error:
            raise RuntimeError(
                f"--env {self.flags.env} can't draw its picture, see the error above. "
                "Without a display, MuJoCo and DeepMind Control need MUJOCO_GL=egl or "
                "MUJOCO_GL=osmesa (docs/environments.md)"
            ) from error

    def close(self) -> None:
        self.envs.close()

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on from the current row.

        Holds only tensors, numbers, strings, lists, tuples and dicts, so that it loads
        under `weights_only=True`. Works by replaying the current games: exact where an
        environment is a function of its seed and actions.

        Raises:
            RuntimeError: no actions are logged (`--sync` is off) or the native path.
        """
        if not self.exact_resume:
            raise RuntimeError(
                "native Atari games can't be saved in the middle; use "
                "--atari_backend python"
            )
        if not self.log_actions:
            raise RuntimeError("environments can be saved in --sync mode only")
        games = self.envs.envs
        action_shape = self.action_space.shape or ()
        state = {
            "env": self.flags.env,
            "row": self._row,
            "final_observation": self.final_observation,
            "episode_so_far": (self._episode_return, self._episode_step),
            "game_so_far": (self._game_return, self._game_step),
            "games": [game.game for game in games],
            "actions": [
                np.array(game.actions, self.action_space.dtype).reshape(
                    -1, *action_shape
                )
                for game in games
            ],
        }
        return map_nested(_to_tensor, state)

    def load_state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """Go to the saved state and return its row.

        Warns if an environment's observation is not the saved one: then it is not
        deterministic and the run that follows is not the one that was interrupted.

        Raises:
            ValueError: the state is of another environment or number of environments.
        """
        found = (state["env"], len(state["games"]))
        if found != (self.flags.env, self.num_envs):
            raise ValueError(
                f"the saved state is of {found[1]} x {found[0]}, but this run has "
                f"{self.num_envs} x {self.flags.env}"
            )
        state = map_nested(_to_numpy, state)
        replays = zip(self.envs.envs, state["games"], state["actions"], strict=True)
        observation = self._stack([env.replay(*replay) for env, *replay in replays])
        saved = state["row"]["observation"]
        if not all(map(_equal, flatten(observation), flatten(saved))):
            log.warning(
                "%s is not deterministic: replaying its actions led elsewhere, so this "
                "run is not an exact continuation",
                self.flags.env,
            )
        self._episode_return, self._episode_step = state["episode_so_far"]
        self._game_return, self._game_step = state["game_so_far"]
        self.final_observation = state["final_observation"]
        self._row = {**state["row"], "observation": observation}
        return self._row


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


# torch is imported only where a state is saved: a process that merely steps
# environments is several times smaller without it.


def _to_tensor(leaf: Any) -> Any:
    import torch

    return torch.tensor(leaf) if isinstance(leaf, np.ndarray) else leaf


def _to_numpy(leaf: Any) -> Any:
    import torch

    return leaf.numpy().copy() if isinstance(leaf, torch.Tensor) else leaf
