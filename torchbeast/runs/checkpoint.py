"""Checkpoints: model.tar, written atomically, the previous, the best and kept ones."""

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

from torchbeast.base.errors import CheckpointError
from torchbeast.core.finite import find_not_finite
from torchbeast.core.moments import RunningMoments
from torchbeast.runs.files import atomic_write

log = logging.getLogger(__name__)

BEST = "model.best.tar"  # see evaluator.py


def previous_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path of the previous checkpoint: model.tar → model.previous.tar."""
    path = pathlib.Path(path)
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def find(place: str | os.PathLike[str], savedir: str = "") -> pathlib.Path:
    """The path of the checkpoint that `place` names.

    Args:
      place: the name of a run in `savedir`, a file, or the folder of a run.
    """
    path = pathlib.Path(place).expanduser()
    if savedir and (pathlib.Path(savedir).expanduser() / place).is_dir():
        path = pathlib.Path(savedir).expanduser() / place
    return path / "model.tar" if path.is_dir() else path


def save(
    path: str | os.PathLike[str], state: dict[str, Any], keep_previous: bool = True
) -> None:
    """Writes `state` to `path` atomically, and keeps the previous checkpoint.

    It serialises the state in memory and checks that it can be loaded. Then it writes a
    temporary file, syncs it to the disk and renames it to `path`. So `path` is always
    complete, even if the process is killed. One thread at a time.

    Args:
      path: the file, usually model.tar. Its old content moves to `previous_path(path)`.
      state: tensors and plain Python values in dicts, lists and tuples, as
        torch.load(weights_only=True) accepts them. No NumPy arrays, no other classes.
      keep_previous: whether the old content is kept.

    Raises:
      CheckpointError: `state` holds something else, or the file can't be written, for
        example on a full disk. The last checkpoint is unchanged.
    """
    path = pathlib.Path(path)
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        _read(buffer, map_location="meta")  # reads no tensor data
    except Exception as error:
        raise CheckpointError(
            f"Cannot save a checkpoint to {path}, because it could not be loaded "
            f"again: {_reason(error)} Save only tensors and plain values."
        ) from error
    data = buffer.getbuffer()
    try:
        with atomic_write(path) as file:
            file.write(data)
            file.flush()
            # The new one must be on disk before the previous one is replaced.
            os.fsync(file.fileno())
            if keep_previous and path.exists():
                copy(path, previous_path(path))
    except Exception as error:
        raise CheckpointError(
            f"Cannot save a checkpoint of {len(data):,} bytes to {path}: {error}. The "
            "previous checkpoint, if any, is unchanged. Free some space or choose "
            "another --savedir."
        ) from error


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads what `save` has written, to the CPU.

    Verifies its checksums and runs no code from it.

    Raises:
      CheckpointError: the file is missing, truncated, corrupted, or holds something
        else than tensors and plain values. If the previous checkpoint is good, the
        message has the command that restores it.
    """
    path = pathlib.Path(path)
    try:
        return _read_file(path)
    except Exception as error:
        message = f"Cannot load the checkpoint {path}: {_reason(error)}"
    raise CheckpointError(f"{message} {way_back(path)}")


def way_back(path: pathlib.Path) -> str:
    """Describes how to restore the previous checkpoint, if it is good."""
    previous = previous_path(path)
    try:
        if wrong := _find_not_finite(_read_file(previous)):
            raise ValueError(wrong)
    except FileNotFoundError:
        return f"There is no {previous.name} to restore."
    except Exception as error:
        return f"{previous.name} can't be loaded either: {_reason(error)}"
    command = shlex.join(["cp", str(previous), str(path)])
    return (
        f"The previous checkpoint, {previous.name}, is good. To restore it:\n"
        f"    {command}\nand start again with the same --xpid."
    )


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


