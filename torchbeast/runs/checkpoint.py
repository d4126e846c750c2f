"""Checkpoints: model.tar, written atomically, and the one before."""

import io
import os
import pathlib
import random
import re
import shutil
import zipfile
from typing import Any

import numpy as np
import torch

from torchbeast.base.errors import CheckpointError
from torchbeast.runs.files import atomic_write


def previous_path(path: pathlib.Path) -> pathlib.Path:
    """The path of the previous checkpoint: model.tar → model.previous.tar."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def save(path: pathlib.Path, state: dict[str, Any], keep_previous: bool = True) -> None:
    """Writes tensors and plain values; keeps the content before as the previous one.

    Raises CheckpointError if it can't be written; the last one is unchanged then.
    """
    data = io.BytesIO()
    torch.save(state, data)
    try:
        with atomic_write(path) as file:
            file.write(data.getbuffer())
            if keep_previous and path.exists():
                file.flush()
                os.fsync(file.fileno())  # before the previous one is replaced
                copy(path, previous_path(path))
    except OSError as error:
        raise CheckpointError(
            f"Cannot save a checkpoint of {data.tell():,} bytes to {path}: {error}. "
            "The last one is unchanged. Free some space or choose another --savedir"
        ) from error


def load(path: pathlib.Path) -> dict[str, Any]:
    """Reads what `save` has written, to the CPU. Runs no code from it.

    Raises CheckpointError if it is missing or damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load verifies no checksums
            if damaged := archive.testzip():
                raise ValueError(f"its part {damaged} has a wrong checksum")
        state = torch.load(path, map_location="cpu", weights_only=True)
        for name in ("model_state_dict", "flags"):
            state[name].items()  # both are dicts
        return state
    except Exception as error:  # a damaged file may raise anything
        code = re.search(r"GLOBAL [\w.]+", str(error))  # torch advises to run it
        why = f"it refers to the code {code[0]}" if code else repr(error)
    raise CheckpointError(f"Cannot load the checkpoint {path}: {why}. {way_back(path)}")


def way_back(path: pathlib.Path) -> str:
    if (previous := previous_path(path)).exists():
        return f"To go on from the checkpoint before, copy {previous} to {path.name}"
    return f"There is no {previous.name} to go on from"


def check_fit(found: dict[str, Any], model: torch.nn.Module) -> None:
    """Loads weights into a model. Raises CheckpointError if they don't fit."""
    try:
        model.load_state_dict(found)
    except RuntimeError as error:
        raise CheckpointError(
            f"the checkpoint's weights don't fit the model of these flags: {error}. "
            "Give the --env and the flags of the checkpoint, or another --xpid"
        ) from error


def rng_state() -> dict[str, Any]:
    """The states of the global random generators of torch, CUDA, NumPy and Python."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 # there is no other call
    return {
        "torch": torch.get_rng_state(),
        # Not if this run uses no GPU: one that is there may not work.
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": (name, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
        "python": random.getstate(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores the result of `rng_state`, except for GPUs that no longer exist."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_initialized():
        gpus = torch.cuda.device_count()
        torch.cuda.set_rng_state_all(state["cuda"][:gpus])
    name, keys, *rest = state["numpy"]
    # There is no other call.
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    random.setstate(state["python"])


def copy(path: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a file, atomically."""
    with path.open("rb") as source, atomic_write(target) as file:
        shutil.copyfileobj(source, file)
