"""One environment whose games are functions of a seed and the actions."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from torchbeast.envs import extra_fields
from torchbeast.envs.checks import Checker, close_quietly

GAME_OVER = "torchbeast.game_over"  # in an info: False if only an episode has ended


def game_seed(seed: int, index: int, game: int) -> int:
    """The seed, in [0, 2**31), of game number `game` of environment number `index`."""
    return int(np.random.SeedSequence([seed, index, game]).generate_state(1)[0] >> 1)


class SeededGames(gymnasium.Wrapper):
    """Seeds each game, so that it is a function of (seed, index, game, actions).

    Each reset() starts the next game, unless the last step had info[GAME_OVER] False
    (a lost life): then the game continues. The infos keep only EXTRA_FIELDS and, if an
    episode ends, "game_over". Checks a sample of what the environment returns.

    Args:
      index: the number of the environment in the run.
      log_actions: keep the actions of the current game, for `replay`.
      run: calls a method of the environment: the `run` of its contextvars.Context.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        seed: int,
        index: int,
        log_actions: bool,
        checker: Checker,
        run: Callable[..., Any],
    ):
        super().__init__(env)
        self.seed = seed
        self.index = index
        self.log_actions = log_actions
        self.checker = checker
        self.until_check = 0  # calls; counted here, because each step passes here
        self._reset = functools.partial(run, env.reset)
        self._step = functools.partial(run, env.step)
        self._run = run
        self.game = -1
        self.actions: list[np.ndarray] = []
        self.game_goes_on = False

    def set_seed(self, seed: int, index: int) -> None:
        """Changes seed and index. The next reset() starts the first game."""
        self.seed, self.index = seed, index
        self.game = -1
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
            result = self.checker.call("reset", self._reset, **arguments)
            self.until_check = self.checker.until_next()
            self._check_fields(result[1])
        else:
            result = self._reset(**arguments)
        observation, info = self.checker.admit("reset", result)
        return observation, extra_fields.select(info, "observation")

    def _check_fields(self, info: dict[str, Any]) -> None:
        for name, field in extra_fields.EXTRA_FIELDS.items():
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
            result = self.checker.call("step", self._step, action)
            self.until_check = self.checker.until_next()
        else:
            result = self._step(action)
        result = self.checker.admit("step", result)
        observation, reward, terminated, truncated, info = result
        kept: dict[str, Any] = extra_fields.select(info)
        self.game_goes_on = False
        if terminated or truncated:
            kept["game_over"] = bool(truncated or info.get(GAME_OVER, True))
            self.game_goes_on = not kept["game_over"]
            observation = copy.deepcopy(observation)  # reset() may overwrite it
        return observation, reward, terminated, truncated, kept

    def render(self) -> Any:
        return self._run(self.env.render)

    def close(self) -> None:
        close_quietly(functools.partial(self._run, self.env.close), self.checker.warn)

    def replay(self, game: int, actions: Sequence[Any]) -> Any:
        """Plays the actions in game number `game`; returns the last observation."""
        self.game = game - 1
        self.game_goes_on = False
        observation, _ = self.reset()
        for action in actions:
            observation, _, terminated, truncated, _ = self.step(action)
            if terminated or truncated:
                observation, _ = self.reset()
        return observation


class MinAtarGame(gymnasium.Wrapper):
    """Forgets the last action of the previous game at reset().

    MinAtar repeats the last action with some probability. Without this wrapper, a game
    would depend on the previous one, and not only on its seed and actions.
    """

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        game: Any = self.get_wrapper_attr("game")
        game.last_action = 0
        return self.env.reset(seed=seed, options=options)
