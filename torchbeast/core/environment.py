"""Environments: from `--env` to the rows that actors write.

`create_env` makes one environment, `Environment` steps E of them together and returns
one row per step: a dict of arrays with leading dimension E. docs/environments.md is the
manual.
"""

import argparse
import copy
import difflib
import importlib
import inspect
import logging
import operator
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from torchbeast import atari_wrappers

log = logging.getLogger(__name__)

# Per-step fields taken from the environment's info, declared here and nowhere else:
# name -> (shape of one environment's value, NumPy dtype). They are part of every row,
# zero where info lacks them. Example: {"lives": ((), np.int64)}
EXTRA_FIELDS: dict[str, tuple[tuple[int, ...], Any]] = {}

_ELEMENTARY_SPACES = (
    spaces.Box,
    spaces.Discrete,
    spaces.MultiDiscrete,
    spaces.MultiBinary,
)


class UnknownEnvironmentError(ValueError):
    """No environment goes by this name."""


class MissingPackageError(ImportError):
    """A package that an environment or its server needs is missing; says which."""


class UnsupportedSpaceError(ValueError):
    """An observation or action space that buffers and policies cannot hold."""


# --- One environment ------------------------------------------------------------------


def create_env(
    flags: argparse.Namespace, render_mode: str | None = None
) -> gymnasium.Env:
    """Make the one environment that `flags.env` names.

    It can be an Atari id ("PongNoFrameskip-v4", "ALE/Pong-v5"; the protocol comes from
    the flags, see atari_wrappers.py), any other Gymnasium id ("CartPole-v1",
    "MinAtar/Breakout-v1", "package.module:Id-v0"), or "package.module:name", a class or
    function that is called without arguments (with render_mode, if it takes one).
    Environments of the old Gym API are adapted.

    Raises:
        UnknownEnvironmentError: nothing goes by this name; lists close matches.
        MissingPackageError: a package is missing; says what to install.
        UnsupportedSpaceError: names the offending part of the space.
    """
    name = flags.env
    if atari_wrappers.atari_game(name):
        env = atari_wrappers.make_atari(flags, render_mode)
    elif ":" in name and not re.search(r"-v\d+$", name):
        env = _from_python_path(name, render_mode)
    else:
        env = _from_gymnasium(name, render_mode)
    try:
        check_observation_space(env.observation_space)
        check_action_space(env.action_space)
    except UnsupportedSpaceError as error:
        env.close()
        raise UnsupportedSpaceError(f"--env {name}: {error}") from None
    return env


def _from_gymnasium(name: str, render_mode: str | None) -> gymnasium.Env:
    if name.startswith("MinAtar/") and "MinAtar/Breakout-v1" not in gymnasium.registry:
        try:
            minatar = importlib.import_module("minatar.gym")
        except ImportError as error:
            raise MissingPackageError(
                f"--env {name} needs: pip install minatar"
            ) from error
        minatar.register_envs()
    try:
        env = gymnasium.make(name, render_mode=render_mode, disable_env_checker=True)
        return MinAtarGame(env) if name.startswith("MinAtar/") else env
    except gymnasium.error.UnregisteredEnv as error:
        close = _close_matches(name)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise UnknownEnvironmentError(
            f"--env {name}: no environment goes by this name.{hint} Allowed are Atari "
            "and other Gymnasium ids, package.module:Id-v0 for those that a package "
            "registers (such as minigrid:MiniGrid-Empty-5x5-v0), and "
            "package.module:Class."
        ) from error
    except gymnasium.error.DeprecatedEnv as error:  # names the version to take
        raise UnknownEnvironmentError(f"--env {name}: {error}") from error
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingPackageError(f"--env {name} needs a package: {error}") from error
    except ModuleNotFoundError as error:
        package = (error.name or name.partition(":")[0]).partition(".")[0]
        raise MissingPackageError(
            f"--env {name}: {error} Try: pip install {package}"
        ) from error
    except ImportError as error:  # a name that has moved, a system library
        raise MissingPackageError(f"--env {name}: {error}") from error


