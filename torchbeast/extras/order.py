"""The order of an asynchronous run: --record writes it, --repeat follows it.

What MonoBeast learns follows from its flags and from the order in which actors begin
unrolls, with which version of the weights, and finish them. So a record holds no more
than this. All else is fixed:

    slots         have no effect: a batch copies what they hold
    batches       hold rollouts in the order in which unrolls finish; learner threads
                  learn from batches in this order, too
    games         follow from the seed, and after a resume from its step
    actions       are drawn from each actor's generator
    minibatches   are drawn from the learner's global generator, and replayed rollouts
                  from the replay's, in the order of batches
    evaluations   have a process and generators of their own

record.py has the file of a record; its events are EVENTS. Each is written at once, so a
killed process leaves at most a torn last one, which is not read.
"""

import code
import contextlib
import logging
import math
import os
import pathlib
import shlex
import signal
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from torchbeast.base.errors import FlagError, UserError
from torchbeast.base.flag import LARGEST_STEP
from torchbeast.base.nested import Nested, flatten, map_nested
from torchbeast.core import rollout
from torchbeast.envs.extra_fields import EXTRA_FIELDS
from torchbeast.extras import record
from torchbeast.runs import files, flagset, trust
from torchbeast.runs.files import read_meta

log = logging.getLogger(__name__)

# `who` is 2 * actor, `value` the version of the weights with which it begins an unroll;
# or `who` is 2 * actor + 1, `value` the checksum of the unroll that it has finished.
EVENTS = np.dtype([("who", "<u2"), ("value", "<u4")])
# The fields of a row that come from environments.
OF_ENVIRONMENTS = {"observation", *rollout.RESULTS, *EXTRA_FIELDS} - {
    *("last_action", "truncation_value")
}
LARGE = 2**16  # bytes of a rollout's field
# Columns of logs.csv.
NOT_COMPARED = {"_tick", "_time", "sps", "eval_step", "eval_return", "eval_length"}
# Flags that name what the recorded run itself uses.
OF_THE_RUN = {"record", "mirror", "wandb", "tensorboard", "replay_file"}


class RepeatError(UserError, RuntimeError):
    """The repetition differs from the recorded run, or can't go on."""


def keep(run: Any, actors: Any, buffers: dict[str, Nested], weights: Any) -> Any:
    """Returns the actors and what publishes weights; wrapped by --record or --repeat.

    Raises:
      FlagError: the order of this run can't be recorded.
    """
    rows = map_nested(torch.Tensor.numpy, buffers["rows"])
    if run.flags.repeat:
        repeated = Repeated(run, actors, rows, weights)
        return repeated, repeated.publish
    if run.flags.record and not run.flags.sync:
        actors = Recorded(run, actors, rows)
    return actors, weights.publish


