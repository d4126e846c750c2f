"""Checkpoints: one file that is always whole, and the one before it."""

from __future__ import annotations

import io
import logging
import os
import pathlib
import random
import re
import shlex
import shutil
import zipfile
from typing import Any, BinaryIO

import numpy as np
import torch

from torchbeast.core.errors import UserError
from torchbeast.core.run_folder import atomic_write

log = logging.getLogger(__name__)


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be saved or loaded; the message says what to do."""


def previous_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Where `save` keeps the checkpoint before: model.tar → model.previous.tar."""
    path = pathlib.Path(path)
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def save(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write `state` to `path` entirely or not at all, and keep the one before.

    The state is serialised in memory, checked to be loadable, written to a temporary
    file in the same folder and brought to the disk before it takes the name `path`. At
    every instant, whatever is killed, `path` holds a whole checkpoint if it held one
    before. Call it from one thread at a time.

    Args:
        path: the file, usually model.tar. `previous_path(path)` gets what it held.
        state: tensors and plain Python values in dicts, lists and tuples: what
            torch.load(weights_only=True) accepts. NumPy arrays and classes are not.

    Raises:
        CheckpointError: `state` holds something else, or the file cannot be written
            (full disk). The last good checkpoint is as it was.
    """
    path = pathlib.Path(path)
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        _read(buffer, map_location="meta")  # Reads no tensor data.
    except Exception as error:
        raise CheckpointError(
            f"Cannot save a checkpoint to {path}: what it should hold could not be "
            f"loaded again: {_reason(error)} Save tensors and plain values only."
        ) from error
    data = buffer.getbuffer()
    try:
        with atomic_write(path) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # Before the old checkpoint gives way to it.
            if path.exists():
                _keep_previous(path)
    except Exception as error:
        raise CheckpointError(
            f"Cannot save a checkpoint of {len(data):,} bytes to {path} "
            f"({_free_space(path.parent)}): {error}. The checkpoint before it, if any, "
            "is untouched. Free some space or choose another --savedir."
        ) from error


def load(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint, running no code from it and checking every byte of its data.

    Args:
        path: a file written by `save`.
        map_location: where the tensors go, as for torch.load.

    Returns:
        The state that was saved.

    Raises:
        CheckpointError: the file is missing, truncated, corrupted, or holds more than
            tensors and plain values. Where the checkpoint before it is good, the
            message has the command that goes back to it.
    """
    path = pathlib.Path(path)
    try:
        return _read_file(path, map_location)
    except Exception as error:
        message = f"Cannot load the checkpoint {path}: {_reason(error)}"
    raise CheckpointError(f"{message} {_way_back(path)}")


def _way_back(path: pathlib.Path) -> str:
    """How to go on from the checkpoint before a bad one, if that is good."""
    previous = previous_path(path)
    try:
        _read_file(previous, "meta")
    except FileNotFoundError:
        return f"There is no {previous.name} to go back to."
    except Exception as error:
        return f"Nor can {previous.name} be loaded: {_reason(error)}"
    command = shlex.join(["cp", str(previous), str(path)])
    return (
        f"The checkpoint before it, {previous.name}, is good. To go on from it:\n"
        f"    {command}\nand start again with the same --xpid."
    )


def check(
    state: dict[str, Any], path: str | os.PathLike[str], for_test: bool = False
) -> None:
    """Checks that a checkpoint has what a run goes on from.

    Args:
        state: what `load` gave.
        path: where from, for the message.
        for_test: only the model and the flags are needed.

    Raises:
        CheckpointError: something is missing, has another type, is negative, or a
            weight is not finite.
    """
    wrong = _find_wrong(state, for_test)
    if wrong:
        raise CheckpointError(
            f"The checkpoint {path} can't be used: {wrong}. It was written by another "
            f"program, or changed by one. {_way_back(pathlib.Path(path))}"
        )


_PARTS = ("model_state_dict", "flags")
_PARTS_TO_RESUME = ("optimizer_state_dict", "scheduler_state_dict", "rng", "stats")
_COUNTERS = ("step", "num_updates", "episodes", "games")


def _find_wrong(state: dict[str, Any], for_test: bool) -> str | None:
    for name in _PARTS if for_test else _PARTS + _PARTS_TO_RESUME:
        if not isinstance(state.get(name), dict):
            return f"{name} {_seen(state, name)}, expected a dict"
    for name, weight in state["model_state_dict"].items():
        if not isinstance(weight, torch.Tensor):
            return f"the weight {name} is a {type(weight).__name__}, expected a tensor"
        if weight.is_floating_point() and not weight.isfinite().all():
            return f"the weight {name} is not finite"
    if for_test:
        return None
    stats = state["stats"]
    for name in _COUNTERS:
        value = stats.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            return f"stats: {name} {_seen(stats, name)}, expected a number from 0 on"
    returns = stats.get("game_returns")
    if not isinstance(returns, list) or not all(
        isinstance(x, int | float) for x in returns
    ):
        return f"stats: game_returns {_seen(stats, 'game_returns')}, expected numbers"
    return None


def _seen(values: dict[str, Any], name: str) -> str:
    return f"is {values[name]!r:.60}" if name in values else "is missing"


def check_fit(found: dict[str, Any], model: torch.nn.Module) -> None:
    """Checks that a checkpoint's weights are those of a model.

    Args:
        found: the model_state_dict of the checkpoint.

    Raises:
        CheckpointError: names and shapes differ; the message has them.
    """
    wanted = model.state_dict()

    def shape(x: torch.Tensor) -> str:
        return str(list(x.shape))

    differences = [
        *(
            f"{name} is {shape(found[name])} in the checkpoint, but {shape(x)} here"
            for name, x in wanted.items()
            if name in found and found[name].shape != x.shape
        ),
        *(
            f"{name} {shape(x)} is not in the checkpoint"
            for name, x in wanted.items()
            if name not in found
        ),
        *(
            f"{name} {shape(x)} is in the checkpoint only"
            for name, x in found.items()
            if name not in wanted
        ),
    ]
    if differences:
        shown = 6
        rest = len(differences) - shown
        more = f"; and {rest} more" if rest > 0 else ""
        raise CheckpointError(
            "the checkpoint's weights don't fit the model that the flags and the "
            f"environment's spaces ask for: {'; '.join(differences[:shown])}{more}. "
            "Give --env, --model and --use_lstm as they were, or another --xpid"
        )


def rng_state() -> dict[str, Any]:
    """The states of the global random generators of torch, CUDA, NumPy and Python."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 # there is no other call
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
        "python": (version, words, gauss),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Sets what `rng_state` returned; states of GPUs that are gone are left out."""
    torch.set_rng_state(state["torch"].cpu())
    gpus = torch.cuda.device_count()
    torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"][:gpus]])
    name, keys, *rest = state["numpy"]
    np.random.set_state(  # noqa: NPY002 # there is no other call
        (name, keys.numpy().astype(np.uint32), *rest)
    )
    random.setstate(state["python"])


def _read_file(path: pathlib.Path, map_location: Any) -> dict[str, Any]:
    with path.open("rb") as file:
        return _read(file, map_location)


def _read(file: BinaryIO | io.BytesIO, map_location: Any) -> dict[str, Any]:
    # torch.load does not look at the checksums: a flipped bit would become a weight.
    with zipfile.ZipFile(file) as archive:
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"its part {damaged} has a wrong checksum")
    file.seek(0)
    state = torch.load(file, map_location=map_location, weights_only=True)
    if not isinstance(state, dict):
        raise TypeError(f"it holds a {type(state).__name__}, expected a dict")
    return state


def _reason(error: Exception) -> str:
    """What was wrong, in a sentence."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file."
    if isinstance(error, zipfile.BadZipFile):
        return f"it is truncated, corrupted or no checkpoint ({error})."
    # The long message of torch.load tells how to run the code; name it instead.
    if refused := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"it refers to {refused[1]}, which is refused as it could run code."
    return f"{type(error).__name__}: {str(error).strip()}"


def _keep_previous(path: pathlib.Path) -> None:
    """Give the checkpoint at `path` a second name, so that `path` can be replaced."""
    previous = previous_path(path)
    temporary = previous.with_name(f".{previous.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError as error:  # Some network and USB file systems have no hard links.
        log.debug("Copying %s, as it cannot be linked: %s", path, error)
        try:
            shutil.copyfile(path, temporary)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    temporary.replace(previous)
    # Renaming one name of a file to another of its names does nothing, and leaves both.
    temporary.unlink(missing_ok=True)


def _free_space(folder: pathlib.Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,} bytes are free there"
    except OSError as error:
        return f"free space unknown: {error}"