def check(
    state: dict[str, Any], path: str | os.PathLike[str], for_test: bool = False
) -> None:
    """Checks that a checkpoint is complete; for a test, only its model and flags.

    Raises:
      CheckpointError: a part is missing, has another type, is negative, or a weight is
        not finite.
    """
    wrong = _find_wrong(state, for_test)
    if wrong:
        raise CheckpointError(
            f"The checkpoint {path} can't be used: {wrong}. Another program wrote or "
            f"changed it. {way_back(pathlib.Path(path))}"
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
    if wrong := _find_not_finite(state):
        return wrong
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


def _find_not_finite(state: dict[str, Any]) -> str | None:
    """Names a value with which each resumed run fails at its first update."""
    for name in ("model", "optimizer", "scheduler", "explorer"):
        name += "_state_dict"
        if place := find_not_finite(state.get(name), name):
            return f"{place} is not finite"
    return None


def _seen(values: dict[str, Any], name: str) -> str:
    return f"is {values[name]!r:.60}" if name in values else "is missing"


def check_fit(found: dict[str, Any], model: torch.nn.Module) -> None:
    """Checks that the model_state_dict of a checkpoint has the weights of a model.

    Raises:
      CheckpointError: names or shapes differ; the message lists them.
    """
    differences = _differences(found, model)
    if differences:
        raise CheckpointError(
            "the checkpoint's weights don't fit the model that the flags and the "
            f"environment's spaces define: {_some(differences)}. Give the --env "
            "and the flags of the model (--model, --use_lstm, ...) that the checkpoint "
            "has, or another --xpid. If an older version saved it, use the commit in "
            "its meta.json"
        )


def take_over(place: str, savedir: str, model: torch.nn.Module) -> None:
    """Loads those weights of a checkpoint that fit the model; logs the others.

    Args:
      place, savedir: see `find`.

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
    saved = load(path)
    check(saved, path, for_test=True)
    found = saved["model_state_dict"]
    differences = _differences(found, model)
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, RunningMoments):
            parts = {f"{name}.{part}" for part in module.state_dict()}
            if parts & differences.keys():  # a count without its mean is wrong
                for part in sorted(parts - differences.keys()):
                    differences[part] = f"{part} belongs to moments that do not fit"
    fitting = {name: x for name, x in found.items() if name not in differences}
    if not fitting:
        raise CheckpointError(
            f"--init_from {place}: none of its weights fits this model: "
            f"{_some(differences)}"
        )
    model.load_state_dict(fitting, strict=False)
    number = len(model.state_dict())
    log.info("Took %d of %d weights from %s.", len(fitting), number, path)
    if differences:
        log.warning("These were not taken: %s.", "; ".join(differences.values()))


def _differences(found: dict[str, Any], model: torch.nn.Module) -> dict[str, str]:
    """Describes the weights whose names or shapes differ from the model's, by name."""
    there = {name: list(x.shape) for name, x in found.items()}
    here = {name: list(x.shape) for name, x in model.state_dict().items()}
    texts = {}
    for name in sorted(here.keys() | there.keys()):
        if name not in there:
            texts[name] = f"{name} {here[name]} is not in the checkpoint"
        elif name not in here:
            texts[name] = f"{name} {there[name]} is in the checkpoint only"
        elif there[name] != here[name]:
            shapes = f"{there[name]} in the checkpoint, but {here[name]} here"
            texts[name] = f"{name} is {shapes}"
    return texts


def _some(texts: dict[str, str], shown: int = 6) -> str:
    rest = len(texts) - shown
    more = f"; and {rest} more" if rest > 0 else ""
    return f"{'; '.join(list(texts.values())[:shown])}{more}"


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


def _read_file(path: pathlib.Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return _read(file, "cpu")


def _read(file: BinaryIO, map_location: str) -> dict[str, Any]:
    # torch.load does not verify checksums: a flipped bit would change a weight.
    with zipfile.ZipFile(file) as archive:
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"its part {damaged} has a wrong checksum")
    file.seek(0)
    state = torch.load(file, map_location=map_location, weights_only=True)
    if not isinstance(state, dict):
        raise TypeError(f"it holds a {type(state).__name__}, expected a dict")
    return state


def _reason(error: Exception) -> str:
    """Describes an error in one sentence."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file."
    if isinstance(error, zipfile.BadZipFile):
        return f"it is truncated, corrupted or not a checkpoint ({error})."
    # torch.load's long message explains how to run the code. Only name the code.
    if refused := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"it refers to {refused[1]}, which is refused because it may run code."
    return f"{type(error).__name__}: {str(error).strip()}"


def copy(path: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a file, atomically."""
    with path.open("rb") as source, atomic_write(target) as file:
        shutil.copyfileobj(source, file)


# --- The best checkpoint --------------------------------------------------------------


def remove_later(path: pathlib.Path, step: int) -> None:
    """Removes the best checkpoint if it is of a later step than model.tar.

    A run that was killed repeats these steps, and other weights follow from them.
    """
    best = path.with_name(BEST)
    if best.exists() and (found := best_result(best)) and found[0] > step:
        log.warning("%s is removed: it is of a later step.", best.name)
        best.unlink(missing_ok=True)


def best_result(path: pathlib.Path) -> tuple[int, float, dict[str, Any]] | None:
    """Step, return and flags of the best checkpoint; None if it can't be used."""
    try:
        state = load(path)
        stats = state["stats"]
        return int(stats["step"]), float(stats["eval_return"]), dict(state["flags"])
    except Exception as error:
        log.warning("%s is not used: %s", path, error)
        return None
