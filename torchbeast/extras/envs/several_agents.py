"""Several agents (PettingZoo's parallel API): each agent of a game is an environment.

So E environments are E / N games of N agents. docs/several_agents.md is the manual.
"""

import argparse
import copy
import functools
import json
import typing
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from torchbeast.base.errors import FlagError
from torchbeast.base.named import find_object
from torchbeast.envs.extra_fields import EXTRA_FIELDS, select
from torchbeast.envs.make_env import MASKS, call, names_python, takes, wrap
from torchbeast.envs.seeded_games import game_seed
from torchbeast.envs.values import (
    AGENT,
    InvalidEnvironmentError,
    add_part,
    check_mask,
    plain_space,
    read,
)


def vector_maker(
    flags: argparse.Namespace, render_mode: str | None, index: int
) -> Callable[[int | None], Any] | None:
    """How to make games with E agents; None if --env is no parallel environment."""
    if names_python(flags.env):
        function = find_object(f"--env {flags.env}", flags.env)
        if makes_parallel(flags.env, function) and not takes(function, "num_envs"):
            return functools.partial(ParallelGames, flags, render_mode, index)
    return None


def makes_parallel(name: str, function: Any) -> bool:
    """Whether it is a subclass of ParallelEnv, or returns one by name or annotation."""
    kind = getattr(function, "__annotations__", {}).get("return", function)
    kind = typing.get_origin(kind) or kind
    names = [getattr(x, "__name__", x) for x in getattr(kind, "__mro__", (kind,))]
    return "ParallelEnv" in names or name.endswith((":parallel_env", ".parallel_env"))


def make_parallel(
    flags: argparse.Namespace, render_mode: str | None, index: int
) -> Any:
    """The parallel environment of --env, in its wrappers."""
    arguments = {"render_mode": render_mode} if render_mode else {}
    arguments |= json.loads(flags.env_kwargs or "{}")
    flag = f"--env {flags.env}"
    function = find_object(flag, flags.env)
    return wrap(flags, call(flag, function, arguments, env_index=index), index)


class Row(NamedTuple):
    """What an agent gets; `last` is what it observed at the end of its game."""

    observation: Any
    info: dict[str, Any]
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    game_over: bool = False
    last: Any = None


