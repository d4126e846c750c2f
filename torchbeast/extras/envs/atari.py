"""Atari games with the preprocessing of the IMPALA paper, in two implementations.

Their flags are in flags.py.

`make_atari` builds one environment from Python wrappers, `make_atari_vec` many in C++
(ale-py's AtariVectorEnv). Both give the same frames, rewards and episode ends for the
same seeds and actions. docs/atari.md compares them.
"""

import argparse
import functools
import json
import re
from collections.abc import Callable
from typing import Any

import ale_py
import ale_py.roms
import gymnasium
import numpy as np
from ale_py.env import AtariEnv
from ale_py.vector_env import AtariVectorEnv
from gymnasium.wrappers import FrameStackObservation, ResizeObservation

from torchbeast.base.errors import FlagError
from torchbeast.envs.extra_fields import GAME_OVER
from torchbeast.envs.values import as_stack

FRAME_SIZE = 84  # height and width in pixels
STACKED_FRAMES = 4
STACK_SHAPE = (STACKED_FRAMES, FRAME_SIZE, FRAME_SIZE)  # of an observation

Reset = tuple[Any, dict[str, Any]]  # observation, info


def make(
    flags: argparse.Namespace, render_mode: str | None, arguments: dict[str, Any]
) -> gymnasium.Env | None:
    """A single environment, for the Python wrappers and for videos."""
    if not atari_game(flags.env):
        return None
    return make_atari(flags, render_mode, **arguments)


def vector_maker(
    flags: argparse.Namespace, render_mode: str | None, index: int
) -> Callable[[int | None], Any] | None:
    """How to make E environments in C++."""
    if flags.atari_backend != "native" or render_mode or not atari_game(flags.env):
        return None
    return functools.partial(make_atari_vec, flags)


def frames_per_step(flags: argparse.Namespace) -> int | None:
    return flags.frame_skip if atari_game(flags.env) else None


def is_stack(flags: argparse.Namespace, space: gymnasium.Space) -> bool:
    """Whether the observations are the stacks that are made here."""
    return space.shape == STACK_SHAPE and atari_game(flags.env) is not None


# Two-player games. Loading one of them ends the process.
_TWO_PLAYER_ROMS = {"combat", "joust", "maze_craze", "warlords"}


def atari_game(env_id: str) -> str | None:
    """The ROM name of an Atari id, such as "space_invaders"; None for any other id.

    All suffixes name the same game: the flags determine the preprocessing. A bare name
    is of Atari with v0 and v4 only: Blackjack-v1 is a card game of Gymnasium.
    """
    ids = r"(ALE/)?([A-Za-z0-9]+?)(NoFrameskip|Deterministic)?-v(\d+)"
    if not (match := re.fullmatch(ids, env_id)):
        return None
    namespace, game, suffix, version = match.groups()
    if not namespace and not suffix and version not in ("0", "4"):
        return None
    roms = set(ale_py.roms.get_all_rom_ids()) - _TWO_PLAYER_ROMS
    return {rom.title().replace("_", ""): rom for rom in roms}.get(game)


class SeededAtari(AtariEnv):
    """Passes the seed of sticky actions on unchanged, as the native path does."""

    def seed_game(self, seed: int | None = None) -> tuple[int, int]:
        if seed is None:
            return super().seed_game()
        self.ale.setInt("random_seed", seed)
        return seed, seed


class StartOfGame(gymnasium.Wrapper):
    """Starts with 0 to `noop_max` random no-ops; FIRE, if it exists, is the first."""

    def __init__(self, env: gymnasium.Env, noop_max: int):
        super().__init__(env)
        meanings: list[str] = env.get_wrapper_attr("get_action_meanings")()
        self.noop = meanings.index("NOOP")
        self.fire = [meanings.index("FIRE")] if "FIRE" in meanings else []
        self.noop_max = noop_max
        # The only class of NumPy with the numbers of the native path's std::mt19937.
        self.rng = np.random.RandomState()

    def reset(self, *, seed: int | None = None, **more: Any) -> Reset:
        if seed is not None:
            self.rng.seed(seed)
        observation, info = self.env.reset(seed=seed, **more)
        # Maps 32 random bits to 0..noop_max, as libstdc++ does.
        bits = int(self.rng.randint(2**32, dtype=np.uint32))
        frames = bits * (self.noop_max + 1) >> 32
        for action in self.fire + [self.noop] * (frames - len(self.fire)):
            observation, _, terminated, _, info = self.env.step(action)
            if terminated:
                observation, info = self.env.reset(**more)
        return observation, info


class SkipFrames(gymnasium.Wrapper):
    """Repeats each action; returns the sum of rewards, the maximum of two last frames.

    The maximum shows sprites that the Atari 2600 draws only in every other frame. The
    step that reaches `max_frames`, counted from the agent's first action, truncates.
    """

    def __init__(self, env: gymnasium.Env, frame_skip: int, max_frames: int):
        super().__init__(env)
        self.frame_skip, self.max_frames = frame_skip, max_frames

    def reset(self, **arguments: Any) -> Reset:
        self.frames = 0
        return self.env.reset(**arguments)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        total_reward, shown = 0.0, []
        for _ in range(self.frame_skip):
            frame, reward, terminated, _, info = self.env.step(action)
            total_reward += float(reward)
            shown.append(frame)
            if terminated:
                break
        self.frames += len(shown)
        frame = np.maximum(*shown[-2:]) if len(shown) > 1 else frame
        truncated = self.frames >= self.max_frames and not terminated
        return frame, total_reward, terminated, truncated, info


