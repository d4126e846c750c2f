"""The memory or the file that holds a replay, and replay.zip."""

import json
import logging
import math
import mmap
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from torchbeast.base import ranks
from torchbeast.base.errors import CheckpointError, FlagError, using
from torchbeast.base.hardware import free_memory
from torchbeast.base.nested import Nested
from torchbeast.extras.replay.episodes import Replay
from torchbeast.runs.files import atomic_write

log = logging.getLogger(__name__)


def make_replay(flags: Any, spec: dict[str, Nested]) -> Replay:
    """Makes the replay of the flags, for rows of a spec (acting.row_spec).

    Raises:
      FlagError: it does not fit into the memory, or the file can't be made.
    """
    path, sizes, free = flags.replay_file, [], free_memory()
    if path and ranks.size() > 1:
        path += f".{ranks.rank()}"  # each learner has its own

    def create(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        sizes.append(math.prod(shape) * dtype.itemsize)
        if path:
            return file_array(path, shape, dtype)
        if sum(sizes) > free:
            raise FlagError(
                f"--replay_size {flags.replay_size:,} needs more than the free memory, "
                f"{free / 1e9:.3g} GB: lower it, or keep the replay in a --replay_file"
            )
        return np.zeros(shape, dtype)

    replay = Replay(spec, flags.replay_size, flags.unroll_length, create, flags.seed)
    text = "The replay takes %.3g GB in %s. Learning begins at %d steps."
    log.info(text, sum(sizes) / 1e9, path or "memory", flags.learn_start)
    return replay


def file_array(path: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array in an unlinked file, which is deleted with the array."""
    size = max(1, math.prod(shape) * dtype.itemsize)
    with using(f"--replay_file {path}"), open(path, "x+b") as file:
        os.unlink(path)
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):  # reserves the space
            os.posix_fallocate(file.fileno(), 0, size)
        return np.ndarray(shape, dtype, mmap.mmap(file.fileno(), size))


# --- With a checkpoint ----------------------------------------------------------------


def save(replay: Replay, path: Path, step: int) -> None:
    """Writes the complete episodes to a file, atomically, with the learner's step.

    Raises:
      CheckpointError: the file can't be written. The old one, if any, is unchanged.
    """
    index = {"step": step, "episodes": replay.index()}
    try:
        with atomic_write(path) as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr("index.json", json.dumps(index))
            for i, array in enumerate(replay.arrays):
                with archive.open(str(i), "w", force_zip64=True) as part:
                    part.write(array.reshape(-1).view(np.uint8).data)
    except OSError as error:
        raise CheckpointError(f"{path} can't be written: {error}") from error
    log.info("Saved %s: %s steps.", path, f"{replay.size:,}")


def load(replay: Replay, path: Path, step: int) -> None:
    """Reads what `save` has written into a new replay.

    It does not read a file of another step: the run was killed between checkpoint and
    replay, or saved later without the replay.

    Raises:
      CheckpointError: the file is damaged or does not fit. The replay is then unusable.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            index = json.loads(archive.read("index.json"))
            if index["step"] != step:
                text = "%s is not loaded: it is of step %s, the checkpoint of step %s."
                log.warning(text, path, index["step"], step)
                return
            for i, array in enumerate(replay.arrays):
                if archive.getinfo(str(i)).file_size != array.nbytes:
                    raise ValueError("it has another --replay_size or other spaces")
                data, begin = array.reshape(-1).view(np.uint8).data, 0
                with archive.open(str(i)) as part:  # checks the checksum
                    while piece := part.read(2**26):
                        data[begin : begin + len(piece)] = piece
                        begin += len(piece)
        replay.restore(index["episodes"])
    except Exception as error:  # a damaged file may raise anything
        raise CheckpointError(
            f"{path} can't be loaded: {error!r}. Remove it: then the run fills its "
            "replay again"
        ) from error
    log.info("Loaded %s: %s steps.", path, f"{replay.size:,}")


class Saved:
    """A guest of the run: its replay is saved and loaded with the checkpoints."""

    def __init__(self, run: Any) -> None:
        self.run, self.path = run, run.folder / "replay.zip"
        if run.resumed and self.path.exists():
            load(run.learner.mixer.replay, self.path, run.learner.step)

    def save(self, path: Path, step: int) -> None:
        if self.run.flags.save_replay:
            save(self.run.learner.mixer.replay, self.path, step)