class ParallelGame:
    """A parallel environment whose games are functions of a seed and the actions.

    A game that is over begins anew. All methods return the rows of all possible agents.
    The row of an absent agent does not count; it shows the observation of another.
    """

    def __init__(
        self, flags: argparse.Namespace, render_mode: str | None, index: int
    ) -> None:
        self.name, self.log_actions = flags.env, getattr(flags, "sync", False)
        self.env = make_parallel(flags, render_mode, index)
        self.agents = list(getattr(self.env, "possible_agents", ()))
        if not self.agents or hasattr(self.env, "agent_iter"):
            self._fail(f"{self.env!r:.99} is no ParallelEnv with possible_agents")
        if len(set(self.agents)) < len(self.agents):
            self._fail(f"possible_agents has a name twice: {self.agents}")
        self.space = space = self._common("observation_space")
        self.action_space = self._common("action_space")
        self.add_mask: Any = lambda observation, info: observation
        if flags.mask_actions:
            one: Any = gymnasium.Env()
            one.observation_space, one.action_space = space, self.action_space
            masked = find_object("--mask_actions", MASKS)(one)
            space, self.add_mask = masked.observation_space, masked.add_mask
        if len(self.agents) > 1:
            number = spaces.MultiBinary(len(self.agents))
            space = spaces.Dict(add_part(space, AGENT, number))
        self.observation_space = space
        check_mask(space, self.action_space)
        self.set_seed(flags.seed, index)

    def _fail(self, what: str) -> NoReturn:
        raise InvalidEnvironmentError(f"--env {self.name}: {what}")

    def _common(self, kind: str) -> Any:
        """The observation_space or action_space of all agents."""
        found = {x: plain_space(getattr(self.env, kind)(x)) for x in self.agents}
        first = found[self.agents[0]]
        if any(x != first for x in found.values()):
            self._fail(
                f"the {kind} must be one for all, or padded in a --wrapper: {found}"
            )
        return first

    def set_seed(self, seed: int, index: int) -> None:
        """Changes seed and index. The next reset() starts the first game."""
        self.seed, self.index, self.game = seed, index, -1

    def _read(self, agents: Iterable[int], *results: Any) -> dict:
        """What these agents got, by number: observation, ..., info."""
        found = {}
        *values, infos = results
        for i in agents:
            agent = self.agents[i]
            if any(agent not in x for x in values):
                self._fail(f"no value for {agent!r}, who is in `agents` or has acted")
            info = infos.get(agent, {})
            observation, *numbers = (x[agent] for x in values)
            observation = read(self.space, observation)
            found[i] = (self.add_mask(observation, info), *numbers, select(info))
        return found

    def _rows(self, found: dict) -> list[Row]:
        N, filler = len(self.agents), next(iter(found.values()))[0]
        rows = []
        for i, number in enumerate(np.eye(N, dtype=np.int8)):
            observation, *_, info = found.get(i, (filler, {}))
            if N > 1:
                observation = add_part(observation, AGENT, number * (i in found))
            rows.append(Row(observation, info))
        return rows

    def _present(self) -> set[int]:
        listed = getattr(self.env, "agents", ())
        return {i for i, x in enumerate(self.agents) if x in listed}

    def _reset(self) -> dict:
        self.game += 1
        self.actions: list[np.ndarray] = []
        result = self.env.reset(seed=game_seed(self.seed, self.index, self.game))
        self.present = self._present()
        if not self.present:
            self._fail("after reset() the list `agents` has none of possible_agents")
        return self._read(self.present, *result)

    def reset(self) -> list[Row]:
        return self._rows(self._reset())

    def step(self, actions: np.ndarray) -> list[Row]:
        """Takes the actions [N, ...] of the agents that are present."""
        if self.log_actions:
            self.actions.append(np.array(actions))
        chosen = {self.agents[i]: actions[i] for i in sorted(self.present)}
        result = self.env.step(chosen)
        old = self._read(self.present, *result)
        listed = self._present()
        stay = {i for i in listed & old.keys() if not any(old[i][2:4])}
        begin = listed - old.keys()
        if (stay or begin) and (dead := listed - stay - begin):
            ended = self.agents[min(dead)]
            self._fail(f"step() ended the game of {ended!r}, but `agents` still has it")
        new = {i: old[i] for i in stay} | self._read(begin, *result[::4])
        self.present, last = set(new), self._rows(old)
        if not new:
            last = copy.deepcopy(last)  # reset() may overwrite them
            new, begin = self._reset(), set(range(len(self.agents)))
        rows = self._rows(new)
        for i, row in enumerate(rows):
            if i in old:
                _, reward, terminated, truncated, _ = old[i]
                over = i not in stay
                cut = over and bool(truncated) and not terminated
                ends = reward, over and not cut, cut, over
                rows[i] = Row(row.observation, row.info, *ends, last[i])
            else:  # this row did not count until a game of the agent begins
                rows[i] = row._replace(terminated=i in begin, last=last[i])
        return rows

    def replay(self, game: int, actions: np.ndarray) -> list[Any]:
        """Plays the actions in game number `game`; returns the last observations."""
        self.game = game - 1
        rows = self.reset()
        for each in actions.reshape(-1, len(self.agents), *actions.shape[1:]):
            rows = self.step(each)
        return [row.observation for row in rows]

    def close(self) -> None:
        self.env.close()


class ParallelGames:
    """G games of N agents as a vector environment of G x N, in SAME_STEP mode.

    Raises FlagError if num_envs is no multiple of N. None is N, one game.
    """

    def __init__(
        self,
        flags: argparse.Namespace,
        render_mode: str | None,
        index: int,
        num_envs: int | None,
    ) -> None:
        game = ParallelGame(flags, render_mode, index)
        N = len(game.agents)
        self.num_envs = num_envs or N
        if self.num_envs % N:
            raise FlagError(
                f"--envs_per_actor {num_envs} must be a multiple of {N}, the agents of "
                f"a game of --env {flags.env}"
            )
        self.single_observation_space = game.observation_space
        self.single_action_space = game.action_space
        more = range(N, self.num_envs, N)
        make = functools.partial(ParallelGame, flags, render_mode)
        self.envs = [game, *(make(index + i) for i in more)]

    def _join(self, rows: Iterable[Row]) -> tuple[Any, dict[str, Any]]:
        """Observations [G * N, ...] and the EXTRA_FIELDS of infos, as arrays."""
        observations, infos = zip(*(row[:2] for row in rows), strict=True)
        out: Any = create_empty_array(self.single_observation_space, self.num_envs)
        return concatenate(self.single_observation_space, observations, out), {
            name: np.array([x.get(name, np.zeros(y.shape)) for x in infos], y.dtype)
            for name, y in EXTRA_FIELDS.items()
        }

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return self._join(row for game in self.envs for row in game.reset())

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        """As Gymnasium's SAME_STEP mode, with final_info["game_over"]."""
        parts = zip(self.envs, np.split(actions, len(self.envs)), strict=True)
        rows = [row for game, part in parts for row in game.step(part)]
        *_, reward, terminated, truncated, game_over, last = zip(*rows, strict=True)
        observation, info = self._join(rows)
        final_obs, final_info = self._join(last)
        final_info["game_over"] = np.array(game_over)
        info |= {"final_obs": final_obs, "final_info": final_info}
        numbers = [float(x) for x in reward], terminated, truncated
        return observation, *map(np.array, numbers), info

    def render(self) -> list[Any]:
        return [self.envs[0].env.render()]
