"""Checkpoints: model.tar, written atomically, the previous, the best and kept ones."""

import io
import logging
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
from torchbeast.core.finite import find_not_finite
from torchbeast.core.moments import RunningMoments
from torchbeast.runs.files import atomic_write

log = logging.getLogger(__name__)


def previous_path(path: pathlib.Path) -> pathlib.Path:
    """The path of the previous checkpoint: model.tar → model.previous.tar."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def find(place: str | os.PathLike[str], savedir: str = "") -> pathlib.Path:
    """The checkpoint that `place` names: a run in `savedir`, a folder or a file."""
    path = pathlib.Path(place).expanduser()
    if savedir and (pathlib.Path(savedir).expanduser() / place).is_dir():
        path = pathlib.Path(savedir).expanduser() / place
    return path / "model.tar" if path.is_dir() else path


def save(path: pathlib.Path, state: dict[str, Any], keep_previous: bool = True) -> None:
    """Writes tensors and plain values; keeps the content before as the previous one.

    At every moment `path` is the complete old or the complete new checkpoint.

    Raises:
      CheckpointError: it can't be written. The last checkpoint is unchanged.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getbuffer()
    try:
        with atomic_write(path) as file:
            file.write(data)
            file.flush()
            # The new one must be on disk before the previous one is replaced.
            os.fsync(file.fileno())
            if keep_previous and path.exists():
                copy(path, previous_path(path))
    except OSError as error:
        raise CheckpointError(
            f"Cannot save a checkpoint of {len(data):,} bytes to {path}: {error}. The "
            "previous checkpoint, if any, is unchanged. Free some space or choose "
            "another --savedir."
        ) from error


def load(path: pathlib.Path) -> dict[str, Any]:
    """Reads what `save` has written, to the CPU. Runs no code from it.

    Raises:
      CheckpointError: it is missing or damaged, holds something else, or a number of
        it is not finite; the message names the previous checkpoint.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load verifies no checksums
            if damaged := archive.testzip():
                raise ValueError(f"its part {damaged} has a wrong checksum")
        state = torch.load(path, map_location="cpu", weights_only=True)
        for name in ("model_state_dict", "flags"):
            if not isinstance(state[name], dict):
                raise TypeError(f"{name} is no dict")
        for part in ("model", "optimizer", "scheduler", "explorer"):
            name = f"{part}_state_dict"
            if place := find_not_finite(state.get(name), name):
                raise ValueError(f"{place} is not finite")
        return state
    except Exception as error:  # a damaged file may raise anything
        refused = re.search(r"GLOBAL [\w.]+", str(error))  # torch's text is long
        why = f"it refers to the code {refused[0]}" if refused else repr(error)
    raise CheckpointError(f"Cannot load the checkpoint {path}: {why}. {way_back(path)}")


def way_back(path: pathlib.Path) -> str:
    """What to do if a checkpoint can't be used."""
    if (previous := previous_path(path)).exists():
        return f"To go on from the checkpoint before, copy {previous} to {path.name}"
    return f"There is no {previous.name} to go on from"


def first_update_failed(path: pathlib.Path, replay: pathlib.Path) -> str:
    """What to do if a resumed run fails at its first update.

    Args:
      path, replay: the files that it was resumed from; `replay` need not exist.
    """
    other = f", or {replay}, which you may remove" if replay.exists() else ""
    return (
        "This was the first update after the start. If the same command fails like "
        f"this again, the cause is in {path}{other}. {way_back(path)}"
    )


def check_fit(found: dict[str, Any], model: torch.nn.Module) -> None:
    """Checks that the model_state_dict of a checkpoint has the weights of a model.

    Raises:
      CheckpointError: names or shapes differ; the message lists them.
    """
    if differences := list(_differences(found, model).values()):
        raise CheckpointError(
            "the checkpoint's weights don't fit the model that the flags and the "
            f"environment's spaces define: {'; '.join(differences[:6])}. Give the "
            "--env and the flags of the model that the checkpoint has, or another "
            "--xpid. If an older version saved it, use the commit in its meta.json"
        )


def take_over(place: str, savedir: str, model: torch.nn.Module) -> None:
    """Loads those weights of a checkpoint that fit the model; logs the others.

    Raises:
      CheckpointError: the file can't be read, or none of its weights fits.
    """
    try:
        path = find(place, savedir)
        path.stat()
    except (OSError, ValueError, RuntimeError) as error:  # too long; ~ without HOME
        raise CheckpointError(
            f"--init_from {place}: neither a run in {savedir} nor a file: {error}"
        ) from error
    found = load(path)["model_state_dict"]
    differences = _differences(found, model)
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, RunningMoments):
            parts = {f"{name}.{part}" for part in module.state_dict()}
            if parts & differences.keys():  # a count without its mean is wrong
                for part in sorted(parts - differences.keys()):
                    differences[part] = f"{part} belongs to moments that do not fit"
    fitting = {name: x for name, x in found.items() if name not in differences}
    if not fitting:
        raise CheckpointError(f"--init_from {place}: none of its weights fits")
    model.load_state_dict(fitting, strict=False)
    number = len(model.state_dict())
    log.info("Took %d of %d weights from %s.", len(fitting), number, path)
    if differences:
        log.warning("These were not taken: %s.", "; ".join(differences.values()))


def _differences(found: dict[str, Any], model: torch.nn.Module) -> dict[str, str]:
    """Describes the weights whose names or shapes differ from the model's, by name."""
    there = {name: list(x.shape) for name, x in found.items()}
    here = {name: list(x.shape) for name, x in model.state_dict().items()}
    no = "missing"
    return {
        k: f"{k} is {there.get(k, no)} in the checkpoint, but {here.get(k, no)} here"
        for k in sorted(here.keys() | there.keys())
        if here.get(k) != there.get(k)
    }


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
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_initialized():
        gpus = torch.cuda.device_count()
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"][:gpus]])
    name, keys, *rest = state["numpy"]
    np.random.set_state(  # noqa: NPY002 # there is no other call
        (name, keys.numpy().astype(np.uint32), *rest)
    )
    random.setstate(state["python"])


def copy(path: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a file, atomically."""
    with path.open("rb") as source, atomic_write(target) as file:
        shutil.copyfileobj(source, file)
