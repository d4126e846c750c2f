"""--video: what Video writes, read back with OpenCV."""

import contextlib
import subprocess
import sys

import numpy as np
import pytest
import runs
from nets import make_flags, make_weights

from torchbeast.base.errors import FlagError
from torchbeast.extras.play.games import play
from torchbeast.extras.video import Video, picture

cv2 = pytest.importorskip("cv2")
pytest.importorskip("imageio_ffmpeg")


def read(path):
    video = cv2.VideoCapture(str(path))
    frames = []
    while (result := video.read())[0]:
        frames.append(cv2.cvtColor(result[1], cv2.COLOR_BGR2RGB))
    return frames


def plain(height, width, color):
    return np.full((height, width, 3), color, np.uint8)


def test_browsers_play_it(tmp_path):
    path = tmp_path / "a.mp4"
    with contextlib.closing(Video(str(path))) as video:
        for _ in range(20):
            video.add(plain(101, 103, (250, 20, 130)))  # H.264 needs even numbers
        with pytest.raises(FlagError, match=r"from \(101, 103\) to \(20, 20\)"):
            video.add(plain(20, 20, 0))
    assert b"avc1" in path.read_bytes()
    frames = read(path)
    assert len(frames) == 20
    assert frames[9].shape == (102, 104, 3)
    np.testing.assert_allclose(frames[9], plain(102, 104, (250, 20, 130)), atol=12)


def test_it_shows_each_step(tmp_path):
    path = tmp_path / "a.mp4"
    flags = make_flags("--env=CartPole-v1", "--seed=5", f"--video={path}")
    games = list(play(flags, make_weights(flags), range(2)))
    assert sum(game.length for game in games) == len(read(path))


def test_a_file_that_can_not_be_written(tmp_path):
    with (
        pytest.raises(FlagError, match=r"gone/a\.mp4.*No such file"),
        contextlib.closing(Video(str(tmp_path / "gone" / "a.mp4"))) as video,
    ):
        video.add(plain(100, 100, 0))
    with pytest.raises(FlagError, match=r"must end in \.mp4, got 'a\.gif'"):
        Video("a.gif")
    full = tmp_path / "full.mp4"
    full.symlink_to("/dev/full")
    video = Video(str(full))
    video.add(plain(100, 100, 0))
    with pytest.raises(FlagError, match=r"full\.mp4 is not complete"):
        video.close()


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (None, "returns None"),
        (np.zeros((4, 5), np.uint8), r"returns uint8 \[4, 5\]"),
        (np.zeros((4, 0, 3)), r"returns float64 \[4, 0, 3\]"),
    ],
)
def test_what_is_no_picture(returned, what):
    with pytest.raises(FlagError, match=rf"--video: render\(\) of env .*{what}"):
        picture(returned, "env")
    assert picture(np.zeros((4, 5, 3), np.uint8), "env").shape == (4, 5, 3)


def test_a_small_picture_of_floats_is_enlarged(tmp_path):
    """As MinAtar's, 10 x 10."""
    with contextlib.closing(Video(str(tmp_path / "a.mp4"))) as video:
        video.add(np.full((10, 10, 3), 0.5))
    (frame,) = read(tmp_path / "a.mp4")
    np.testing.assert_allclose(frame, plain(100, 100, 128), atol=6)


def test_a_gif_of_a_trained_agent(tmp_path):
    runs.run(tmp_path, "a", **runs.SMALL)
    flags = ("--xpid", "a", "--savedir", tmp_path, "--num_test_episodes", "1")
    words = [runs.ROOT / "scripts/make_gif.py", tmp_path / "a.gif", "0.1", "0.3"]
    subprocess.run([sys.executable, *words, *flags], check=True)
    found = cv2.VideoCapture(str(tmp_path / "a.gif")).read()[1]
    assert found.shape == (800, 1200, 3)  # twice CartPole's