class MinAtarGame(gymnasium.Wrapper):
    """Begins each game without the last action of the game before.

    MinAtar repeats that one by chance, so that a game would not depend on its seed and
    its actions alone.
    """

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.unwrapped.game.last_action = 0  # type: ignore[attr-defined] # MinAtar's
        return self.env.reset(seed=seed, options=options)


def _close_matches(name: str) -> list[str]:
    """Up to three known ids that look like `name`."""
    games = atari_wrappers.game_names()
    known = [f"{game}NoFrameskip-v4" for game in games]
    known += [f"ALE/{game}-v5" for game in games]
    known += list(gymnasium.registry)
    by_lower_case = {id.lower(): id for id in known}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=3, cutoff=0.7)
    return [by_lower_case[id] for id in close]


def _from_python_path(name: str, render_mode: str | None) -> gymnasium.Env:
    module_name, _, path = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise MissingPackageError(
            f"--env {name}: {error}. For a package: pip install {package}; for a file "
            "of your own: run in its directory or set PYTHONPATH."
        ) from error
    try:
        make = operator.attrgetter(path)(module)
    except AttributeError as error:
        close = difflib.get_close_matches(path, dir(module))
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise UnknownEnvironmentError(
            f"--env {name}: module {module_name} has no {path}.{hint}"
        ) from error
    takes_mode = render_mode is not None and _takes(make, "render_mode")
    env = make(render_mode=render_mode) if takes_mode else make()
    return OldGymAdapter(env, render_mode) if _has_old_api(env) else env


def _takes(function: Callable, parameter: str) -> bool:
    """True if `function` accepts this keyword argument by name."""
    try:
        return parameter in inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C: nothing to inspect
        return False


def _has_old_api(env: Any) -> bool:
    """True if `env` does not follow Gymnasium's API; resets it to see."""
    if not isinstance(env, gymnasium.Env):
        return True
    if not _takes(env.unwrapped.reset, "seed") or _takes(env.reset, "return_info"):
        return True
    return not _is_observation_and_info(env.reset(), env.observation_space)


def _is_observation_and_info(result: Any, space: spaces.Space) -> bool:
    """Tells what Gymnasium's reset() returns from a bare observation, even a tuple."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    return (
        is_pair
        and isinstance(result[1], dict)
        and not (isinstance(space, spaces.Tuple) and space.contains(result))
    )


class OldGymAdapter(gymnasium.Env):
    """An environment of the old Gym API, seen through Gymnasium's.

    Understands every mix found in the wild: reset() with or without a seed and an info,
    seed(), step() of four or five values, info["TimeLimit.truncated"], render(mode),
    spaces of the gym package (which is not imported here).
    """

    def __init__(self, env: Any, render_mode: str | None = None):
        self.env = env
        self.render_mode = render_mode
        self.metadata = {"render_modes": [render_mode] if render_mode else []}
        self.observation_space = convert_space(env.observation_space)
        self.action_space = convert_space(env.action_space)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        arguments = {}
        if seed is not None and _takes(self.env.reset, "seed"):
            arguments["seed"] = seed
        elif seed is not None and hasattr(self.env, "seed"):
            self.env.seed(seed)
        result = self.env.reset(**arguments)
        if _is_observation_and_info(result, self.observation_space):
            return result
        return result, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if isinstance(self.action_space, spaces.Discrete):
            action = int(action)  # some check the type
        result = self.env.step(action)
        if len(result) == 5:
            return result
        observation, reward, done, info = result
        truncated = bool(info.get("TimeLimit.truncated", False))
        return observation, reward, bool(done) and not truncated, truncated, info

    def render(self) -> Any:
        if self.render_mode is not None and _takes(self.env.render, "mode"):
            return self.env.render(mode=self.render_mode)
        return self.env.render()

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()


def convert_space(space: Any) -> spaces.Space:
    """The Gymnasium space that equals a space of the gym package.

    Raises:
        UnsupportedSpaceError: there is none.
    """
    if isinstance(space, spaces.Space):
        return space
    kind = type(space).__name__
    if kind == "Box":
        return spaces.Box(space.low, space.high, space.shape, space.dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(space.nvec)
    if kind == "MultiBinary":
        return spaces.MultiBinary(space.n)
    if kind == "Dict":
        return spaces.Dict({k: convert_space(s) for k, s in space.spaces.items()})
    if kind == "Tuple":
        return spaces.Tuple([convert_space(s) for s in space.spaces])
    raise UnsupportedSpaceError(
        f"{space!r} of type {type(space)} is none of Box, Discrete, MultiDiscrete, "
        "MultiBinary, Dict, Tuple"
    )


def check_observation_space(space: spaces.Space, place: str = "observation") -> None:
    """Raise UnsupportedSpaceError unless buffers can hold `space`, nested or not."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        children = (
            space.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        )
        for key, child in children:
            check_observation_space(child, f"{place}[{key!r}]")
    elif not isinstance(space, _ELEMENTARY_SPACES):
        raise UnsupportedSpaceError(
            f"{place} has the unsupported space {space}; allowed are Box, Discrete, "
            "MultiDiscrete, MultiBinary, and Dict and Tuple of those. Wrap the "
            "environment in a gymnasium.ObservationWrapper; docs/environments.md "
            "shows how."
        )


