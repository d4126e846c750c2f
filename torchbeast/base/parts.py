"""Optional parts: each file of torchbeast/extras. Delete any; add one, and it is found.

A file may have

    Flags          a Group of its flags
    attach(run)    returns a guest of a training run, or None if the flags ask for none
    fetch(flags, folder)    called before the checkpoint of a run is read

A guest has some of these methods, which the main thread calls:

    poll()              about once per second
    columns()           of the next row of logs.csv, such as {"eval_return": 1.0}
    row(row)            a row of logs.csv was written
    saved(path, step)   a checkpoint was saved
    finish()            all steps are learned from; the run is not closed yet
    close(status)       the last checkpoint is saved, the run ends with this status

If attach or a method raises, the run ends with this error. Importing a file loads
neither PyTorch nor its package: it imports them where it uses them.
"""

import functools
import importlib
import importlib.util
import pkgutil
from types import ModuleType
from typing import Any


@functools.cache
def find(folder: str = "extras") -> tuple[ModuleType, ...]:
    """The modules of a folder of torchbeast, by name; none if there is no folder."""
    name = "torchbeast"
    for part in folder.split("/"):
        name = f"{name}.{part}"
        if importlib.util.find_spec(name) is None:
            return ()
    files = pkgutil.iter_modules(importlib.import_module(name).__path__)
    return tuple(importlib.import_module(f"{name}.{x.name}") for x in files)


def groups() -> list[Any]:
    """The flags of all parts, for a parser."""
    return [module.Flags for module in find() if hasattr(module, "Flags")]


def fetch(flags: Any, folder: Any) -> None:
    for module in find():
        if hasattr(module, "fetch"):
            module.fetch(flags, folder)


class Guests(list[Any]):
    """The guests of a run."""

    def attach(self, run: Any) -> None:
        """Adds them one by one, so that those before an error can be closed."""
        for module in find():
            if hasattr(module, "attach") and (guest := module.attach(run)):
                self.append(guest)

    def all(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of all guests that have it; returns what they return."""
        return [getattr(x, method)(*args) for x in self if hasattr(x, method)]
