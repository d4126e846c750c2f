"""Who may sit on the other side: one object per game."""

import collections
import contextvars
import functools
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from examples.self_play.columns import LINES, NumpyPolicy
from torchbeast import load_agent
from torchbeast.tools.agent import Agent


class Player(Protocol):
    def move(self, observation: dict[str, Any]) -> int:
        """The action for an observation with a mask."""


class Random:
    """Takes any legal action."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def move(self, observation: dict[str, Any]) -> int:
        return int(self.rng.choice(np.flatnonzero(observation["action_mask"])))


class Scripted:
    """Plays Connect Four: wins if it can, else blocks if it must, else any column."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def move(self, observation: dict[str, Any]) -> int:
        mine, theirs = np.moveaxis(observation["observation"], -1, 0)  # [6, 7] each
        free = (mine + theirs) == 0
        columns = self.rng.permutation(np.flatnonzero(observation["action_mask"]))
        for pieces in (mine, theirs):
            for column in columns:
                after = pieces.copy()
                after[np.flatnonzero(free[:, column])[-1], column] = 1
                if has_four(after):
                    return int(column)
        return int(columns[0])


def has_four(pieces: np.ndarray) -> bool:
    """Whether a player's pieces [6, 7] have four in a row."""
    return bool((pieces.reshape(-1)[LINES] != 0).all(1).any())


class Saved:
    """An agent with the weights of a checkpoint. It is faster than Agent.act.

    `move_all` has several of them act in one batch.

    Args:
      greedy: take the most likely action; otherwise sample.
    """

    def __init__(
        self, agent: Agent, rng: np.random.Generator, greedy: bool = False
    ) -> None:
        self.model, kind = agent.model, agent.model.distribution
        self.state = self.model.initial_state(1)
        self.last_action = torch.zeros(1, 1, dtype=kind.action_dtype)
        self.done, self.reward = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1)
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
        self.choose: Any = kind.mode
        if not greedy:
            self.choose = functools.partial(kind.sample, generator=generator)

    def move(self, observation: dict[str, Any]) -> int:
        return move_batch([self], [observation])[0]


@torch.inference_mode()
def move_batch(
    players: Sequence[Saved], observations: Sequence[dict[str, Any]]
) -> list[int]:
    """One forward for players [N] with the same model; each keeps its own state."""
    parts = {k: np.stack([x[k] for x in observations]) for k in observations[0]}
    rows: Any = {"observation": {k: torch.as_tensor(x)[None] for k, x in parts.items()}}
    for name in ("reward", "done", "last_action"):
        rows[name] = torch.cat([getattr(x, name) for x in players], 1)  # [1, N]
    states = zip(*(x.state for x in players), strict=True)
    state = tuple(torch.cat(x, 1) for x in states)  # [layers, N, ...]
    outputs, state = players[0].model(rows, state, acting=True)
    for i, player in enumerate(players):
        own = slice(i, i + 1)
        player.state = tuple(x[:, own] for x in state)
        player.last_action = player.choose(outputs["policy_logits"][:, own])
        player.done = torch.zeros_like(player.done)
    return [int(x.last_action) for x in players]


def move_all(
    players: Sequence[Player], observations: Sequence[dict[str, Any]]
) -> list[int]:
    """The moves of players of several games; those of one checkpoint in a batch."""
    moves, batches = [0] * len(players), collections.defaultdict(list)
    for i, player in enumerate(players):
        if isinstance(player, Saved):
            batches[id(player.model)].append(i)
        else:
            moves[i] = player.move(observations[i])
    for batch in batches.values():
        found = move_batch(
            [players[i] for i in batch], [observations[i] for i in batch]
        )
        for i, move in zip(batch, found, strict=True):
            moves[i] = move
    return moves


class SavedBoard:
    """The same for the model of columns.py, several times as fast."""

    def __init__(
        self, agent: Agent, rng: np.random.Generator, greedy: bool = False
    ) -> None:
        self.policy, self.rng, self.greedy = NumpyPolicy(agent.model), rng, greedy
        self.last_action: int | None = None

    def move(self, observation: dict[str, Any]) -> int:
        logits = self.policy(observation["observation"], self.last_action)
        logits[observation["action_mask"] == 0] = -np.inf
        if not self.greedy:
            logits += self.rng.gumbel(size=len(logits))
        self.last_action = int(logits.argmax())
        return self.last_action


def saved(agent: Agent, rng: np.random.Generator, greedy: bool = False) -> Player:
    kind = SavedBoard if NumpyPolicy.fits(agent.model) else Saved
    return kind(agent, rng, greedy)


# load_agent makes an environment, to read its spaces. It must not load opponents, too.
loading = contextvars.ContextVar("loading", default=False)


@functools.lru_cache(maxsize=64)  # the environments of a process share the models
def load(path: pathlib.Path, state: tuple[int, ...], trust: bool) -> Agent:
    """The agent of a checkpoint.

    Args:
      state: differs if another file has this name now.
      trust: see load_agent.

    Raises:
      CheckpointError, UntrustedError: see load_agent.
    """
    torch.set_num_threads(1)  # a process that steps environments has one core
    token = loading.set(True)
    try:
        return load_agent(path, trust_env=trust)
    finally:
        loading.reset(token)
