"""Recording games to a video file."""

import os
import sys
from typing import Any

import numpy as np

from torchbeast.core.errors import FlagError


def has_display() -> bool:
    """Whether a window can be opened."""
    names = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform != "linux" or any(os.environ.get(name) for name in names)


def picture(rendered: Any, env: str) -> np.ndarray:
    """What an environment's render() has returned, [H, W, 3].

    Raises:
      FlagError: it is no picture.
    """
    try:
        found = np.asarray(rendered)
        is_rgb = found.ndim == 3 and found.shape[2] == 3 and found.size > 0
        if is_rgb and found.dtype.kind in "uif":
            return found
        what = f"an array {list(found.shape)} of {found.dtype}"
    except ValueError:  # a ragged list
        what = type(rendered).__name__
    raise FlagError(
        f"--video: render() of {env} returns {'None' if rendered is None else what}, "
        'and with render_mode="rgb_array" it must return a picture [H, W, 3] of '
        "numbers"
    )


class Video:
    """An .mp4 file with one frame per step. Needs OpenCV."""

    FRAMES_PER_SECOND = 15
    LEAST_PIXELS = 100  # of height and width; a smaller frame is enlarged

    def __init__(self, path: str) -> None:
        self.path = path
        self.file: Any = None

    def __enter__(self) -> "Video":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.file:
            self.file.release()

    def add(self, frame: np.ndarray) -> None:
        """Adds a frame [H, W, 3], RGB, from 0 to 255; or of floats from 0 to 1."""
        import cv2

        scale = 255 if frame.dtype.kind == "f" and frame.max() <= 1 else 1
        frame = np.rint(np.clip(frame * scale, 0, 255)).astype(np.uint8)
        times = -(
            -self.LEAST_PIXELS // min(frame.shape[:2])
        )  # for games on small grids
        frame = frame.repeat(times, axis=0).repeat(times, axis=1)
        if self.file is None:
            height, width = frame.shape[:2]
            codec = cv2.VideoWriter.fourcc(*"mp4v")
            self.file = cv2.VideoWriter(
                self.path, codec, self.FRAMES_PER_SECOND, (width, height)
            )
            if not self.file.isOpened():
                raise FlagError(
                    f"--video: can't write {self.path!r}; give a path ending in .mp4 "
                    "in a folder that exists"
                )
        self.file.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