def read(path: pathlib.Path) -> tuple[dict[str, Any], np.ndarray]:
    """The first line of a record, and its events. Raises FileError."""
    header, data = record.read_whole(path)
    return header, np.frombuffer(data, EVENTS, len(data) // EVENTS.itemsize)


def checksum(rows: dict[str, Nested], slots: list[int]) -> int:
    """16 bits of what the environments said in these slots, 16 of what the agent did.

    Of what is large, such as images, only the last row counts: to read all of them
    costs more than 3 % of a run. What an earlier one changed shows in the agent's half.

    Args:
      rows: [slots, T + 1, ...], NumPy.
    """
    halves = [0, 0]
    for name in sorted(rows):
        half = name in OF_ENVIRONMENTS
        for x in flatten(rows[name]):
            for slot in slots:
                y = x[slot, -1:] if x[slot].nbytes > LARGE else x[slot]
                halves[half] = zlib.crc32(y, halves[half])
    return (halves[True] & 0xFFFF) << 16 | halves[False] & 0xFFFF


class Recorded:
    """Actors, see local/actors.py, whose order is written to a record."""

    def __init__(self, run: Any, actors: Any, rows: Nested) -> None:
        self._run, self._actors, self._rows = run, actors, rows
        self._append = record.begin_record(run)
        run.last_words = self._name_the_command

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

    def _name_the_command(self) -> None:
        """The last log line of a failed run."""
        run, flags = self._run, self._run.flags
        if run.exit_status == 1:
            words = "--repeat", flags.xpid, "--savedir", flags.savedir
            command = f"python -m torchbeast.monobeast {shlex.join(words)}"
            step = run.learner.step - int(60 * (run.learner.counters.sps() or 0))
            log.error(
                "To repeat this run: %s. To look at it a minute before its end, add "
                "--until %d --interactive",
                *(command, max(1, step)),
            )


def parts(typed: flagset.Typed) -> Iterator[flagset.Typed]:
    """The starts to make: one as typed, or with --repeat those of the recorded run.

    Raises:
      FlagError: the run has no record, or a flag is typed that would change it.
    """
    flags = flagset.merge(typed)
    if not (name := getattr(flags, "repeat", None)):
        yield typed
        return
    if others := sorted(typed.here.keys() - flagset.FREE_TO_CHANGE):
        raise FlagError(f"--repeat takes the flags of its run: leave out --{others[0]}")
    savedir = pathlib.Path(os.path.expanduser(flags.savedir))
    folder = savedir / name
    records, rows = record.records_of(folder), read_rows(folder)
    if 0 not in records or not rows:
        raise FlagError(
            f"--repeat {name}: {folder} has no record of a run's first batch. --record "
            "writes one, from step 0 on"
        )
    xpid = flags.xpid or f"{folder.name}-repeated"
    if (savedir / xpid / "logs.csv").exists():
        raise FlagError(f"--repeat makes a new run, and {xpid} exists: choose --xpid")
    starts, error = [0], None
    for begun in read_meta(folder).get("starts", ()):
        # A start goes on from a checkpoint; what came later was dropped.
        first = begun.get("first_step") or 0
        starts = [*(x for x in starts if x < first), first]
        error = begun.get("error")
    last = int(rows[-1]["step"])
    until = flags.until or (LARGEST_STEP if error else last)  # it fails by itself
    if flags.until and until > last:
        log.warning("--until %d: the recorded run ends at %d.", until, last)
        until = last
    for first, end in zip(starts, [*starts[1:], until], strict=True):
        if first not in records:
            raise RepeatError(f"the start at step {first} was not recorded")
        header, _ = read(records[first])
        if "server_addresses" in header["flags"]:
            raise FlagError(
                f"--repeat {name}: {records[first]} is PolyBeast's and says what "
                "happened, but not enough to repeat it; see docs/debugging.md"
            )
        not_used = flagset.OF_ONE_START | OF_THE_RUN
        recorded = {k: v for k, v in header["flags"].items() if k not in not_used}
        in_file = flagset.values_of_file(typed.declared, recorded, str(records[first]))
        own = {
            "xpid": xpid,
            "repeat": str(records[first]),
            "until": min(end, until),
            "interactive": flags.interactive and until <= end,
            # An update waits for the main thread, which must not wait for it to save.
            **{"checkpoint_interval": math.inf, "checkpoint_history": 0},
            "eval_interval": 0,  # it changes nothing
        }
        yield typed._replace(
            here=typed.here | own,
            in_file={k: v for k, v in in_file.items() if v is not None},
            file=str(records[first]),
            signed=trust.is_signed(header["flags"], header.get("flags_signature")),
        )
        if until <= end:
            return


def read_rows(folder: pathlib.Path, after: int = -1) -> list[dict[str, str]]:
    """The rows of logs.csv about batches after a step, without those of evaluations."""
    rows = files.read_rows(folder)
    return [row for row in rows if row.get("episodes") and int(row["step"]) > after]


class Repeated:
    """Actors that begin and finish unrolls in the order of a record.

    An unroll waits for the version of the weights that it had. A version waits until
    all earlier unrolls have begun. Rollouts that come early are held back. The recorded
    run has gone this way with as many slots and threads, so no wait is in vain.
    """

    def __init__(self, run: Any, actors: Any, rows: Nested, weights: Any) -> None:
        self._run, self._actors, self._weights = run, actors, weights
        self.num_steps = actors.num_steps
        self._rows = rows
        self._path = pathlib.Path(run.flags.repeat)
        header, self._events = read(self._path)
        then, now = header["about"], record.about()
        others = [k for k in then | now if then.get(k) != now.get(k)]
        changes = [f"{k} {then.get(k)} -> {now.get(k)}" for k in others]
        self._changes = f"Changed since: {', '.join(changes)}" if changes else ""
        if changes:
            log.warning("%s", self._changes)
        self._begins = np.flatnonzero(self._events["who"] % 2 == 0)
        self._versions = self._events["value"][self._begins]
        self._arrived: dict[int, list[int]] = {}  # held back: slots by actor
        self._at = 0  # the next event
        self._published, self._first_step = run.learner.num_updates, run.learner.step
        self._moved, self._stopped = threading.Condition(), False
        self._progress: Any = None
        self._progress_at = 0.0  # by the watch, which leaves out suspended time
        run.last_step = run.flags.until
        run.on_stop(self._stop)
        run.stack.callback(self._compare_logs)
        if run.flags.interactive:
            self._batch: Any = None
            self._learn, run.on_update = run.on_update, self._keep_batch
            run.stack.callback(self._open_prompt)

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
        self._advance()

    def finished(self, timeout: float, wake_up: int) -> Iterator[tuple[int, list[int]]]:
        index, finishes, checked = self._next()
        timeout = 0 if finishes and index in self._arrived else timeout
        self._arrived |= dict(self._actors.finished(timeout, wake_up))
        self._advance(0)  # actors have loaded weights, so a bank may be free
        self._check_progress()
        while finishes and index in self._arrived:
            slots = self._arrived.pop(index)
            self._check_unroll(index, checked, checksum(self._rows, slots))
            self._advance()
            yield index, slots
            index, finishes, checked = self._next()

    def publish(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """Publishes weights if unrolls begin with them, once all earlier have begun."""
        i = np.searchsorted(self._versions, version)
        if version not in self._versions[i : i + 1]:
            return
        with self._moved:
            while not self._stopped and (
                self._at < self._begins[i]
                or not self._weights.publish(weights, version)
            ):
                self._moved.wait(1.0)
        self._published = version
        self._run.wake()

    def _advance(self, events: int = 1) -> None:
        with self._moved:
            self._at += events
            self._moved.notify_all()

    def _stop(self) -> None:
        self._stopped = True
        self._advance(0)

    def _check_progress(self) -> None:
        """Raises RepeatError if nothing has happened for --actor_timeout."""
        progress = self._at, self._published, self._run.learner.num_updates
        now, limit = self._actors.watch.awake, self._run.flags.actor_timeout
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        elif now - self._progress_at > limit:
            index, finishes, value = self._next()
            need = f"weights of version {value}, and slots"
            raise RepeatError(
                f"the repetition waits for {limit:g} s: event {self._at} of "
                f"{len(self._events)} in {self._path}, actor {index} needs "
                f"{'to finish its unroll' if finishes else need}. If the machine is "
                "that slow, raise --actor_timeout"
            )

    def _check_unroll(self, index: int, recorded: int, found: int) -> None:
        """Raises RepeatError if the unroll is not the recorded one."""
        if found == recorded:
            return
        flags, who = self._run.flags, self._events["who"][: self._at]
        T, E, B = flags.unroll_length, flags.envs_per_actor, flags.batch_size
        batches = math.ceil((np.sum(who % 2) + 1) * E / B)
        n = np.sum(who == 2 * index + 1)  # unrolls of this actor before
        why = "the model gave other outputs for the same observations"
        if found >> 16 != recorded >> 16:
            why = "other observations, rewards or ends. The environments do not follow "
            why += "from their seeds and actions"
        raise RepeatError(
            f"the first difference is in the batch that ends at step "
            f"{self._first_step + batches * B * T}, in steps {n * T + 1} to "
            f"{(n + 1) * T} of actor {index}, environments {index * E} to "
            f"{index * E + E - 1}: {why}. {self._changes or 'No package has changed'}"
        )

    def _compare_logs(self) -> None:
        """Raises RepeatError if logs.csv is not that of the recorded run so far."""
        then = read_rows(self._path.parent, self._first_step)
        now = read_rows(self._run.start.folder.path, self._first_step)
        for x, y in zip(then, now, strict=False):
            for name in sorted((x.keys() | y.keys()) - NOT_COMPARED):
                if (x.get(name) or "") != (y.get(name) or ""):
                    raise RepeatError(
                        f"logs.csv differs first at step {x['step']}: {name} was "
                        f"{x.get(name)} and is {y.get(name)}. {self._changes}"
                    )
        log.info("Equal to the recorded run: %d rows.", min(len(then), len(now)))

    # --- --interactive

    def _keep_batch(self, update: Any) -> None:
        self._batch = update.inputs
        self._learn(update)

    def _open_prompt(self) -> None:
        """A Python prompt after the last update, or after a failure."""
        names = {
            **{"run": self._run, "learner": self._run.learner},
            "batch": self._batch and self._batch[0],
            "actor": lambda i: self._actors.copy(i, self._run.wake_reader),
        }
        old = signal.signal(signal.SIGINT, signal.default_int_handler)
        about_them = "batch: of the last update. actor(0): a copy, with env and row."
        text = f"Step {self._run.learner.step}. Names: {', '.join(names)}. {about_them}"
        with contextlib.suppress(SystemExit):  # exit() ends the prompt alone
            code.interact(text, local={**names, "np": np, "torch": torch}, exitmsg="")
        signal.signal(signal.SIGINT, old)
