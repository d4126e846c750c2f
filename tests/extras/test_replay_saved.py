"""A saved replay is read again; a damaged one is refused."""

import zipfile

import numpy as np
import pytest
from replayed_games import Game, T, check_unroll, make_replay, play

from torchbeast.base.errors import CheckpointError
from torchbeast.base.nested import map_nested
from torchbeast.extras.replay import memory as replay_memory


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


def test_an_incomplete_index_is_refused(tmp_path):
    path = tmp_path / "replay.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("index.json", '{"step": 7, "arrays": [], "episodes": []}')
    with pytest.raises(CheckpointError, match="another --replay_size or other spaces"):
        replay_memory.load(make_replay(150), path, 7)


def saved_parts(folder):
    """The files of a saved replay: names and contents."""
    replay = make_replay(150)
    play(replay, [Game(np.random.default_rng(16), [9, 11, 7, -8] * 6)])
    replay_memory.save(replay, folder / "replay.zip", 7)
    with zipfile.ZipFile(folder / "replay.zip") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("edit", ["short", "long", "missing", "not an index"])
def test_a_changed_part_is_refused(tmp_path, edit):
    parts = saved_parts(tmp_path)
    number = max(
        (name for name in parts if name.isdigit()), key=lambda x: len(parts[x])
    )
    data = parts[number]
    changed = {"short": data[:-9], "long": data + b"x"}
    if edit == "not an index":
        parts["index.json"] = b"[[[[["
    elif edit == "missing":
        del parts[number]
    else:
        parts[number] = changed[edit]
    assert_refused(tmp_path, parts)


def assert_refused(folder, parts):
    path = folder / "replay.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    with pytest.raises(CheckpointError, match=r"zip can't be loaded: .*Remove it"):
        replay_memory.load(make_replay(150), path, 7)
