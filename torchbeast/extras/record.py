"""--record: the order of an asynchronous run, in record.STEP for the start at STEP.

What MonoBeast learns follows from its flags and from the order in which actors begin
unrolls, with which version of the weights, and finish them. So a record holds no more
than this, as EVENTS, and tools/repeat.py makes the run again. All else is fixed:

    slots         have no effect: a batch copies what they hold
    batches       hold rollouts in the order in which unrolls finish; learner threads
                  learn from batches in this order, too
    games         follow from the seed, and after a resume from its step
    actions       are drawn from each actor's generator
    minibatches   are drawn from the learner's global generator, and replayed rollouts
                  from the replay's, in the order of batches
    evaluations   have a process and generators of their own

The first line of a record is JSON: flags, and versions of packages. Then follow the
events, or the batches of PolyBeast, see InferenceOrder. Each is written at once, so a
killed process leaves at most a torn last one, which is not read.
"""

from __future__ import annotations

import itertools
import json
import logging
import pathlib
import shlex
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from torchbeast.base.errors import FlagError, using
from torchbeast.base.flag import FREE, Group, flag

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# `who` is 2 * actor, `value` the version of the weights with which it begins an unroll;
# or `who` is 2 * actor + 1, `value` the checksum of the unroll that it has finished.
EVENTS = np.dtype([("who", "<u2"), ("value", "<u4")])
LARGE = 2**16  # bytes of a rollout's field


class Flags(Group):
    record: bool = flag(
        False, "record the order of the run, for torchbeast.tools.repeat", FREE
    )


def attach(run: Any) -> Recorder | None:
    for first, path in records_of(run.folder).items():
        if first >= run.learner.step:  # this start makes these steps again
            path.unlink()
    if not run.flags.record:
        return None
    from torchbeast.base import ranks

    launcher = getattr(run.flags, "launcher", "processes")
    if run.flags.sync or ranks.size() > 1 or launcher != "processes":
        raise FlagError(
            "--record has no effect with --sync, and can't be used with torchrun or "
            "--launcher ray: leave it out, or give --no-record"
        )
    return Recorder(run)


def records_of(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """The records of a run by the step at which they begin."""
    found = folder.glob("record.*")
    return {int(x.suffix[1:]): x for x in found if x.suffix[1:].isdecimal()}


def begin_record(run: Any) -> Callable[[bytes], None]:
    """Writes the first line of a record; returns what appends to it."""
    from torchbeast.runs import trust
    from torchbeast.runs.files import atomic_write, writing

    path, flags = run.folder / f"record.{run.learner.step}", run.flags.as_dict()
    header = {"flags": flags, "flags_signature": trust.sign(flags), "about": about()}
    with writing(path):
        with atomic_write(path) as file:
            file.write(f"{json.dumps(header)}\n".encode())
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
    from torchbeast.runs.files import provenance

    now = provenance()
    commit, cpu = (now["git"] or {}).get("commit"), now["hardware"]["cpu"]
    return {**now["versions"], "cpu": cpu, "commit": commit}


# --- MonoBeast


def checksum(rows: dict[str, Any], slots: list[int]) -> int:
    """16 bits of what the environments said in these slots, 16 of what the agent did.

    Of what is large, such as images, only the last row counts: to read all of them
    costs more than 3 % of a run. What an earlier one changed shows in the agent's half.

    Args:
      rows: [slots, T + 1, ...], NumPy.
    """
    from torchbeast.base.nested import flatten
    from torchbeast.core.rollout import RESULTS
    from torchbeast.envs.extra_fields import EXTRA_FIELDS

    of_agent = {"last_action", "truncation_value"}
    of_environments = {"observation", *RESULTS, *EXTRA_FIELDS} - of_agent
    halves = [0, 0]
    for name in sorted(rows):
        half = name in of_environments
        for x in flatten(rows[name]):
            for slot in slots:
                y = x[slot, -1:] if x[slot].nbytes > LARGE else x[slot]
                halves[half] = zlib.crc32(y, halves[half])
    return (halves[True] & 0xFFFF) << 16 | halves[False] & 0xFFFF


class Recorder:
    """A guest of MonoBeast. Its `actors` also write their order to a record."""

    def __init__(self, run: Any) -> None:
        self.run, self.is_used = run, False

    def actors(self, actors: Any, rows: dict[str, Any]) -> RecordedActors:
        self.is_used = True
        return RecordedActors(actors, rows, begin_record(self.run))

    def close(self, status: int) -> None:
        """Names the command that repeats a failed run."""
        run, flags = self.run, self.run.flags
        if status == 1 and self.is_used:
            words = "python", "-m", "torchbeast.tools.repeat", flags.xpid
            step = run.learner.step - int(60 * (run.learner.counters.sps() or 0))
            log.error(
                "To repeat this run: %s. For a checkpoint of a minute before its end, "
                "add --until %d",
                *(shlex.join([*words, "--savedir", flags.savedir]), max(1, step)),
            )


class RecordedActors:
    """Actors, see local/actors.py."""

    def __init__(
        self, actors: Any, rows: dict[str, Any], append: Callable[[bytes], None]
    ) -> None:
        self._actors, self._rows, self._append = actors, rows, append

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actors, name)

    def start_unroll(self, index: int, slots: list[int]) -> None:
        self._write(2 * index, self._actors.start_unroll(index, slots))

    def finished(self, timeout: float, wake_up: int) -> Iterator[tuple[int, list[int]]]:
        for index, slots in self._actors.finished(timeout, wake_up):
            self._write(2 * index + 1, checksum(self._rows, slots))
            yield index, slots

    def _write(self, who: int, value: int) -> None:
        self._append(np.array((who, value), EVENTS).tobytes())


# --- PolyBeast


class InferenceOrder:
    """PolyBeast's record: for each step that was learned from, which inference acted.

    It has the order of batches, the version of the weights of each step, and the size
    of its inference batch. As row 0 of a rollout is the last row of the one before, and
    no two rows have the same place, rollouts of a stream can be told from others.
    """

    def __init__(self, run: Any) -> None:
        import torch

        self._run = run
        self._append: Callable[[bytes], None] | None = None
        self._numbers, self._places = itertools.count(), torch.arange(2**16) << 16

    def stamp(self, count: int) -> torch.Tensor:
        """int64 [1, count]: number of an inference batch, place in it, its size."""
        return self._places[None, :count] + (next(self._numbers) << 32 | count)

    def add(self, versions: torch.Tensor, stamps: torch.Tensor) -> None:
        """Writes a learner batch. Call it in the order of updates.

        Args:
          versions: policy_version [T + 1, B].
          stamps: of each row [T + 1, B].
        """
        import torch

        parts = versions, stamps >> 32, stamps >> 16 & 0xFFFF, stamps & 0xFFFF
        x = torch.stack(parts, -1).int().numpy()
        data = zlib.compress(np.diff(x, axis=0, prepend=np.int32(0)).tobytes(), 1)
        self._append = self._append or begin_record(self._run)
        self._append(len(data).to_bytes(4, "little") + data)


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
