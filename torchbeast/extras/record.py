"""record.STEP, what --record writes about the start at STEP.

Its first line is JSON: flags, and versions of packages. Then follow the events of
MonoBeast, see order.py, or the batches of PolyBeast, see InferenceOrder.
"""

import itertools
import json
import pathlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from torchbeast.base.errors import using
from torchbeast.runs import trust
from torchbeast.runs.files import atomic_write, provenance, writing


def records_of(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """The records of a run by the step at which they begin."""
    found = folder.glob("record.*")
    return {int(x.suffix[1:]): x for x in found if x.suffix[1:].isdecimal()}


def drop_later(folder: pathlib.Path, step: int) -> None:
    """Deletes records of steps that this start makes again, like rows of logs.csv."""
    for first, path in records_of(folder).items():
        if first >= step:
            path.unlink()


def begin_record(run: Any) -> Callable[[bytes], None]:
    """Writes the first line of a record; returns what appends to it."""
    path = run.start.folder.path / f"record.{run.learner.step}"
    flags = run.flags.as_dict()
    header = {"flags": flags, "flags_signature": trust.sign(flags)}
    with writing(path):
        with atomic_write(path) as file:
            file.write(f"{json.dumps({**header, 'about': about()})}\n".encode())
        file = run.stack.enter_context(path.open("ab"))

    def append(data: bytes) -> None:
        with writing(path):
            file.write(data)
            file.flush()  # all of it, or an error

    return append


def read_whole(path: pathlib.Path) -> tuple[dict[str, Any], bytes]:
    """The first line of a record, and what follows it. Raises FileError."""
    with using(path, "is no record"):
        line, _, data = path.read_bytes().partition(b"\n")
        header = json.loads(line)
        header |= {"flags": {**header["flags"]}, "about": {**header["about"]}}
        return header, data


def about() -> dict[str, Any]:
    """What beside flags and order a run may depend on."""
    now = provenance()
    commit, cpu = (now["git"] or {}).get("commit"), now["hardware"]["cpu"]
    return {**now["versions"], "cpu": cpu, "commit": commit}


class InferenceOrder:
    """PolyBeast's record: for each step that was learned from, which inference acted.

    It has the order of batches, the version of the weights of each step, and the size
    of its inference batch. As row 0 of a rollout is the last row of the one before, and
    no two rows have the same place, rollouts of a stream can be told from others.
    """

    def __init__(self) -> None:
        self._numbers, self._places = itertools.count(), torch.arange(2**16) << 16
        self.append: Callable[[bytes], None]

    def stamp(self, count: int) -> torch.Tensor:
        """int64 [1, count]: number of an inference batch, place in it, its size."""
        return self._places[None, :count] + (next(self._numbers) << 32 | count)

    def add(self, versions: torch.Tensor, stamps: torch.Tensor) -> None:
        """Writes a learner batch. Call it in the order of updates.

        Args:
          versions: policy_version [T + 1, B].
          stamps: of each row [T + 1, B].
        """
        parts = versions, stamps >> 32, stamps >> 16 & 0xFFFF, stamps & 0xFFFF
        x = torch.stack(parts, -1).int().numpy()
        changes = np.diff(x, axis=0, prepend=np.int32(0))
        data = zlib.compress(changes.tobytes(), 1)
        self.append(len(data).to_bytes(4, "little") + data)


def read_batches(path: pathlib.Path) -> Iterator[np.ndarray]:
    """The learner batches of PolyBeast's record, in the order of updates.

    Yields:
      int32 [T + 1, B, 4]: version of the weights, number of the inference batch in
      this start, place in it, its size.

    Raises:
      FileError: the file is no record.
    """
    header, data = read_whole(path)
    at = 0
    with using(path, "is no record of PolyBeast"):
        shape = header["flags"]["unroll_length"] + 1, -1, 4
        while at + 4 <= len(data):
            start, at = at + 4, at + 4 + int.from_bytes(data[at : at + 4], "little")
            if at > len(data):
                return
            changes = np.frombuffer(zlib.decompress(data[start:at]), np.int32)
            yield changes.reshape(shape).cumsum(0, np.int32)
