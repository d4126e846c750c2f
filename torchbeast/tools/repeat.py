"""Makes a run of MonoBeast with --record again, as a new run; compares the two.

    python -m torchbeast.tools.repeat XPID --until 2000000 --savedir FOLDER

The new run is named XPID-repeated. --until ends it after the batch that reaches this
step, with a checkpoint. Flags that don't change what a run learns may follow.
"""

import argparse
import functools
import logging
import math
import pathlib
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from torchbeast import monobeast
from torchbeast.base.errors import FlagError, UserError, using
from torchbeast.base.flag import FREE, LARGEST_STEP, START
from torchbeast.extras import record
from torchbeast.flags import of_resume
from torchbeast.procs import processes
from torchbeast.runs import files, flagset, start

log = logging.getLogger(__name__)

# Columns of logs.csv, and flags that name what the recorded run itself uses.
NOT_COMPARED = {"_tick", "_time", "sps", "eval_step", "eval_return", "eval_length"}
OF_THE_RUN = {"record", "mirror", "wandb", "tensorboard", "replay_file"}
NOT_REPEATED = {"checkpoint_history": 0, "eval_interval": 0}


class RepeatError(UserError, RuntimeError):
    """The repetition differs from the recorded run, or can't go on."""


def read_rows(folder: pathlib.Path, after: int = -1) -> list[dict[str, str]]:
    """The rows of logs.csv about batches after a step, without those of evaluations."""
    with using(folder / "logs.csv", "is damaged"):
        rows = [row for row in files.read_rows(folder) if row.get("episodes")]
        return [row for row in rows if int(row["step"]) > after]


def starts(
    own: argparse.Namespace, typed: flagset.Typed
) -> Iterator[tuple[flagset.Typed, pathlib.Path, int]]:
    """The starts to make: flags, record and last step. Raises FlagError."""
    allowed = of_resume(typed.declared, START, FREE) - {"serial"}
    if others := typed.here.keys() - allowed:
        raise FlagError(f"a repetition has the flags of its run: omit --{min(others)}")
    savedir = pathlib.Path(flagset.merge(typed).savedir).expanduser()
    folder = savedir / own.run
    records, rows = record.records_of(folder), read_rows(folder)
    if 0 not in records or not rows:
        raise FlagError(f"{folder} has no record of a run's first batch, see --record")
    xpid = typed.here.get("xpid") or f"{folder.name}-repeated"
    if (savedir / xpid / "logs.csv").exists():
        raise FlagError(f"a repetition is a new run, and {xpid} exists: choose --xpid")
    # A run that failed fails again by itself.
    failed = files.read_meta(folder).get("error")
    until = LARGEST_STEP if failed else int(rows[-1]["step"])
    until = min(until, own.until or until)
    steps = sorted(records)  # a start removes records of what is dropped
    for first, next_start in zip(steps, [*steps[1:], until], strict=True):
        if first < until:
            found = flags_of(records[first], typed, xpid)
            yield found, records[first], min(next_start, until)


def flags_of(path: pathlib.Path, typed: flagset.Typed, xpid: str) -> flagset.Typed:
    """The flags of a repetition of this record."""
    header, _ = record.read_whole(path)
    not_used = of_resume(typed.declared, START) | OF_THE_RUN
    names = typed.declared.keys() - not_used
    about = typed.declared, header, str(path), names, typed.here
    in_file = flagset.from_file(*about)
    # An update waits for the main thread, which must not wait for it to save.
    here: dict[str, Any] = {"checkpoint_interval": math.inf, "xpid": xpid}
    here |= {k: x for k, x in NOT_REPEATED.items() if k in typed.declared}
    return typed._replace(here=typed.here | here, in_file=in_file)


def changes(path: pathlib.Path) -> str:
    """What has changed since the record was made."""
    then, now = record.read_whole(path)[0]["about"], record.about()
    others = [k for k in then | now if then.get(k) != now.get(k)]
    found = ", ".join(f"{k} {then.get(k)} -> {now.get(k)}" for k in others)
    return f"Changed since: {found}" if found else "No package has changed"