def check_action_space(space: spaces.Space) -> None:
    """Raise UnsupportedSpaceError unless a policy can act in `space`."""
    if isinstance(space, spaces.Discrete):
        return
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return
    raise UnsupportedSpaceError(
        f"action has the unsupported space {space}; allowed are Discrete, "
        "MultiDiscrete of one dimension, and Box of floats. Wrap the environment in a "
        "gymnasium.ActionWrapper."
    )


# --- E environments together ----------------------------------------------------------


def game_seed(seed: int, index: int, game: int) -> int:
    """The seed, in [0, 2**31), of game number `game` of environment number `index`."""
    return int(np.random.SeedSequence([seed, index, game]).generate_state(1)[0] >> 1)


class SeededGames(gymnasium.Wrapper):
    """Seeds each game, so that it is a function of (seed, index, game, actions).

    Every reset() starts the next game, except the one after a step with
    info["game_over"] False, which goes on with the game (a lost life). Logs the actions
    of the current game if asked to, for `replay`. Of each info it keeps the fields in
    EXTRA_FIELDS and, where an episode ends, "game_over".
    """

    def __init__(self, env: gymnasium.Env, seed: int, index: int, log_actions: bool):
        super().__init__(env)
        self.seed = seed
        self.index = index
        self.log_actions = log_actions
        self.game = -1
        self.actions: list[np.ndarray] = []
        self.game_goes_on = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if self.game_goes_on:
            observation, _ = self.env.reset(options=options)
        else:
            self.game += 1
            self.actions = []
            seed = game_seed(self.seed, self.index, self.game)
            observation, _ = self.env.reset(seed=seed, options=options)
        self.game_goes_on = False
        return observation, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.log_actions:
            self.actions.append(np.array(action))
        observation, reward, terminated, truncated, info = self.env.step(action)
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


