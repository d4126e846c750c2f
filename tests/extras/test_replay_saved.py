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
