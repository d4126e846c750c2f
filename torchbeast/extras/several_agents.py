"""Several agents (PettingZoo's parallel API): each agent of a game is an environment.

docs/environments.md is the manual.
"""

import argparse
import contextlib
import copy
import functools
import json
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from torchbeast.base.errors import FlagError
from torchbeast.base.named import call_named, find_object, parse_paths
from torchbeast.envs import checks
from torchbeast.envs.action_masks import AGENT, MaskFromInfo, add_part, check_spaces
from torchbeast.envs.extra_fields import EXTRA_FIELDS, look_at_reset, select
from torchbeast.envs.seeded_games import game_seed


def makes_parallel(name: str, function: Any) -> bool:
    """Whether --env makes a parallel environment, as far as can be seen without a call.

    It is a class derived from ParallelEnv, or a function that is named parallel_env or
    annotated to return such a class.
    """
    kind = function
    if not isinstance(function, type):
        kind = None
        with contextlib.suppress(Exception):  # no annotations, or of unknown names
            kind = typing.get_type_hints(function).get("return")
    kinds = (kind, *typing.get_args(kind))  # of a union, all
    bases = [getattr(typing.get_origin(x) or x, "__mro__", ()) for x in kinds]
    is_named = name.endswith((":parallel_env", ".parallel_env"))
    return is_named or any(x.__name__ == "ParallelEnv" for x in sum(bases, ()))