def _extra_fields(info: dict[str, Any]) -> dict[str, np.ndarray]:
    kept = {}
    for name, (shape, dtype) in EXTRA_FIELDS.items():
        if name in info:
            value = np.asarray(info[name], dtype)
            if value.shape != shape:
                raise ValueError(
                    f"EXTRA_FIELDS declares {name!r} with shape {shape}, but the "
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
        ...               EXTRA_FIELDS; where done, from the end of the ended episode

    Environments reset in the step that ends an episode. In the row of `initial()` done
    is true and all else but the observation is zero: no episode has ended there.

    After a step with truncated environments, `final_observation` holds the real last
    observations before the reset, nested [E, ...] and valid where the row is truncated;
    otherwise it is None.

    Actions are int64 [E] (Discrete), int64 [E, K] (MultiDiscrete) or float32
    [E, *shape] (Box). Integers count from 0, whatever the `start` of the space; floats
    are clipped into its bounds.

    Reads the flags env, envs, seed, sync and, for Atari, those of atari_wrappers.py.
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

        The numbers, counted over the whole run, tell the environments' seeds apart.
        Raises what `create_env` raises.
        """
        self.flags = flags
        self.num_envs = num_envs
        self.seed = flags.seed
        self.indices = range(first_index, first_index + num_envs)
        self.log_actions = getattr(flags, "sync", False)
        if flags.envs not in ("native", "python"):
            raise ValueError(f"--envs must be native or python, got {flags.envs!r}")
        is_atari = atari_wrappers.atari_game(flags.env) is not None
        self.frames_per_step: int = flags.frame_skip if is_atari else 1
        self.exact_resume = not (
            is_atari and flags.envs == "native" and render_mode is None
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
        return SeededGames(env, self.seed, index, self.log_actions)

    def set_seed(self, seed: int, first_index: int) -> None:
        """Take another seed and other numbers; only before the first `initial()`."""
        self.seed = seed
        self.indices = range(first_index, first_index + self.num_envs)
        if self.exact_resume:
            for env, index in zip(self.envs.envs, self.indices, strict=True):
                env.seed, env.index = seed, index

    def initial(self) -> dict[str, Any]:
        """Start new games and return the first row."""
        # SeededGames finds its own seeds; the native path takes these.
        seeds = [game_seed(self.seed, i, self._initial_calls) for i in self.indices]
        self._initial_calls += 1
        observation, _ = self.envs.reset(seed=seeds)
        self._zero_counts()
        action_shape, action_dtype = self._action_shape_and_dtype()
        none = np.zeros(self.num_envs, np.bool_)
        self._row = self._make_row(
            observation=observation,
            reward=np.zeros(self.num_envs),
            done=~none,
            truncated=none,
            game_over=none.copy(),
            last_action=np.zeros(action_shape, action_dtype),
            infos={},
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
        game_over = (
            done & infos["final_info"]["game_over"] if done.any() else done.copy()
        )

        self.final_observation = (
            self._stack_final(infos["final_obs"], truncated)
            if truncated.any()
            else None
        )
        self._episode_return += reward.astype(np.float32)
        self._episode_step += 1
        self._game_return += reward.astype(np.float32)
        self._game_step += 1
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
        return {
            "observation": observation,
            "reward": reward.astype(np.float32),
            "done": done,
            "truncated": truncated,
            "episode_return": self._episode_return.copy(),
            "episode_step": self._episode_step.copy(),
            "game_return": self._game_return.copy(),
            "game_step": self._game_step.copy(),
            "game_over": game_over,
            "last_action": last_action,
            **{name: self._extra_field(name, infos, done) for name in EXTRA_FIELDS},
        }

    def _extra_field(
        self, name: str, infos: dict[str, Any], done: np.ndarray
    ) -> np.ndarray:
        shape, dtype = EXTRA_FIELDS[name]
        field = np.zeros((self.num_envs, *shape), dtype)
        for source, valid in ((infos, ~done), (infos.get("final_info", {}), done)):
            if name in source:
                # Gymnasium marks by "_name" which environments' info has the name.
                valid = valid & source.get(f"_{name}", True)
                field[valid] = source[name][valid]
        return field

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
                "native Atari games can't be saved in the middle; use --envs python"
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
        return _map(_to_tensor, state)

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
        state = _map(_to_numpy, state)
        replays = zip(self.envs.envs, state["games"], state["actions"], strict=True)
        observation = self._stack([env.replay(*replay) for env, *replay in replays])
        saved = state["row"]["observation"]
        if not all(map(_equal, _leaves(observation), _leaves(saved))):
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


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _map(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map(function, value) for value in tree)
    return function(tree)


def _leaves(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    _map(leaves.append, tree)
    return leaves


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
