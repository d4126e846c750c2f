"""--video: records games to a file."""

import contextlib
import logging
import math
import os
from typing import Any

import numpy as np

from torchbeast.base.errors import FileError, FlagError, needing, using
from torchbeast.base.flag import START, Group, flag
from torchbeast.envs.values import describe

log = logging.getLogger(__name__)

FRAMES_PER_SECOND = 15
LEAST_PIXELS = 100  # of height and width; smaller frames are enlarged


class Flags(Group):
    title = "video"
    video: str | None = flag(None, "record the test to this .mp4 file", START)


def attach(run: Any) -> None:
    if run.flags.video:
        raise FlagError("--video records a test, not training: add --mode test")


def tested(flags: Any, folder: Any, step: int | None) -> None:
    if flags.video:
        log.info("Video in %s", flags.video)


def picture(rendered: Any, env: str) -> np.ndarray:
    """What render() has returned, [H, W, 3]. Raises FlagError if it is no picture."""
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
    """A video in H.264, with one frame per step. All frames have the same size."""

    def __init__(self, path: str, env: str = "") -> None:
        if not path.endswith(".mp4"):
            raise FlagError(f"--video must end in .mp4, got {path!r}")
        self.env = env  # for messages
        self.path = os.path.abspath(path)  # environments may change the directory
        self.size: tuple[int, ...] = ()  # height and width
        self._frames: Any = None

    def add(self, rendered: Any) -> None:
        """Adds a frame [H, W, 3], RGB, from 0 to 255; or of floats from 0 to 1."""
        frame = picture(rendered, self.env)
        scale = 255 if frame.dtype.kind == "f" and frame.max() <= 1 else 1
        frame = np.rint(np.clip(frame * scale, 0, 255)).astype(np.uint8)
        with using(f"--video {self.path}"):
            self.size = self.size or self._open(*frame.shape[:2])
            if frame.shape[:2] != self.size:
                raise FlagError(
                    f"--video: frames of {self.env} change their size from {self.size} "
                    f"to {frame.shape[:2]}"
                )
            self._frames.send(np.ascontiguousarray(frame))

    def _open(self, height: int, width: int) -> tuple[int, int]:
        with needing("--video", "imageio-ffmpeg"):
            from imageio_ffmpeg import write_frames
        open(self.path, "wb").close()  # raises a clear OSError
        times = math.ceil(LEAST_PIXELS / min(height, width))
        # H.264 needs even numbers.
        even = f"scale=ceil(iw*{times}/2)*2:ceil(ih*{times}/2)*2:flags=neighbor"
        self._frames = write_frames(
            *(self.path, (width, height)),
            fps=FRAMES_PER_SECOND,
            macro_block_size=1,
            output_params=["-vf", even],
        )
        self._frames.send(None)  # starts ffmpeg
        return height, width

    def close(self) -> None:
        """Completes the file. FileError: ffmpeg could not write all of it."""
        if self._frames:
            self._frames.close()
            self._frames = None
            from imageio_ffmpeg import count_frames_and_secs

            try:
                count_frames_and_secs(self.path)
            except RuntimeError as error:  # with a page of ffmpeg's text
                problem = f"--video {self.path} is not complete; is the disk full?"
                raise FileError(problem) from error
