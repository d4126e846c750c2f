"""The order of an asynchronous run: --record writes it, --repeat follows it.

What a MonoBeast run learns follows from its flags and from the order in which actors
begin unrolls, with which version of the weights, and finish them. This order is all
that a record holds. The rest is fixed:

    slots         a batch copies what they hold, so their numbers have no effect
    batches       hold rollouts in the order in which unrolls finish; learner threads
                  learn from batches in this order, too
    games         follow from the seed, and after a resume from its step
    actions       are drawn from a generator of each actor
    minibatches   are drawn from the learner's global generator, replayed rollouts from
                  the replay's, both in the order of batches
    evaluations   play in a process of their own, with generators of its own

The file record.STEP in the folder of a run is that of the start at STEP: one line of
JSON (flags, versions, hardware), then EVENTS. Each is written at once. A killed process
leaves at most an unfinished last one, which is not read.
"""

from __future__ import annotations

import bisect
import code
import json
import logging
import math
import os
import pathlib
import shlex
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from torchbeast.base import ranks
from torchbeast.base.errors import FlagError, UserError, using
from torchbeast.base.flag import LARGEST_STEP
from torchbeast.base.nested import Nested, flatten, map_nested
from torchbeast.core import rollout
from torchbeast.envs.extra_fields import EXTRA_FIELDS
from torchbeast.records.folder import atomic_write, writing
from torchbeast.records.logs_csv import EVAL_COLUMNS, read_csv
from torchbeast.records.meta import provenance, read_meta
from torchbeast.runs import flagset, trust

log = logging.getLogger(__name__)

# `who` is 2 * actor, `value` the version of the weights with which it begins an unroll;
# or `who` is 2 * actor + 1, `value` the checksum of the unroll that it has finished.
EVENTS = np.dtype([("who", "<u2"), ("value", "<u4")])
# The fields of a row that come from environments.
OF_ENVIRONMENTS = {"observation", *rollout.RESULTS, *EXTRA_FIELDS} - {
    *("last_action", "truncation_value")
}
NOT_COMPARED = {"_time", "sps", *EVAL_COLUMNS}  # columns of logs.csv
# Flags that a repetition does not take: they name places that the run itself uses.
OF_THE_RUN = {"record", "mirror", "wandb", "tensorboard", "replay_file"}


class RepeatError(UserError, RuntimeError):
    """The repetition can't begin, or differs from the recorded run."""


def keep(run: Any, actors: Any, buffers: dict[str, Nested], weights: Any) -> Any:
    """Returns actors that keep the order, and what publishes weights.

    These are the given ones unless the run has --record or --repeat.

    Raises:
      FlagError: the order of this run can't be recorded.
    """
    flags, folder = run.flags, run.start.folder.path
    for step, path in steps_of(folder).items():
        if step >= run.learner.step:  # as rows of logs.csv are cut
            path.unlink()
    if flags.repeat:
        repeated = Repeated(run, actors, buffers, weights)
        return repeated, repeated.publish
    if flags.record and ranks.size() > 1:
        raise FlagError("--record needs one learner: start it without torchrun")
    if flags.record and not flags.sync:
        return Recorded(run, actors, buffers), weights.publish
    return actors, weights.publish


