"""A game of two players for one learner: the opponent moves inside of step().

README.md says how to train with it.
"""

import importlib
import logging
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from examples.self_play import players
from torchbeast.base.errors import using

log = logging.getLogger(__name__)

KEPT = re.compile(r"model\.(\d+)\.tar")  # what --checkpoint_history writes
# Points and games against each checkpoint in this process, from 1 of 2.
SCORES: dict[pathlib.Path, tuple[float, int]] = {}


class SelfPlay(gymnasium.Env):
    """A game of PettingZoo's AEC API for two agents, whose observations have a mask.

    The seat of the learner is drawn for each game, and so is the opponent: the newest
    checkpoint that the run has kept, or one of the older ones. It plays the whole game,
    whatever happens to the files. Without a checkpoint it takes any legal action.

    The part "opponent" of the observation is for scores.py, not for the policy: 0 is
    the player without a checkpoint, k the k-th oldest checkpoint.

    Args:
      folder: of the run, --savedir/--xpid.
      history: the run's --checkpoint_history. Further checkpoints count as the last.
      newest: probability of the newest checkpoint.
      hard: the others are drawn with weights (1 - score) ** hard, where score is the
        share of the points against it in this process. 0: all with the same weight.
      greedy: probability that the opponent takes its most likely actions in a game,
        because samples of them miss what a good player sees.
      game: a module of PettingZoo with a function raw_env.
      trust: see load_agent's trust_env. Needed where the user has another key.
      against: "random", "scripted" or a checkpoint: always this opponent.
    """

    def __init__(
        self,
        folder: str,
        history: int = 20,
        newest: float = 0.5,
        hard: float = 0.0,
        greedy: float = 0.5,
        game: str = "pettingzoo.classic.connect_four_v3",
        trust: bool = False,
        against: str | None = None,
    ) -> None:
        with using("SelfPlay's --env_kwargs"):
            if not (0 <= newest <= 1 and 0 <= greedy <= 1 and hard >= 0 < history):
                raise ValueError(
                    "newest and greedy are in [0, 1], history is 1 or more"
                )
            self.folder = pathlib.Path(folder).expanduser()
            self.game = importlib.import_module(game).raw_env()
            self.seats = list(self.game.possible_agents)
            parts = self.game.observation_space(self.seats[0]).spaces
            if len(self.seats) != 2 or "action_mask" not in parts:
                raise ValueError(f"{game} is not for two agents with an action_mask")
        self.history = history
        self.newest, self.hard, self.greedy = newest, hard, greedy
        self.trust, self.against = trust, against
        number = spaces.Discrete(history + 1)
        self.observation_space = spaces.Dict({**parts, "opponent": number})
        self.action_space = self.game.action_space(self.seats[0])
        self.broken: set[tuple[Any, ...]] = set()  # files, as they were
        self.path: pathlib.Path | None = None  # of the opponent, if it may be drawn

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Starts a game. options["seat"], 0 or 1, chooses the learner's seat."""
        self.begin(seed, options)
        let_opponents_move([self])
        return self.observe(self.me, self.number), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict]:
        self.begin_step(action)
        let_opponents_move([self])
        return self.end_step()

    # The parts of reset() and step(), between which the opponent moves if it is its
    # turn:

    def begin(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(seed=seed)
        seat = int(self.np_random.integers(2))
        self.me = self.seats[(options or {}).get("seat", seat)]
        self.number, self.opponent = self.draw_opponent()
        self.game.reset(seed=int(self.np_random.integers(2**31)))
        self.reward = 0.0

    def begin_step(self, action: Any) -> None:
        self.reward = 0.0
        self.move(int(action))

    def end_step(self) -> tuple[dict[str, Any], float, bool, bool, dict]:
        ends = [
            any(x.values()) for x in (self.game.terminations, self.game.truncations)
        ]
        if any(ends) and self.path:
            points, games = SCORES.get(self.path, (1, 2))
            SCORES[self.path] = points + (1 + np.sign(self.reward)) / 2, games + 1
        return self.observe(self.me, self.number), self.reward, *ends, {}

    def close(self) -> None:
        self.game.close()

    def move(self, action: int) -> None:
        self.game.step(action)
        self.reward += self.game.rewards[self.me]

    def is_opponents_turn(self) -> bool:
        ends = self.game.terminations.values(), self.game.truncations.values()
        return self.game.agent_selection != self.me and not any(map(any, ends))

    def observe(self, agent: str, number: int) -> dict[str, Any]:
        return {**self.game.observe(agent), "opponent": np.int64(number)}

    def draw_opponent(self) -> tuple[int, players.Player]:
        """Draws the opponent of a game, and its number."""
        rng, self.path = self.np_random, None
        if self.against == "random" or players.loading.get():
            return 0, players.Random(rng)
        if self.against == "scripted":
            return 0, players.Scripted(rng)
        if self.against:
            return 0, self.load(pathlib.Path(self.against).expanduser())
        files = dict(enumerate(kept(self.folder), 1))
        while files:
            number = max(files)
            if rng.random() >= self.newest:
                number = int(rng.choice(list(files), p=self.weights(files.values())))
            path = files.pop(number)
            state = state_of(path)
            if (path, state) in self.broken:
                continue
            try:
                player = self.load(path)
                self.path = path
                return min(number, self.history), player
            except Exception as error:  # of many types: the file may hold anything
                self.broken.add((path, state))
                log.warning(
                    "Self-play goes on without the opponent %s: %s", path, error
                )
        return 0, players.Random(rng)

    def weights(self, files: Iterable[pathlib.Path]) -> np.ndarray | None:
        """With which probabilities to draw one of these; None: all the same."""
        if not self.hard:
            return None
        scores = [SCORES.get(x, (1, 2)) for x in files]
        weights = np.array([(1 - x / n) ** self.hard for x, n in scores])
        return weights / weights.sum()

    def load(self, path: pathlib.Path) -> players.Player:
        agent = players.load(path, state_of(path), self.trust)
        theirs = getattr(agent.observation_space, "spaces", {})
        mine = {**self.observation_space.spaces, "opponent": theirs.get("opponent")}
        if dict(theirs) != mine or agent.action_space != self.action_space:
            raise ValueError(f"{path} is of another game, --env {agent.flags.env}")
        greedy = bool(self.np_random.random() < self.greedy)
        return players.saved(agent, self.np_random, greedy)


def let_opponents_move(games: Sequence[SelfPlay]) -> None:
    """All opponents move whose turn it is; those with the same weights in a batch."""
    while waiting := [x for x in games if x.is_opponents_turn()]:
        seen = [x.observe(x.game.agent_selection, 0) for x in waiting]
        moves = players.move_all([x.opponent for x in waiting], seen)
        for game, move in zip(waiting, moves, strict=True):
            game.move(move)


def kept(folder: pathlib.Path) -> list[pathlib.Path]:
    """The checkpoints that stay in the folder of a run, the oldest first."""
    names = os.listdir(folder) if folder.is_dir() else []
    steps = sorted(int(found[1]) for found in map(KEPT.fullmatch, names) if found)
    return [folder / f"model.{step}.tar" for step in steps]


def state_of(path: pathlib.Path) -> tuple[int, ...]:
    """Differs if another file has the name."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns
