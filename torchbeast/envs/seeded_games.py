"""Environments whose games are functions of a seed and the actions."""

import argparse
import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from torchbeast.envs import extra_fields, make_env
from torchbeast.envs.extra_fields import GAME_OVER
from torchbeast.envs.values import InvalidEnvironmentError, plain_space, read


def game_seed(seed: int, index: int, game: int) -> int:
    """The seed, in [0, 2**31), of game number `game` of environment number `index`."""
    return int(np.random.SeedSequence([seed, index, game]).generate_state(1)[0] >> 1)


class SeededGames(gymnasium.Wrapper):
    """Seeds each game, so that it is a function of (seed, index, game, actions).

    Each reset() starts the next game, unless the last step had info[GAME_OVER] False
    (a lost life): then the game continues. The infos keep only EXTRA_FIELDS and, if an
    episode ends, "game_over". With `flags.sync` it keeps the actions of the current
    game, for `replay`.
    """

    def __init__(
        self, flags: argparse.Namespace, render_mode: str | None, index: int
    ) -> None:
        super().__init__(make_env.create_env(flags, render_mode, index))
        self._space = self.env.observation_space
        self.log_actions = getattr(flags, "sync", False)
        self.actions: list[np.ndarray] = []
        self.set_seed(flags.seed, index)

    def set_seed(self, seed: int, index: int) -> None:
        """Changes seed and index. The next reset() starts the first game."""
        self.seed, self.index = seed, index
        self.game = -1
        self.game_goes_on = False

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        seeds: dict[str, Any] = {}
        if not self.game_goes_on:
            self.game += 1
            self.actions = []
            seeds = {"seed": game_seed(self.seed, self.index, self.game)}
        self.game_goes_on = False
        observation, info = self.env.reset(**seeds)
        return read(self._space, observation), extra_fields.select(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.log_actions:
            self.actions.append(np.array(action))
        observation, reward, terminated, truncated, info = self.env.step(action)
        if getattr(reward, "ndim", 0) or not isinstance(info, dict):
            found = f"reward {reward!r:.99}, info {info!r:.99}"
            raise InvalidEnvironmentError(f"{found}: must be a number and a dict")
        observation = read(self._space, observation)
        kept: dict[str, Any] = extra_fields.select(info)
        if terminated or truncated:
            kept["game_over"] = bool(truncated or info.get(GAME_OVER, True))
            self.game_goes_on = not kept["game_over"]
            observation = copy.deepcopy(observation)  # reset() may overwrite it
        return observation, reward, terminated, truncated, kept

    def replay(self, game: int, actions: Sequence[Any]) -> list[Any]:
        """Plays the actions; returns the last observation, a list as of all agents."""
        self.game = game - 1
        self.game_goes_on = False
        observation, _ = self.reset()
        for action in actions:
            observation, _, terminated, truncated, _ = self.step(action)
            if terminated or truncated:
                observation, _ = self.reset()
        return [observation]


def make_games(
    flags: argparse.Namespace, num_envs: int | None, render_mode: str | None, index: int
) -> Any:
    """Environments in one object, which resets those that end in the same step."""
    if make := make_env.first("vector_maker", flags, render_mode, index):
        return make(num_envs)
    indices = range(index, index + (num_envs or 1))
    games = [partial(SeededGames, flags, render_mode, i) for i in indices]
    same_step = gymnasium.vector.AutoresetMode.SAME_STEP
    try:
        return gymnasium.vector.SyncVectorEnv(games, autoreset_mode=same_step)
    except RuntimeError as error:
        if "single_" not in str(error):  # else two of them differ in a space
            raise
        raise InvalidEnvironmentError(f"--env {flags.env}: {error}") from error


def check_same_spaces(name: str, first: Any, other: Any) -> None:
    """Raises InvalidEnvironmentError if two instances of --env differ in a space."""
    for kind in "observation_space", "action_space":
        one, two = (plain_space(getattr(x, kind)) for x in (first, other))
        if one != two:
            raise InvalidEnvironmentError(
                f"--env {name}: all instances need the same spaces, but one has the "
                f"{kind} {one}, another {two}"
            )
