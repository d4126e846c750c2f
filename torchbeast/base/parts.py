"""Optional parts: each file of torchbeast/extras. Delete any; add one, and it is found.

A file may have

    Flags          a Group of its flags
    command_line(parser, words)    may answer --help, or refuse the words
    more_flags(declared, typed)    returns values of flags, by name, in place of saved
                   ones; declared are the script's flags, typed the values typed
    resolve(flags)    fills in its flags and checks them; raises FlagError
    actors_class(flags)    what starts actors in place of local/actors.py: Actors; None
                   if the flags ask for none. Its methods and attributes are the same
    resume(flags, saved)    may refuse to resume from this checkpoint: FlagError
    initialize(flags, model)    sets weights with which a new run begins
    attach(run)    returns a guest of a training run, or None if the flags ask for none
    fetch(flags, folder, step)    may bring a newer checkpoint into the run's folder,
                   whose own is of this step or None; returns whether it has
    test(typed, find_player)    plays games with a checkpoint, for --mode test
    tested(flags, folder, step)    the run's checkpoint of this step was tested

A guest may have

    about()             returns entries for this start in meta.json
    actors(actors, rows)    returns what takes the place of MonoBeast's actors; rows
                        are its slots [slots, T + 1, ...] in NumPy
    poll()              called in each round of the main loop, about once per second
    show(queued, acted, streams=None)    also in each round: rollouts that wait for the
                        learner, steps made since the start, PolyBeast's streams ("3/4")
    update(update)      an update is about to be finished
    columns()           returns columns of the next row of logs.csv
    row(row)            a row of logs.csv was written
    save(path, step)    a checkpoint was written, and nothing is learned meanwhile
    saved(path, step)   the learner goes on
    finish()            all steps are learned from, the run is not closed yet; returns
                        True if a stop signal has cut it off
    numbers()           returns metrics, by name; called in any thread
    close(status)       the run has ended with this exit status

update, columns and row are called in the thread that learns, the others in the main
thread. If attach or a method raises, the run ends with this error. A part imports
PyTorch and its package where it uses them.
"""

import functools
import importlib
import logging
import pkgutil
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)


@functools.cache
def find(package: str = "torchbeast.extras") -> tuple[ModuleType, ...]:
    """The parts in a folder, by name; none if there is no such folder."""
    try:
        folder = importlib.import_module(package)
    except ModuleNotFoundError:
        return ()
    names = [x.name for x in pkgutil.iter_modules(folder.__path__)]
    return tuple(importlib.import_module(f"{package}.{x}") for x in names)


def optional(name: str) -> Any:
    """One part, without an import of the others; None if it was deleted."""
    try:
        return importlib.import_module(f"torchbeast.extras.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("torchbeast.extras"):
            return None
        raise


def groups() -> list[Any]:
    """The flags of all parts, for a parser."""
    return [part.Flags for part in find() if hasattr(part, "Flags")]


def call(name: str, *args: Any) -> list[Any]:
    """Calls a function of all parts that have it; returns what they return."""
    return [getattr(part, name)(*args) for part in find() if hasattr(part, name)]


class Guests(list[Any]):
    """The guests of a run."""

    def all(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of all guests that have it; returns what they return."""
        return [getattr(x, method)(*args) for x in self if hasattr(x, method)]

    def close(self, status: int) -> None:
        """Closes them, the last one first: it may have a file that others watch."""
        for guest in [x for x in self[::-1] if hasattr(x, "close")]:
            try:
                guest.close(status)
            except Exception:
                log.exception("The end of %s failed.", type(guest).__name__)
