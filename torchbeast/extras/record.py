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

The first line of a record is JSON: flags, and versions of packages. Each event is
written at once, so a killed run leaves at most a torn last one, which is not read.
"""

import json
import logging
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from torchbeast.base import parts, ranks
from torchbeast.base.errors import FlagError, using
from torchbeast.base.flag import FREE, Group, flag
from torchbeast.runs import trust
from torchbeast.runs.files import atomic_write, writing

log = logging.getLogger(__name__)

# `who` is 2 * actor, `value` the version of the weights with which it begins an unroll;
# or `who` is 2 * actor + 1, `value` the checksum of the unroll that it has finished.
EVENTS = np.dtype([("who", "<u2"), ("value", "<u4")])
LARGE = 2**16  # bytes of a rollout's field


class Flags(Group):
    record: bool = flag(False, "record the order, for torchbeast.tools.repeat", FREE)


def attach(run: Any) -> "Recorder | None":
    for first, path in records_of(run.folder).items():
        if first >= run.learner.step:  # this start makes these steps again
            path.unlink()
    flags = run.flags
    asynchronous = hasattr(flags, "num_buffers") and not flags.sync
    processes = getattr(flags, "launcher", "processes") == "processes"
    if flags.record and not (asynchronous and processes and ranks.size() == 1):
        raise FlagError(
            "--record is for MonoBeast without --sync, torchrun and --launcher ray: "
            "leave it out, or give --no-record"
        )
    return Recorder(run) if flags.record else None


def records_of(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """The records of a run by the step at which they begin."""
    found = folder.glob("record.*")
    return {int(x.suffix[1:]): x for x in found if x.suffix[1:].isdecimal()}


def read_whole(path: pathlib.Path) -> tuple[dict[str, Any], bytes]:
    """The first line of a record, and what follows it. Raises FileError."""
    with using(path, "is no record"):
        line, _, data = path.read_bytes().partition(b"\n")
        header = json.loads(line)
        header |= {"flags": {**header["flags"]}, "about": {**header["about"]}}
        return header, data


def about() -> dict[str, Any]:
    """What beside flags and order a run may depend on."""
    if not (code := parts.optional("code")):
        return {}
    now = code.provenance()
    commit, cpu = (now["git"] or {}).get("commit"), now["hardware"]["cpu"]
    return {**now["versions"], "cpu": cpu, "commit": commit}


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
        self.run, self.path = run, run.folder / f"record.{run.learner.step}"

    def actors(self, actors: Any, rows: dict[str, Any]) -> "RecordedActors":
        flags = self.run.flags.as_dict()
        header = {"flags": flags, "flags_signature": trust.sign(flags)}
        with writing(self.path):
            with atomic_write(self.path) as file:
                file.write(f"{json.dumps(header | {'about': about()})}\n".encode())
            file = self.run.stack.enter_context(self.path.open("ab"))
        return RecordedActors(actors, rows, file)

    def close(self, status: int) -> None:
        if status == 1 and self.path.exists():
            words = self.run.flags.xpid, self.run.flags.savedir
            log.error(
                "To repeat it: -m torchbeast.tools.repeat %s --savedir %s", *words
            )


class RecordedActors:
    """Actors, see local/actors.py, whose order is written to a file."""

    def __init__(self, actors: Any, rows: dict[str, Any], file: Any) -> None:
        self._actors, self._rows, self._file = actors, rows, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actors, name)

    def start_unroll(self, index: int, slots: list[int]) -> None:
        self._write(2 * index, self._actors.start_unroll(index, slots))

    def finished(self, timeout: float, wake_up: int) -> Iterator[tuple[int, list[int]]]:
        for index, slots in self._actors.finished(timeout, wake_up):
            self._write(2 * index + 1, checksum(self._rows, slots))
            yield index, slots

    def _write(self, who: int, value: int) -> None:
        with writing(self._file.name):
            self._file.write(np.array((who, value), EVENTS).tobytes())
            self._file.flush()  # all of it, or an error
