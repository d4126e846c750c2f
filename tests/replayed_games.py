"""Games whose rows are known, and replays that store them."""

import argparse

import numpy as np
import torch
from gymnasium import spaces
from nets import make_net

from torchbeast.base.nested import map_nested
from torchbeast.core.acting import row_spec
from torchbeast.envs.values import FrameStack
from torchbeast.extras.replay.episodes import Replay
from torchbeast.extras.replay.mixer import Mixer

T, A = 5, 3
STACK = (4, 7, 9)  # frames, height, width
OBSERVATIONS = spaces.Dict(
    {
        "stack": FrameStack(0, 255, STACK, np.uint8),
        "last": spaces.Box(0, 255, (7, 9, 4), np.uint8),  # not declared: stored whole
        "colours": spaces.Box(0, 255, (3, 8, 7), np.uint8),
        "vector": spaces.Box(-1, 1, (2,), np.float32),
        "nothing": spaces.Box(-1, 1, (0,), np.float32),
    }
)
# Fields of the step that led to a row; the others are of the step from it.
RESULTS = {
    *("reward", "done", "truncated", "truncation_value", "last_action"),
    *("episode_return", "episode_step", "game_return", "game_step", "game_over"),
}
SPEC = row_spec(make_net(OBSERVATIONS, spaces.Discrete(A)))


def dtype_of(spec):
    return torch.empty(0, dtype=spec.dtype).numpy().dtype


class Game:
    """Rows of one environment, random but for `done`, with a history of its steps.

    Args:
      lengths: of its episodes; a negative one is truncated.
    """

    def __init__(self, rng, lengths):
        self.rng, self.rows = rng, []
        ends = dict(zip(np.cumsum(np.abs(lengths)), np.less(lengths, 0), strict=True))
        frames = None
        for t in range(sum(map(abs, lengths)) + 1):
            row = map_nested(self._random, SPEC)
            row["last_action"] %= A
            row["done"] = np.array(t == 0 or t in ends)
            row["truncated"] = np.array(ends.get(t, False))
            frame = rng.integers(256, size=STACK[1:]).astype(np.uint8)
            first = row["done"] or frames is None
            frames = [frame] * 4 if first else [*frames[1:], frame]
            row["observation"] = {
                **map_nested(self._random, SPEC["observation"]),
                "stack": np.stack(frames),
                "last": np.stack(frames, axis=-1),
            }
            self.rows.append(row)

    def _random(self, spec):
        return self.rng.integers(0, 200, spec.shape).astype(dtype_of(spec))

    def rollouts(self):
        """Rollouts [T + 1, ...]; the rest of the steps is dropped."""
        for begin in range(0, len(self.rows) - T, T):
            yield stack(self.rows[begin : begin + T + 1])


def stack(rows, axis=0):
    return map_nested(lambda *x: np.stack(x, axis=axis), *rows)


def make_replay(capacity, seed=1):
    return Replay(SPEC, capacity, T, np.zeros, seed)


def play(replay, games):
    """Adds the rollouts of all games, two at a time, in turns."""
    queues = [list(game.rollouts()) for game in games]
    while any(queues):
        ready = [queue.pop(0) for queue in queues if queue]
        for i in range(0, len(ready), 2):
            replay.add(stack(ready[i : i + 2], axis=1), step=7)


def numbered(games):
    """{bytes of the image: (game, t)}: which row a replayed one comes from."""
    return {
        row["observation"]["colours"].tobytes(): (game, t)
        for game in games
        for t, row in enumerate(game.rows)
    }


def check_unroll(rows, games):
    """Compares an unroll [T + 1, ...] with the games."""
    places = numbered(games)
    previous = None
    for t in range(T + 1):
        row = map_nested(lambda x, t=t: x[t], rows)
        game, at = places[row["observation"]["colours"].tobytes()]
        original = game.rows[at]
        for name in row.keys() - RESULTS - {"done", "valid"}:
            map_nested(np.testing.assert_array_equal, row[name], original[name])
        goes_on = previous is not None and (game, at) == (previous[0], previous[1] + 1)
        if previous is not None:
            game_before, before = previous
            result = game_before.rows[before + 1]  # of the step before
            for name in (row.keys() & RESULTS) - {"done"}:
                np.testing.assert_array_equal(row[name], result[name], err_msg=name)
            assert bool(row["done"]) == bool(result["done"])
            assert rows["valid"][t - 1] == (not result["truncated"])
            assert goes_on or result["done"]
        if row["done"]:
            assert original["done"]  # the first observation of an episode
        previous = game, at


def make_mixer(replay, model, ratio):
    return make_mixer_of(replay, model, replay_ratio=ratio, learn_start=0)


def make_mixer_of(replay, model, **flags):
    normal = {"normalize_rewards": False, "normalize_observations": False}
    flags = argparse.Namespace(reward_clipping="none", **normal, **flags)
    return Mixer(replay, flags, model.initial_state(1))
