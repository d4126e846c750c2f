"""The memory or the file that holds a replay."""

import functools
import json
import logging
import math
import mmap
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from torchbeast.base import ranks
from torchbeast.base.errors import CheckpointError, using
from torchbeast.base.hardware import free_memory
from torchbeast.base.nested import Nested
from torchbeast.extras.replay.episodes import Replay, ReplayError
from torchbeast.runs.files import atomic_write

log = logging.getLogger(__name__)


FILE = "replay.zip"  # beside model.tar
PIECE = 2**26  # bytes to read or write at once


def make_replay(flags: Any, spec: dict[str, Nested]) -> Replay:
    """Makes the replay of the flags replay_size, replay_file and unroll_length.

    Args:
      spec: the fields of a row, see acting.row_spec.

    Raises:
      FileError: the file can't be made.
      ReplayError: it does not fit into the memory, or on the disk.
    """
    sizes = []

    def measure(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        sizes.append(math.prod(shape) * dtype.itemsize)
        return np.empty(0, dtype)

    capacity, path = flags.replay_size, flags.replay_file
    if path and ranks.size() > 1:
        path += f".{ranks.rank()}"  # each learner has its own
    arguments = spec, capacity, flags.unroll_length
    Replay(*arguments, measure, flags.seed)
    needed, place = sum(sizes), f"the file {path}" if path else "memory"
    available = free_disk(path) if path else free_memory()
    if needed > available:
        raise ReplayError(
            f"--replay_size {capacity:,} needs {needed / 1e9:.3g} GB, but only "
            f"{available / 1e9:.3g} GB of {place} are free: lower it"
            + ("" if path else ", or put the replay into a file with --replay_file")
        )
    log.info(
        "Replay of up to %s steps: %.3g GB in %s.", f"{capacity:,}", needed / 1e9, place
    )
    create = functools.partial(file_array, path) if path else np.zeros
    return Replay(*arguments, create, flags.seed)


def file_array(path: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array in an unlinked file, which is deleted with the array."""
    size = max(1, math.prod(shape) * dtype.itemsize)
    with using(f"--replay_file {path}"), open(path, "x+b") as file:
        os.unlink(path)
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):  # reserves the space
            os.posix_fallocate(file.fileno(), 0, size)
        return np.ndarray(shape, dtype, mmap.mmap(file.fileno(), size))


def free_disk(path: str) -> int:
    with using(f"--replay_file {path}"):
        return shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free


# --- With a checkpoint ----------------------------------------------------------------


def save(replay: Replay, path: Path, step: int) -> None:
    """Writes the complete episodes to a file, atomically.

    Args:
      step: the learner's, as in the checkpoint.

    Raises:
      CheckpointError: the file can't be written, for example on a full disk. The old
        one, if any, is unchanged.
    """
    content = {"step": step, "arrays": array_shapes(replay), "episodes": replay.index()}
    try:
        with atomic_write(path) as file, zipfile.ZipFile(file, "w") as archive:
            for i, array in enumerate(replay.arrays()):
                with archive.open(str(i), "w", force_zip64=True) as part:
                    data = array.reshape(-1).view(np.uint8).data
                    for begin in range(0, len(data), PIECE):
                        part.write(data[begin : begin + PIECE])
            archive.writestr("index.json", json.dumps(content))
    except OSError as error:
        raise CheckpointError(
            f"{path} can't be written: {error}. Free some space, or leave out "
            "--save_replay"
        ) from error
    log.info("Saved %s: %s steps.", path, f"{replay.size:,}")


def array_shapes(replay: Replay) -> list[list[Any]]:
    return [[list(x.shape), x.dtype.str] for x in replay.arrays()]


def load(replay: Replay, path: Path, step: int) -> None:
    """Reads what save has written into a new replay of the same size and spaces.

    Args:
      step: the learner's. A file of another step is not of its checkpoint: the run was
        killed between the two, or saved later without the replay. It is not read.

    Raises:
      CheckpointError: the file is damaged or does not fit. The replay is then unusable.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            content = json.loads(archive.read("index.json"))
            if content["step"] != step:
                log.warning(
                    "%s is not loaded: it is of step %s, but the checkpoint is of step "
                    "%s. The run refills its replay before it goes on learning.",
                    *(path, content["step"], step),
                )
                return
            if content["arrays"] != array_shapes(replay):
                raise ValueError("it has another --replay_size or other spaces")
            for i, array in enumerate(replay.arrays()):
                with archive.open(str(i)) as part:  # checks the checksum
                    data, begin = array.reshape(-1).view(np.uint8).data, 0
                    while piece := part.read(PIECE):
                        data[begin : begin + len(piece)] = piece
                        begin += len(piece)
                if begin < len(data):
                    raise ValueError("an array is too short")
        replay.restore(content["episodes"])
    except Exception as error:  # a damaged file may raise anything
        raise CheckpointError(
            f"{path} can't be loaded: {error or type(error).__name__}. Remove it: then "
            "the run refills its replay before it goes on learning"
        ) from error
    log.info("Loaded %s: %s steps.", path, f"{replay.size:,}")


class Saved:
    """A guest of the run: its replay is saved and loaded with the checkpoints."""

    def __init__(self, run: Any) -> None:
        self.learner, path = run.learner, run.folder / FILE
        if run.resumed and path.exists():
            load(self.learner.mixer.replay, path, self.learner.step)
        left = run.flags.total_steps - self.learner.step
        if 0 < left <= self.learner.mixer.num_missing():
            self._warn(f"Nothing will be learned: {left:,} of --total_steps are left")
        self._began_at = self.learner.step, self.learner.num_updates
        run.stack.callback(self._report_filling)

    def save(self, path: Path, step: int) -> None:
        if self.learner.flags.save_replay:
            save(self.learner.mixer.replay, path.with_name(FILE), step)

    def _report_filling(self) -> None:
        step, num_updates = self._began_at
        steps = self.learner.step - step
        if steps and self.learner.num_updates == num_updates:
            self._warn(f"Nothing was learned from {steps:,} steps")

    def _warn(self, begin: str) -> None:
        need = f"the replay needs {self.learner.mixer.num_missing():,} more steps"
        advice = "for --learn_start. Lower it or keep the replay by --save_replay"
        log.warning("%s: %s %s", begin, need, advice)
