"""The replay gives back what was stored, and takes the memory that it says."""

import argparse
import errno
import math
import os
import zipfile

import numpy as np
import pytest
from gymnasium import spaces
from nets import make_net
from replayed_games import (
    SPEC,
    STACK,
    A,
    Game,
    T,
    check_unroll,
    make_replay,
    numbered,
    play,
    stack,
)

from torchbeast.base.errors import CheckpointError, FlagError
from torchbeast.base.nested import map_nested
from torchbeast.core.acting import row_spec
from torchbeast.envs.values import FrameStack
from torchbeast.extras.replay import memory as replay_memory
from torchbeast.extras.replay.episodes import Replay


def test_replayed_unrolls_are_what_was_stored():
    rng = np.random.default_rng(1)
    games = [
        Game(rng, rng.choice([1, 2, 3, 8, -4, 17], size=20)),
        Game(rng, [T, T, 2 * T, T] * 3),  # episodes that end with rollouts
        Game(rng, [40, 1, 1, 1, 30]),
    ]
    replay = make_replay(10_000)
    play(replay, games)
    for _ in range(200):
        rows, readers = replay.read(3)
        for i, reader in enumerate(readers):
            column = map_nested(lambda x, i=i: x[:, i], rows)
            check_unroll(column, games)
            episode = reader.episode
            assert 0 <= reader.position < len(episode)
            assert episode.stored_at == 7
    assert replay.num_lost == 0


def test_a_reader_goes_on_where_it_ended():
    rng = np.random.default_rng(2)
    games = [Game(rng, [3, -9, 12, 4, 26, 5])]
    replay = make_replay(1000)
    play(replay, games)
    places = numbered(games)
    ends = {}
    for _ in range(100):
        rows, readers = replay.read(2)
        images = rows["observation"]["colours"]
        for i, reader in enumerate(readers):
            first, last = (places[images[t, i].tobytes()][1] for t in (0, T))
            assert ends.get(id(reader), first) == first
            ends[id(reader)] = last
            assert rows["done"][0, i] == games[0].rows[first]["done"]


def test_all_steps_are_replayed_equally_often():
    rng = np.random.default_rng(3)
    games = [Game(rng, [2, 30, 8, T])]
    replay = make_replay(1000)
    play(replay, games)
    places = numbered(games)
    steps = np.zeros(len(games[0].rows))
    for _ in range(20_000):
        rows, _ = replay.read(1)
        for t in range(T):
            steps[places[rows["observation"]["colours"][t, 0].tobytes()][1]] += 1
    lengths = (2, 30, 8, T)
    for begin, n in zip(np.cumsum((0, *lengths)), lengths, strict=False):
        share = steps[begin : begin + n].sum() / steps.sum()
        # Each episode is chosen about 2,000 times: a deviation is 2 %.
        assert share == pytest.approx(n / sum(lengths), rel=0.1)


def test_the_oldest_make_room():
    rng = np.random.default_rng(4)
    games = [Game(rng, [9, 11, 7, -8] * 12) for _ in range(2)]
    replay = make_replay(150)
    queues = [list(game.rollouts()) for game in games]
    for i, pair in enumerate(zip(*queues, strict=True)):
        replay.add(stack(pair, axis=1), step=i)
        if i < 10:
            continue
        rows, _ = replay.read(4)
        places = numbered(games)
        for b in range(4):
            check_unroll(map_nested(lambda x, b=b: x[:, b], rows), games)
            _, at = places[rows["observation"]["colours"][T, b].tobytes()]
            assert i * T - at < 150  # not older than the capacity
        assert 0.5 * 150 < replay.size <= 150


@pytest.mark.parametrize("num_games", [1, 3, 4, 16])
def test_long_episodes_are_cut(num_games):
    """Environments without ends can be replayed; where one is cut does not count."""
    rng = np.random.default_rng(5)
    games = [Game(rng, [200, 102]) for _ in range(num_games)]
    replay = make_replay(160)
    for step, ready in enumerate(zip(*(x.rollouts() for x in games), strict=True)):
        for rows in ready:
            replay.add(stack([rows], axis=1), step)
            assert replay.size >= 160 / 4 or not replay.was_full
    assert replay.num_lost == 0
    places, cut = numbered(games), 0
    for _ in range(50):
        rows, (reader,) = replay.read(1)
        observations = map_nested(lambda x: x[:, 0], rows["observation"])
        at = [places[x.tobytes()] for x in observations["colours"]]
        for t in range(T):
            game, before = at[t]
            result = game.rows[before + 1]
            assert rows["reward"][t + 1, 0] == result["reward"]
            stacked = game.rows[before]["observation"]["stack"]
            np.testing.assert_array_equal(observations["stack"][t], stacked)
            assert rows["done"][t + 1, 0] or at[t + 1] == (game, before + 1)
            counts = result["done"] or not rows["done"][t + 1, 0]
            assert rows["valid"][t, 0] == counts
            cut += not counts
        episode = reader.episode
        end = at[T][1] + len(episode) - 1 - reader.position
        assert episode.stored_at == end // T
    assert cut >= 3


