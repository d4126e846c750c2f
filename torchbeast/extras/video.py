"""--video: records games to a file."""

import contextlib
import logging
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from torchbeast.base.errors import FlagError
from torchbeast.base.flag import START, Group, flag
from torchbeast.envs.values import describe

log = logging.getLogger(__name__)


class Flags(Group):
    title = "video"
    video: str | None = flag(
        None, "record the test to this .mp4 file, and to --wandb", START
    )


def attach(run: Any) -> None:
    if run.flags.video:
        raise FlagError(
            f"--video {run.flags.video} records a test, not training: add --mode test"
        )


def tested(flags: Any, folder: Any, step: int | None) -> None:
    if flags.video:
        log.info("Video in %s", flags.video)


def picture(rendered: Any, env: str) -> np.ndarray:
    """What an environment's render() has returned, [H, W, 3].

    Raises:
      FlagError: it is no picture.
    """
    with contextlib.suppress(ValueError):  # a ragged list
        found = np.asarray(rendered)
        is_rgb = found.ndim == 3 and found.shape[2] == 3 and found.size > 0
        if is_rgb and found.dtype.kind in "uif":
            return found
    raise FlagError(
        f"--video: render() of {env} returns {describe(rendered)}, and with "
        'render_mode="rgb_array" it must return a picture [H, W, 3] of numbers'
    )


class Video:
    """A video with one frame per step, that browsers play: H.264.

    Needs imageio-ffmpeg. Without it, OpenCV writes MPEG-4, which browsers don't play.
    Frames of another size than the first are scaled to its size.
    """

    FRAMES_PER_SECOND = 15
    LEAST_PIXELS = 100  # of height and width; a smaller frame is enlarged

    def __init__(self, path: str, env: str = "") -> None:
        self.env = env  # for messages
        self.path = os.path.abspath(path)  # environments may change the directory
        self.size: tuple[int, int] | None = None  # height and width, of the first frame
        self._scaled = False
        self._write: Callable[[np.ndarray], Any]
        self.close: Callable[[], Any] = lambda: None  # completes the file

    def add(self, rendered: Any) -> None:
        """Adds a frame [H, W, 3], RGB, from 0 to 255; or of floats from 0 to 1.

        Raises:
          FlagError: it is no picture, or the file can't be written.
        """
        frame = picture(rendered, self.env)
        scale = 255 if frame.dtype.kind == "f" and frame.max() <= 1 else 1
        frame = np.rint(np.clip(frame * scale, 0, 255)).astype(np.uint8)
        times = math.ceil(self.LEAST_PIXELS / min(frame.shape[:2]))  # for small grids
        frame = frame.repeat(times, axis=0).repeat(times, axis=1)
        # H.264 needs even numbers: repeat the last row or column.
        odd_height, odd_width = (n % 2 for n in frame.shape[:2])
        frame = np.pad(frame, [(0, odd_height), (0, odd_width), (0, 0)], "edge")
        height, width = frame.shape[:2]
        try:
            if self.size is None:
                self._open(height, width)
            elif self.size != (height, width):
                frame = self._scale(frame)
            self._write(np.ascontiguousarray(frame))
        except OSError as error:
            raise FlagError(
                f"--video: can't write {self.path!r} ({error}); give a path ending in "
                ".mp4 in a folder that exists"
            ) from error

    def _open(self, height: int, width: int) -> None:
        self.size = height, width
        with open(self.path, "wb"):  # raises a clear OSError
            pass
        rate = self.FRAMES_PER_SECOND
        try:
            from imageio_ffmpeg import write_frames

            frames = write_frames(
                self.path, (width, height), fps=rate, macro_block_size=1
            )
            frames.send(None)  # starts the program ffmpeg
        except (ImportError, RuntimeError) as error:  # no package, or no program
            log.warning(
                "--video: the file is MPEG-4, which browsers don't play (%s); for "
                "H.264: pip install imageio-ffmpeg",
                error,
            )
        else:
            self._write, self.close = frames.send, frames.close
            return
        import cv2  # slow

        codec = cv2.VideoWriter.fourcc(*"mp4v")
        file = cv2.VideoWriter(self.path, codec, rate, (width, height))
        if not file.isOpened():
            raise OSError("OpenCV does not open it")
        self._write = lambda frame: file.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
        self.close = file.release

    def _scale(self, frame: np.ndarray) -> np.ndarray:
        """Scales a frame to the size of the first one, by its nearest pixels."""
        assert self.size is not None
        if not self._scaled:
            self._scaled = True
            log.warning(
                "The environment's frames change their size, from %d x %d to %d x %d: "
                "the video has them scaled to the first size.",
                *(self.size + frame.shape[:2]),
            )
        import cv2  # slow

        return cv2.resize(frame, self.size[::-1], interpolation=cv2.INTER_NEAREST)