class LifeLoss(gymnasium.Wrapper):
    """Ends the episode, but not the game, if a life is lost: info[GAME_OVER] is False.

    Then reset() returns the last observation again. A reset() with a seed, or in the
    middle of an episode, starts a new game.
    """

    life_lost = False

    def reset(self, *, seed: int | None = None, **more: Any) -> Reset:
        if not self.life_lost or seed is not None:
            self.last = self.env.reset(seed=seed, **more)
        self.life_lost = False
        return self.last

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        lives = self.last[1]["lives"]
        observation, reward, terminated, truncated, info = self.env.step(action)
        # Some games continue without lives; then only the end of the game counts.
        life_lost = 0 < info["lives"] < lives
        self.life_lost = life_lost and not (terminated or truncated)
        info[GAME_OVER] = not self.life_lost  # whoever else ends the episode
        self.last = (observation, info)
        return observation, reward, terminated or life_lost, truncated, info


def make_atari(
    flags: argparse.Namespace, render_mode: str | None = None, **arguments: Any
) -> gymnasium.Env:
    """Makes one environment: observations [4, 84, 84] uint8, unclipped rewards."""
    env: gymnasium.Env = SeededAtari(
        atari_game(flags.env) or flags.env,
        obs_type="grayscale",
        frameskip=1,
        repeat_action_probability=flags.sticky_actions,
        full_action_space=flags.full_action_space,
        max_num_frames_per_episode=0,  # SkipFrames truncates
        render_mode=render_mode,  # type: ignore[arg-type] # a literal; AtariEnv checks it
        **arguments,
    )
    env = StartOfGame(env, flags.noop_max)
    env = SkipFrames(env, flags.frame_skip, flags.max_episode_frames)
    env = ResizeObservation(env, (FRAME_SIZE, FRAME_SIZE))  # by averages
    # The oldest first; a game begins with three black ones.
    env = FrameStackObservation(env, STACKED_FRAMES, padding_type="zero")
    return LifeLoss(env) if flags.life_loss else env


class NativeAtari(gymnasium.vector.VectorWrapper):
    """ale-py's AtariVectorEnv with the infos that Gymnasium's SAME_STEP mode requires.

    If a step ends an episode, infos get "final_obs" [E, 4, 84, 84], valid for truncated
    environments, and "final_info" with "game_over" [E] bool, False after a lost life.
    It truncates games itself: ale-py's last observation lacks the last frames.
    """

    def __init__(self, env: AtariVectorEnv, max_frames: int):
        super().__init__(env)
        self.single_observation_space = as_stack(env.single_observation_space)
        self.max_frames = max_frames
        self.game_start, self.first_frame = np.zeros((2, self.num_envs), np.int64)

    def _note_new_games(self, info: dict[str, np.ndarray], new: Any) -> None:
        self.game_start[new] = _game_start(info)[new]
        self.first_frame[new] = info["episode_frame_number"][new]

    def reset(self, *, seed: Any = None, **more: Any) -> Reset:
        seeds: Any = None if seed is None else np.asarray(seed)
        observation, info = self.env.reset(seed=seeds, **more)
        self._note_new_games(info, slice(None))
        return observation, info

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, _, info = self.env.step(actions)
        # If a game is over, ale-py has already started the next one. Only the number of
        # frames before the game shows this.
        over = _game_start(info) != self.game_start
        played = info["episode_frame_number"] - self.first_frame
        truncated = (played >= self.max_frames) & ~over
        new_game = over | truncated
        final = {}
        if (terminated | truncated).any():
            final_info = {key: value.copy() for key, value in info.items()}
            final_info["lives"][over] = 0
            final_info["game_over"] = new_game
            final = {"final_obs": observation, "final_info": final_info}
        if truncated.any():
            observation, info = self.env.reset(options={"reset_mask": truncated})
        self._note_new_games(info, new_game)
        return observation, reward, terminated, truncated, info | final


def _game_start(info: dict[str, np.ndarray]) -> np.ndarray:
    """Emulator frames before the current game, [E]."""
    return info["frame_number"] - info["episode_frame_number"]


def make_atari_vec(flags: argparse.Namespace, num_envs: int | None) -> NativeAtari:
    """Makes environments in C++. FlagError: a flag needs the Python wrappers."""
    if flags.wrapper or flags.mask_actions or json.loads(flags.env_kwargs or "{}"):
        raise FlagError(
            f"for {flags.env}, --wrapper, --mask_actions and --env_kwargs need "
            "--atari_backend python"
        )
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
    env = AtariVectorEnv(  # by default of the same frames
        atari_game(flags.env) or flags.env,
        num_envs or 1,
        num_threads=1,  # actor processes run in parallel already
        autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP,
        max_num_frames_per_episode=2**31 - 1,  # NativeAtari truncates
        repeat_action_probability=flags.sticky_actions,
        full_action_space=flags.full_action_space,
        frameskip=flags.frame_skip,
        noop_max=flags.noop_max + 1,  # ale-py draws from 0 to noop_max - 1
        # episodic_life would restart the game at each lost life
        life_loss_info=flags.life_loss,
        reward_clipping=False,
    )
    return NativeAtari(env, flags.max_episode_frames)