def test_stacks_that_share_no_frames():
    """Several frames per action, or noise: frames run out before steps do."""
    rng = np.random.default_rng(5)
    games = [Game(rng, [300]) for _ in range(8)]
    for row in (row for game in games for row in game.rows):
        noise = rng.integers(256, size=STACK, dtype=np.uint8)
        row["observation"] = {**row["observation"], "stack": noise}
    replay = make_replay(400)
    play(replay, games)
    assert replay.was_full
    assert replay.size >= 50
    replay.read(3)


def test_a_lost_rollout_costs_one_episode():
    rng = np.random.default_rng(7)
    game = Game(rng, [12, 12, 12])
    replay = make_replay(200)
    for i, rows in enumerate(game.rollouts()):
        if i != 1:  # rows 5 to 10 are lost
            replay.add(map_nested(lambda x: x[:, None], rows), step=0)
    assert replay.num_lost == 2  # rows 10 and 11; the first 5 wait
    for _ in range(30):
        rows, _ = replay.read(1)
        check_unroll(map_nested(lambda x: x[:, 0], rows), [game])
    assert replay.size == 12


def test_a_replay_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    def is_full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(replay_memory, "free_memory", lambda: 10**9)
    monkeypatch.setattr(os, "posix_fallocate", is_full)
    flags = argparse.Namespace(replay_size=2**31, unroll_length=T, seed=1)
    path = str(tmp_path / "file")
    for flags.replay_file, words in (
        (None, "free memory, 1 GB"),
        (path, "file: No space"),
    ):
        with pytest.raises(FlagError, match=words):
            replay_memory.make_replay(flags, SPEC)


def test_a_step_of_a_stack_takes_one_frame():
    sizes = []

    def create(shape, dtype):
        sizes.append(math.prod(shape) * dtype.itemsize)
        return np.empty(0, dtype)

    screens = FrameStack(0, 255, (4, 84, 84), np.uint8)
    Replay(row_spec(make_net(screens, spaces.Discrete(A))), 10_000, T, create, 1)
    assert sum(sizes) == pytest.approx(10_000 * 84 * 84, rel=0.1)


@pytest.mark.parametrize("in_file", [False, True])
def test_where_the_steps_are(tmp_path, in_file):
    """A file has no name while it is used."""
    flags = argparse.Namespace(replay_size=150, unroll_length=T, seed=1, learn_start=9)
    flags.replay_file = str(tmp_path / "file") if in_file else None
    replay = replay_memory.make_replay(flags, SPEC)
    assert not list(tmp_path.iterdir())
    games = [Game(np.random.default_rng(12), [7] * 60)]
    play(replay, games)
    assert replay.size > 130
    rows, _ = replay.read(1)
    check_unroll(map_nested(lambda x: x[:, 0], rows), games)


# --- Saved --------------------------------------------------------------------------


def test_a_loaded_replay_goes_on(tmp_path):
    """It has what was stored, and stores more without harm to it."""
    rng = np.random.default_rng(16)
    games = [Game(rng, [9, 11, 7, -8] * 12) for _ in range(3)]
    replay, again = make_replay(150), make_replay(150)
    play(replay, games[:2])  # it was full, so its slots are in no order
    replay_memory.save(replay, tmp_path / "replay.zip", 7)
    replay_memory.load(again, tmp_path / "replay.zip", 7)
    for more in ([], games[2:]):
        play(again, more)
        for _ in range(30):
            rows, _ = again.read(3)
            for b in range(3):
                check_unroll(map_nested(lambda x, b=b: x[:, b], rows), games)
    assert replay.size == pytest.approx(again.size, abs=2 * T + 20)


@pytest.mark.parametrize(
    ("name", "data"),
    [("0", b""), ("0", None), ("0", b"x" * 10**5), ("index.json", b"[[[[[")],
)
def test_a_changed_part_is_refused(tmp_path, name, data):
    path = tmp_path / "replay.zip"
    replay = make_replay(150)
    play(replay, [Game(np.random.default_rng(16), [9, 11, 7, -8] * 6)])
    replay_memory.save(replay, path, 7)
    with zipfile.ZipFile(path) as archive:
        parts = {x: archive.read(x) for x in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for part, content in {**parts, name: data}.items():
            if content is not None:
                archive.writestr(part, content)
    with pytest.raises(CheckpointError, match=r"zip can't be loaded: .*Remove it"):
        replay_memory.load(make_replay(150), path, 7)


def test_a_replay_of_another_size_is_refused(tmp_path):
    replay_memory.save(make_replay(150), tmp_path / "replay.zip", 7)
    with pytest.raises(CheckpointError, match="another --replay_size or other spaces"):
        replay_memory.load(make_replay(160), tmp_path / "replay.zip", 7)
