"""Checkpoints beside model.tar: the best, and those of --checkpoint_history."""

from __future__ import annotations

import logging
import math
import pathlib
import re

from torchbeast.runs.checkpoint import CheckpointError, copy, load

log = logging.getLogger(__name__)

BEST = "model.best.tar"  # see evaluator.py


def keep(path: pathlib.Path, step: int, count: int, total_steps: int) -> None:
    """Copies the checkpoint to a file that stays, such as model.50000.tar.

    At most `count` of these stay: those nearest after `count` points, evenly over
    `total_steps`.

    Raises:
      CheckpointError: the folder can't be written.
    """
    target = path.with_name(f"{path.stem}.{step}{path.suffix}")
    try:
        copy(path, target)
        files = _kept(path)
        steps, excess = sorted(files), len(files) - count
        if excess > 0:  # the run was extended
            points = (total_steps * k / count for k in range(1, count + 1))
            wanted = {next((s for s in steps if s >= x), None) for x in points}
            for old in [s for s in steps if s not in wanted][:excess]:
                files[old].unlink()
    except OSError as error:
        raise CheckpointError(f"Can't keep {path} as {target.name}: {error}") from error


def _kept(path: pathlib.Path) -> dict[int, pathlib.Path]:
    """The files of --checkpoint_history beside model.tar, by their steps."""
    name = re.compile(rf"{re.escape(path.stem)}\.(\d+){re.escape(path.suffix)}")
    matches = ((file, name.fullmatch(file.name)) for file in path.parent.iterdir())
    return {int(match[1]): file for file, match in matches if match}


def remove_later(path: pathlib.Path, step: int) -> None:
    """Removes the best and the kept checkpoints of steps after that of model.tar.

    A run that was killed repeats these steps, and other weights follow from them.
    """
    files = list(_kept(path).items())
    best = path.with_name(BEST)
    if best.exists() and (found := best_result(best)):
        files.append((found[0], best))
    for number, file in files:
        if number > step:
            log.warning(
                "Removing %s: it is of step %s, and the run goes on from step %s.",
                *(file.name, f"{number:,}", f"{step:,}"),
            )
            file.unlink(missing_ok=True)


def best_result(path: pathlib.Path) -> tuple[int, float] | None:
    """Step and return of the best checkpoint so far; None if it can't be used."""
    try:
        stats = load(path)["stats"]
        found = int(stats["step"]), float(stats["eval_return"])
        if math.isnan(found[1]):
            raise ValueError("its eval_return is NaN")
    except Exception as error:
        log.warning("%s is not used: %s", path, error)
        return None
    return found