def make_parallel(flags: argparse.Namespace, render_mode: str | None) -> Any:
    """The parallel environment of --env, in its wrappers."""
    flag, arguments = f"--env {flags.env}", json.loads(flags.env_kwargs or "{}")
    if render_mode:
        arguments = {"render_mode": render_mode, **arguments}
    env = call_named(flag, find_object(flag, flags.env), **arguments)
    for path, wrapper_arguments in parse_paths("--wrapper", flags.wrapper or ""):
        flag = f"--wrapper {path}"
        env = call_named(flag, find_object(flag, path), env, **wrapper_arguments)
    if not getattr(env, "possible_agents", None) or hasattr(env, "agent_iter"):
        raise checks.InvalidEnvironmentError(
            f"{flag} made {checks.describe(env)}, which is no environment of "
            "PettingZoo's parallel API with a list possible_agents"
        )
    return env


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

    Args:
      warn: called with an agent's number, a key and a message.
    """

    def __init__(
        self,
        flags: argparse.Namespace,
        render_mode: str | None,
        warn: Callable[[int, str, str], None],
    ) -> None:
        self.name, self.log_actions = flags.env, getattr(flags, "sync", False)
        self.run = checks.own_context()
        self.env = self.run(make_parallel, flags, render_mode)
        self.agents = list(self.env.possible_agents)
        space = self._common("observation_space")
        self.action_space = self._common("action_space")
        self.checkers = [
            checks.Checker(f"{self.name}, {agent}", space, functools.partial(warn, i))
            for i, agent in enumerate(self.agents)
        ]
        self.add_mask: Any = lambda observation, info: observation
        if flags.mask_actions:
            one: Any = gymnasium.Env()
            one.observation_space, one.action_space = space, self.action_space
            masked = MaskFromInfo(one, self.name)
            space, self.add_mask = masked.observation_space, masked.add_mask
        if len(self.agents) > 1:
            number = spaces.MultiBinary(len(self.agents))
            space = spaces.Dict(add_part(space, AGENT, number))
        self.observation_space = space
        self.set_seed(flags.seed, 0)

    def _common(self, kind: str) -> Any:
        """The observation_space or action_space of all agents."""
        space_of = getattr(self.env, kind, None)
        if not callable(space_of):
            raise checks.InvalidEnvironmentError(
                f"--env {self.name}: {kind} is {checks.describe(space_of)}; it must be "
                "a method that returns the space of an agent"
            )
        first = space_of(self.agents[0])
        for agent in self.agents[1:]:
            if (other := space_of(agent)) != first:
                raise checks.InvalidEnvironmentError(
                    f"--env {self.name}: the {kind} of {self.agents[0]!r} is {first}, "
                    f"and that of {agent!r} is {other}. One policy plays all agents, "
                    "so these must be equal: --wrapper takes wrappers that pad them, "
                    "such as supersuit's pad_observations_v0 and pad_action_space_v0"
                )
        return first

    def set_seed(self, seed: int, index: int) -> None:
        """Changes seed and index. The next reset() starts the first game."""
        self.seed, self.index, self.game = seed, index, -1

    def _call(self, method: str, count: int, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self.run(getattr(self.env, method), *args, **kwargs)
        except TypeError as error:
            if not checks.raised_by_call(error):
                raise
            raise checks.InvalidEnvironmentError(
                f"--env {self.name}: {method}() does not follow PettingZoo's parallel "
                f"API: {error}"
            ) from error
        is_tuple = isinstance(result, tuple) and len(result) == count
        if not is_tuple or not all(isinstance(x, Mapping) for x in result):
            numbers = "rewards, terminations, truncations, " if count == 5 else ""
            raise checks.InvalidEnvironmentError(
                f"--env {self.name}: {method}() returned {checks.describe(result)}; it "
                f"must be {count} dicts with a value for each agent: observations, "
                f"{numbers}infos"
            )
        return result

    def _read(self, method: str, agents: Iterable[int], *results: Any) -> dict:
        """What these agents got, by number: observation, ..., info."""
        found = {}
        *values, infos = results
        for i in agents:
            agent = self.agents[i]
            if any(agent not in x for x in values):
                raise checks.InvalidEnvironmentError(
                    f"--env {self.name}: {method}() returned no value for {agent!r} in "
                    "at least one dict. An agent that is in the list `agents`, or has "
                    "just acted, needs one in all, also if it leaves the list"
                )
            one = (*(x[agent] for x in values), infos.get(agent, {}))
            observation, *numbers, info = self.checkers[i].call(method, tuple, one)
            if method == "reset":
                look_at_reset(info, self.checkers[i].warn)
            observation = self.add_mask(observation, info)
            found[i] = (observation, *numbers, select(info))
        return found

    def _rows(self, found: dict) -> list[Row]:
        N, filler = len(self.agents), next(iter(found.values()))[0]
        rows = []
        for i in range(N):
            observation, *_, info = found.get(i, (filler, {}))
            if N > 1:
                number = np.zeros(N, np.int8)
                number[i] = i in found
                observation = add_part(observation, AGENT, number)
            rows.append(Row(observation, info))
        return rows

    def _present(self) -> set[int]:
        listed = getattr(self.env, "agents", ())
        return {i for i, x in enumerate(self.agents) if x in listed}

    def _reset(self) -> dict:
        self.game += 1
        self.actions: list[np.ndarray] = []
        seed = game_seed(self.seed, self.index, self.game)
        result = self._call("reset", 2, seed=seed)
        self.present = self._present()
        if not self.present:
            raise checks.InvalidEnvironmentError(
                f"--env {self.name}: after reset() the list `agents` is "
                f"{getattr(self.env, 'agents', 'missing')}, without any of "
                "possible_agents"
            )
        return self._read("reset", self.present, *result)

    def reset(self) -> list[Row]:
        return self._rows(self._reset())

    def step(self, actions: np.ndarray) -> list[Row]:
        """Takes the actions [N, ...] of the agents that are present."""
        if self.log_actions:
            self.actions.append(np.array(actions))
        chosen = {self.agents[i]: actions[i] for i in sorted(self.present)}
        result = self._call("step", 5, chosen)
        old = self._read("step", self.present, *result)
        listed = self._present()
        stay = {i for i in listed & old.keys() if not any(old[i][2:4])}
        begin = listed - old.keys()
        if (stay or begin) and (dead := listed - stay - begin):
            raise checks.InvalidEnvironmentError(
                f"--env {self.name}: step() ended the game of "
                f"{self.agents[min(dead)]!r}, but the list `agents` still has it. It "
                "may come back in a later step"
            )
        new = {i: old[i] for i in stay} | self._read("reset", begin, *result[::4])
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


class ParallelGames:
    """G games of N agents as a vector environment of G x N, in SAME_STEP mode.

    Args:
      num_envs: G x N; None: N, one game.
      warn: called with the number of an environment, a key and a message.

    Raises:
      FlagError: num_envs is no multiple of N.
      InvalidEnvironmentError: the games can't be used; the message says why.
    """

    def __init__(
        self,
        flags: argparse.Namespace,
        render_mode: str | None,
        num_envs: int | None,
        warn: Callable[[int, str, str], None],
    ) -> None:
        def make(first: int) -> ParallelGame:
            return ParallelGame(
                flags, render_mode, lambda i, *what: warn(first + i, *what)
            )

        game = make(0)
        N = len(game.agents)
        self.num_envs = num_envs or N
        if self.num_envs % N:
            least = max(1, self.num_envs // N) * N
            raise FlagError(
                f"--envs_per_actor {num_envs}: a game of --env {flags.env} has {N} "
                "agents, and each counts as an environment. Give a multiple of "
                f"{N}, such as {least} or {least + N}"
            )
        self.single_observation_space = game.observation_space
        self.single_action_space = game.action_space
        check_spaces(game.observation_space, game.action_space)
        self.envs = [game, *map(make, range(N, self.num_envs, N))]

    def _join(self, rows: Iterable[Row]) -> tuple[Any, dict[str, Any]]:
        """Observations [G * N, ...] and the EXTRA_FIELDS of infos, as arrays."""
        observations, infos = zip(*(row[:2] for row in rows), strict=True)
        out: Any = create_empty_array(self.single_observation_space, self.num_envs)
        fields = {
            name: np.array([x.get(name, np.zeros(y.shape)) for x in infos], y.dtype)
            for name, y in EXTRA_FIELDS.items()
        }
        return concatenate(self.single_observation_space, observations, out), fields

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return self._join(row for game in self.envs for row in game.reset())

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        """As Gymnasium's SAME_STEP mode, with final_info["game_over"]."""
        parts = zip(self.envs, np.split(actions, len(self.envs)), strict=True)
        rows = [row for game, part in parts for row in game.step(part)]
        observation, info = self._join(rows)
        final_obs, final_info = self._join(row.last for row in rows)
        final_info["game_over"] = np.array([row.game_over for row in rows])
        return (
            observation,
            np.array([float(row.reward) for row in rows]),
            np.array([row.terminated for row in rows]),
            np.array([row.truncated for row in rows]),
            {**info, "final_obs": final_obs, "final_info": final_info},
        )

    def render(self) -> list[Any]:
        return [self.envs[0].run(self.envs[0].env.render)]

    def close(self) -> None:
        for game in self.envs:
            game.checkers[0].close(game.run, lambda env=game.env: env.close())