def compare_logs(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Raises RepeatError if logs.csv is not that of the recorded start so far."""
    first_step = int(path.suffix[1:])
    then, now = (read_rows(x, first_step) for x in (path.parent, folder))
    for x, y in zip(then, now, strict=False):
        for name in sorted((x.keys() | y.keys()) - NOT_COMPARED):
            if (x.get(name) or "") != (y.get(name) or ""):
                raise RepeatError(
                    f"logs.csv differs first at step {x['step']}: {name} was "
                    f"{x.get(name)} and is {y.get(name)}. {changes(path)}"
                )
    # A failure may come again; another one has been reported.
    old, new = (files.read_meta(x).get("error") for x in (path.parent, folder))
    if new in (None, old):
        log.info("Equal to the recorded run: %d rows.", min(len(then), len(now)))


class Repeated:
    """Actors that begin and finish unrolls in the order of a record.

    An unroll waits for the version of the weights that it had. A version waits until
    all earlier unrolls have begun. Rollouts that come early are held back. The recorded
    run has gone this way with as many slots and threads, so no wait is in vain.
    """

    def __init__(
        self, path: pathlib.Path, run: Any, actors: Any, rows: dict[str, Any]
    ) -> None:
        self._run, self._path, self._actors, self._rows = run, path, actors, rows
        _, data = record.read_whole(path)
        size = record.EVENTS.itemsize
        self._events = np.frombuffer(data, record.EVENTS, len(data) // size)
        self._check_events()
        self._begins = np.flatnonzero(self._events["who"] % 2 == 0)
        self._versions = self._events["value"][self._begins]
        self._arrived: dict[int, list[int]] = {}  # held back: slots by actor
        self._at = 0  # the next event
        self._published = run.learner.num_updates
        self._progress: Any = None
        self._deadline = 0.0  # by the watch, which leaves out suspended time
        self._stopped = threading.Event()
        run.on_stop(self._stopped.set)

    def _check_events(self) -> None:
        """Raises RepeatError for an unknown actor, or if too few batches follow."""
        flags, who = self._run.flags, self._events["who"]
        if np.max(who, initial=0) // 2 >= flags.num_actors:
            raise RepeatError(f"{self._path} is damaged: there is no such actor")
        batches = int(np.sum(who % 2)) * flags.envs_per_actor // flags.batch_size
        steps = batches * flags.batch_size * flags.unroll_length
        reached, last = self._run.learner.step + steps, self._run.last_step
        last = min(last, int(read_rows(self._path.parent)[-1]["step"]))
        if reached < last:
            raise RepeatError(
                f"{self._path} is damaged, or a later start was not recorded: it leads "
                f"to step {reached}, and the run went on to {last}"
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actors, name)

    def _next(self) -> tuple[int, bool, int]:
        """Actor, whether it finishes, value; -1 if no event is left."""
        if self._at == len(self._events):
            return -1, False, -1
        who, value = self._events[self._at].tolist()
        return who // 2, bool(who % 2), value

    @property
    def idle(self) -> list[int]:
        """The actor that begins an unroll now, if the order says so."""
        index, finishes, version = self._next()
        return [] if finishes or version != self._published else [index]

    def start_unroll(self, index: int, slots: list[int]) -> None:
        self._actors.start_unroll(index, slots)
        self._at += 1

    def finished(self, timeout: float, wake_up: int) -> Iterator[tuple[int, list[int]]]:
        index, finishes, checked = self._next()
        timeout = 0 if finishes and index in self._arrived else timeout
        self._arrived |= dict(self._actors.finished(timeout, wake_up))
        self._check_progress()
        while finishes and index in self._arrived:
            slots = self._arrived.pop(index)
            self._check_unroll(index, checked, record.checksum(self._rows, slots))
            self._at += 1
            yield index, slots
            index, finishes, checked = self._next()

    def publish(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """Publishes weights if unrolls begin with them, once all earlier have begun."""
        i = np.searchsorted(self._versions, version)
        if version not in self._versions[i : i + 1]:
            return
        while self._at < self._begins[i] or not self._actors.publish(weights, version):
            if self._stopped.wait(0.001):
                return
        self._published = version
        self._run.wake()

    def _check_progress(self) -> None:
        """Raises RepeatError if nothing has happened for --actor_timeout."""
        progress = self._at, self._published, self._run.learner.num_updates
        now, limit = self._actors.watch.awake, self._run.flags.actor_timeout
        if progress != self._progress:
            self._progress, self._deadline = progress, now + limit
        elif now > self._deadline:
            why = "If the machine is that slow, raise --actor_timeout"
            if self._at == len(self._events):
                why = "The record ends there, and the run has not failed again"
            raise RepeatError(
                f"the repetition waits for {limit:g} s at event {self._at} of "
                f"{self._path}. {why}"
            )

    def _check_unroll(self, index: int, recorded: int, found: int) -> None:
        """Raises RepeatError if the unroll is not the recorded one."""
        if found == recorded:
            return
        before = np.sum(self._events["who"][: self._at] == 2 * index + 1)
        T = self._run.flags.unroll_length
        why = "the model gave other outputs for the same observations"
        if found >> 16 != recorded >> 16:
            why = "other observations, rewards or ends. The environments do not follow "
            why += "from their seeds and actions"
        raise RepeatError(
            f"the first difference is in steps {before * T + 1} to {(before + 1) * T} "
            f"of actor {index} since the start: {why}. {changes(self._path)}"
        )


def guest(path: pathlib.Path, run: Any) -> Any:
    """Gives the run actors that follow a record, see base/parts.py."""
    return types.SimpleNamespace(actors=functools.partial(Repeated, path, run))


def repeat(own: argparse.Namespace, typed: flagset.Typed) -> int:
    for found, path, until in starts(own, typed):
        log.info("%s: up to step %d. %s.", path, until, changes(path))
        stops = processes.raise_on_stop_signals()  # a Run ignores them at its end
        with stops, start.begin(found, monobeast.resolve_layout) as begun:
            attach = functools.partial(guest, path)
            status = monobeast.train(begun, attach, until=until)
            compare_logs(path, begun.folder.path)
        if status:
            return status
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 equal so far, 1 different or failed."""
    parser = argparse.ArgumentParser(
        prog="python -m torchbeast.tools.repeat",
        usage="%(prog)s XPID [--until STEP] [flags of MonoBeast]",
        allow_abbrev=False,
    )
    parser.add_argument("run", help="name or folder of the recorded run")
    parser.add_argument("--until", type=int)
    own, words = parser.parse_known_args(argv)
    typed = flagset.read(monobeast.make_parser(), words)
    return start.guarded(lambda: repeat(own, typed))


if __name__ == "__main__":
    sys.exit(main())