def steps_of(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """The records of a run by the step at which they begin, the first one first."""
    found = {p.suffix[1:]: p for p in folder.glob("record.*")}
    return {int(k): found[k] for k in sorted(filter(str.isdecimal, found), key=int)}


def checksum(rows: dict[str, Nested], slots: list[int]) -> int:
    """16 bits of what the environments said in these slots, 16 of what the agent did.

    Args:
      rows: [slots, T + 1, ...], NumPy.
    """
    halves = [0, 0]
    for name in sorted(rows):
        half = name in OF_ENVIRONMENTS
        for x in flatten(rows[name]):
            for slot in slots:
                halves[half] = zlib.crc32(x[slot], halves[half])
    return (halves[True] & 0xFFFF) << 16 | halves[False] & 0xFFFF


class Recorded:
    """Actors, as local/actors.py has them, whose order is written to a record."""

    def __init__(self, run: Any, actors: Any, buffers: dict[str, Nested]) -> None:
        self._run, self._actors = run, actors
        self._rows = map_nested(torch.Tensor.numpy, buffers["rows"])
        self._path = run.start.folder.path / f"record.{run.learner.step}"
        flags = run.flags.as_dict()
        header = {"flags": flags, "flags_signature": trust.sign(flags), **provenance()}
        with writing(self._path):
            with atomic_write(self._path) as file:
                file.write(f"{json.dumps(header)}\n".encode())
            self._file = run.stack.enter_context(self._path.open("ab", buffering=0))
        run.last_words = self._name_the_command

    @property
    def idle(self) -> list[int]:
        return self._actors.idle

    def num_steps(self) -> int:
        return self._actors.num_steps()

    def start_unroll(self, index: int, slots: list[int]) -> None:
        self._write(2 * index, self._actors.start_unroll(index, slots))

    def finished(self, timeout: float, wake_up: int) -> Iterator[tuple[int, list[int]]]:
        for index, slots in self._actors.finished(timeout, wake_up):
            self._write(2 * index + 1, checksum(self._rows, slots))
            yield index, slots

    def _write(self, who: int, value: int) -> None:
        with writing(self._path):
            self._file.write(np.array((who, value), EVENTS).tobytes())

    def _name_the_command(self) -> None:
        """The last log line of a failed run: how to come to a minute before its end."""
        run = self._run
        if run.exit_status == 1:
            last_minute = int(60 * (run.learner.counters.sps() or 0))
            step = max(1, run.learner.step - last_minute)
            words = {"repeat": run.flags.xpid, "savedir": run.flags.savedir}
            flags = [x for k, v in words.items() for x in (f"--{k}", v)]
            command = ["python", "-m", "torchbeast.monobeast", *flags]
            until = ["--until", str(step), "--interactive"]
            log.error(
                "To repeat this run: %s. To look around before its last minute, add %s",
                *(shlex.join(command), shlex.join(until)),
            )


def read(path: pathlib.Path) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """The first line of a record, and its events.

    Raises:
      FileError: it can't be read.
    """
    with using(path, "is no record"):
        line, _, data = path.read_bytes().partition(b"\n")
        header = json.loads(line)
        events = np.frombuffer(data, EVENTS, len(data) // EVENTS.itemsize)
        return {**header, "flags": dict(header["flags"])}, events.tolist()


def parts(typed: flagset.Typed) -> Iterator[flagset.Typed]:
    """The starts to make: one as typed, or with --repeat those of the recorded run.

    Raises:
      FlagError: there is no record from the run's begin on, or another flag is typed.
    """
    flags = flagset.merge(typed)
    if not (recorded_run := getattr(flags, "repeat", None)):
        yield typed
        return
    if others := sorted(typed.here.keys() - flagset.FREE_TO_CHANGE):
        raise FlagError(f"--repeat takes the flags of its run: leave out --{others[0]}")
    folder = pathlib.Path(os.path.expanduser(flags.savedir), recorded_run)
    records, logged, starts = steps_of(folder), read_rows(folder), [0]
    for start in read_meta(folder).get("starts", ()):
        # A start goes on from a checkpoint; what came later is not part of the run.
        starts = [x for x in starts if x < start["first_step"]] + [start["first_step"]]
    if 0 not in records or not logged:
        raise FlagError(
            f"--repeat {recorded_run}: {folder} has no record of a run's first batch. "
            "--record writes one, from step 0 on"
        )
    ends = [*starts[1:], int(logged[-1]["step"])]
    if flags.until and flags.until > ends[-1]:
        log.warning("--until %d: the recorded run ends at %d.", flags.until, ends[-1])
    for first, end in zip(starts, ends, strict=True):
        is_last = end == ends[-1] or end >= (flags.until or math.inf)
        if first not in records:
            raise RepeatError(f"the start at step {first} was not recorded")
        path = records[first]
        header, _ = read(path)
        recorded = {
            k: v
            for k, v in header["flags"].items()
            if k not in flagset.OF_ONE_START | OF_THE_RUN and v is not None
        }
        own = {
            "xpid": flags.xpid or f"{folder.name}-repeated",
            "repeat": str(path),
            "until": min(end, flags.until or end),
            "interactive": flags.interactive and is_last,
            # An update waits for the main thread, which therefore must not wait for it.
            **{"checkpoint_interval": math.inf, "checkpoint_history": 0},
            "eval_interval": 0,  # it changes nothing
        }
        if first == starts[-1] and not flags.until and failure_of(folder):
            own["until"] = LARGEST_STEP  # it ends as the run did
        yield typed._replace(
            here=typed.here | own,
            in_file=flagset.values_of_file(typed.declared, recorded, str(path)),
            file=str(path),
            signed=trust.is_signed(header["flags"], header.get("flags_signature")),
        )
        if is_last:
            return


def read_rows(folder: pathlib.Path) -> list[dict[str, str]]:
    """The rows of logs.csv about batches, without those about an evaluation."""
    path = folder / "logs.csv"
    columns, rows, _ = read_csv(path) if path.exists() else ([], [], True)
    found = [dict(zip(columns, row, strict=False)) for row in rows]
    return [row for row in found if row.get("episodes")]


def failure_of(folder: pathlib.Path) -> str | None:
    """What ended the newest start of a run, if it failed."""
    return read_meta(folder).get("starts", [{}])[-1].get("error")


def differences(then: Any, now: Any, name: str = "") -> list[str]:
    """What differs between the packages and machines of two runs, in words."""
    if isinstance(then, dict) and isinstance(now, dict):
        names = sorted((then.keys() | now.keys()) - {"memory_gib", "cpus", "branch"})
        parts = [differences(then.get(k), now.get(k), k) for k in names]
        return [x for part in parts for x in part]
    return [] if then == now else [f"{name} {then} -> {now}"]


class Repeated:
    """Actors that begin and finish unrolls in the order of a record.

    An unroll waits for the version of the weights that it had. A version waits until
    all earlier unrolls have begun. Rollouts that come early are held back. The recorded
    run has gone this way with as many slots and threads, so no wait is in vain.
    """

    def __init__(
        self, run: Any, actors: Any, buffers: dict[str, Nested], weights: Any
    ) -> None:
        self._run, self._actors, self._weights = run, actors, weights
        self._rows = map_nested(torch.Tensor.numpy, buffers["rows"])
        self._path = pathlib.Path(run.flags.repeat)
        header, self._events = read(self._path)
        known = ("git", "versions", "hardware")
        self._others = differences({k: header.get(k) for k in known}, provenance())
        if self._others:
            log.warning("The recorded run had another: %s.", "; ".join(self._others))
        # The places of the events at which unrolls begin, and their versions.
        self._begins = [i for i, (who, _) in enumerate(self._events) if not who % 2]
        self._versions = [self._events[i][1] for i in self._begins]
        self._batch: Any = None  # of the newest update: rows and initial state
        self._arrived: dict[int, list[int]] = {}  # held back: slots by actor
        self._at = self._num_finished = 0  # the next event; unrolls before it
        self._published, self._first_step = run.learner.num_updates, run.learner.step
        self._moved, self._stopped = threading.Condition(), False
        self._progress: Any = None
        self._progress_at = time.monotonic()
        run.last_step = run.flags.until
        run.on_stop(self._stop)
        run.stack.callback(self._compare_logs)
        if run.flags.interactive:
            self._learn, run.on_update = run.on_update, self._keep_batch
            run.stack.callback(self._open_prompt)

    @property
    def idle(self) -> list[int]:
        """The actor that begins an unroll now, if the order says so."""
        if self._at < len(self._events):
            who, version = self._events[self._at]
            if not who % 2 and version == self._published:
                return [who // 2]
        return []

    def num_steps(self) -> int:
        return self._actors.num_steps()

    def start_unroll(self, index: int, slots: list[int]) -> None:
        self._actors.start_unroll(index, slots)
        self._advance()

    def finished(self, timeout: float, wake_up: int) -> Iterator[tuple[int, list[int]]]:
        timeout = 0 if self._next_to_finish() in self._arrived else timeout
        self._arrived |= dict(self._actors.finished(timeout, wake_up))
        with self._moved:  # actors have loaded weights, so a bank may be free
            self._moved.notify_all()
        self._check_progress()
        while (index := self._next_to_finish()) in self._arrived:
            slots = self._arrived.pop(index)
            self._num_finished += 1
            self._check_unroll(index, slots)
            self._advance()
            yield index, slots

    def publish(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """Publishes weights if unrolls begin with them, once all earlier have begun."""
        i = bisect.bisect_left(self._versions, version)
        if self._versions[i : i + 1] != [version]:
            return
        with self._moved:
            while not self._stopped and (
                self._at < self._begins[i]
                or not self._weights.publish(weights, version)
            ):
                self._moved.wait(1.0)
        self._published = version
        self._run.wake()

    def _keep_batch(self, update: Any) -> None:
        self._batch = update.inputs
        self._learn(update)

    def _open_prompt(self) -> None:
        """--interactive: a Python prompt after the last update, or after a failure."""
        run = self._run
        old = signal.signal(signal.SIGINT, signal.default_int_handler)
        names = {
            "run": run,
            "learner": run.learner,
            "batch": self._batch and self._batch[0],
            "initial_state": self._batch and self._batch[1],
            "actor": lambda index: self._actors.copy(index, run.wake_reader),
        }
        code.interact(
            f"Step {run.learner.step}. batch is what the last update learned from. "
            "actor(0), actor(1), ... are copies of the actors: actor(0).env is its "
            f"environments, actor(0).row their last row. Names: {', '.join(names)}.",
            local={**names, "np": np, "torch": torch},
            exitmsg="",
        )
        signal.signal(signal.SIGINT, old)

    def _advance(self) -> None:
        with self._moved:
            self._at += 1
            self._moved.notify_all()

    def _stop(self) -> None:
        with self._moved:
            self._stopped = True
            self._moved.notify_all()

    def _next_to_finish(self) -> int:
        """The actor whose unroll finishes next; -1 if another event comes first."""
        who = self._events[self._at][0] if self._at < len(self._events) else 0
        return who // 2 if who % 2 else -1

    def _step(self) -> int:
        """The step of the batch that the newest rollouts are in."""
        flags = self._run.flags
        batches = math.ceil(
            self._num_finished * flags.envs_per_actor / flags.batch_size
        )
        return self._first_step + batches * flags.batch_size * flags.unroll_length

    def _check_progress(self) -> None:
        """Raises RepeatError if nothing has happened for --actor_timeout."""
        progress = self._at, self._published, self._run.learner.num_updates
        now, limit = time.monotonic(), self._run.flags.actor_timeout
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        elif now - self._progress_at > limit:
            what = "the failure of the recorded run"
            if self._at < len(self._events):
                who, value = self._events[self._at]
                what = f"weights of version {value} and slots for actor {who // 2}"
                what = f"actor {who // 2} to finish its unroll" if who % 2 else what
            raise RepeatError(
                f"the repetition waits for {what} since {limit:g} s, at event "
                f"{self._at} of {self._path}. If the machine is that slow, raise "
                "--actor_timeout"
            )

    def _check_unroll(self, index: int, slots: list[int]) -> None:
        """Raises RepeatError if the unroll is not the recorded one."""
        recorded, found = self._events[self._at][1], checksum(self._rows, slots)
        if found == recorded:
            return
        T, E = self._run.flags.unroll_length, self._run.flags.envs_per_actor
        n = sum(who == 2 * index + 1 for who, _ in self._events[: self._at])
        why = "the same observations gave other outputs of the model"
        if found >> 16 != recorded >> 16:
            why = "the environments gave other observations, rewards or ends"
            if not self._others:
                why += ": they do not follow from seed and actions"
        raise RepeatError(
            f"the repetition differs from the recorded run, first in the batch that "
            f"ends at step {self._step()}, in steps {n * T + 1} to {(n + 1) * T} of "
            f"actor {index} (environments {index * E} to {index * E + E - 1}): {why}. "
            f"{self._cause()}"
        )

    def _cause(self) -> str:
        if self._others:
            return f"The cause may be: {'; '.join(self._others)}"
        return "Packages and machine are the recorded ones"

    def _compare_logs(self) -> None:
        """Raises RepeatError if logs.csv is not that of the recorded run so far."""
        here = [
            [row for row in read_rows(folder) if int(row["step"]) > self._first_step]
            for folder in (self._path.parent, self._run.start.folder.path)
        ]
        for then, now in zip(*here, strict=False):
            for name in sorted((then.keys() | now.keys()) - NOT_COMPARED):
                if (x := then.get(name) or "") != (y := now.get(name) or ""):
                    raise RepeatError(
                        f"logs.csv differs first at step {then['step']}: {name} was "
                        f"{x or 'empty'} and is {y or 'empty'}. {self._cause()}"
                    )
        log.info(
            "Equal to the recorded run: %d rows of logs.csv, %d unrolls.",
            *(min(map(len, here)), self._num_finished),
        )
