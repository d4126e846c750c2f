"""Makes a run of MonoBeast with --record again, as a new run; compares the two.

    python -m torchbeast.tools.repeat XPID --savedir FOLDER
    python -m torchbeast.tools.repeat XPID --until 2000000 --interactive

The new run is named XPID-repeated. --until ends it after the batch that reaches this
step, with a checkpoint; --interactive then opens a Python prompt. Flags of MonoBeast
that don't change what a run learns, such as --disable_cuda, may follow.
"""

import argparse
import code
import contextlib
import logging
import math
import pathlib
import signal
import sys
import threading
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
from torchbeast.runs import files, flagset, start, trust

log = logging.getLogger(__name__)

# Columns of logs.csv, and flags that name what the recorded run itself uses.
NOT_COMPARED = {"_tick", "_time", "sps", "eval_step", "eval_return", "eval_length"}
OF_THE_RUN = {"record", "mirror", "wandb", "tensorboard", "replay_file"}


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
    """The starts to make: flags, record and last step.

    Raises:
      FlagError: the run has no record, or a flag is typed that would change it.
    """
    free = of_resume(typed.declared, START, FREE)
    if others := sorted(typed.here.keys() - free):
        raise FlagError(f"a repetition has the flags of its run: omit --{others[0]}")
    savedir = pathlib.Path(flagset.merge(typed).savedir).expanduser()
    folder = savedir / own.run
    records, rows = record.records_of(folder), read_rows(folder)
    if 0 not in records or not rows:
        raise FlagError(
            f"{folder} has no record of a run's first batch. --record writes one, from "
            "step 0 on"
        )
    xpid = typed.here.get("xpid") or f"{folder.name}-repeated"
    if (savedir / xpid / "logs.csv").exists():
        raise FlagError(f"a repetition is a new run, and {xpid} exists: choose --xpid")
    steps, failed = [0], False
    for begun in files.read_meta(folder).get("starts", ()):
        # A start goes on from a checkpoint; what came later was dropped.
        first = begun.get("first_step") or 0
        steps = [*(x for x in steps if x < first), first]
        failed = bool(begun.get("error"))
    last = int(rows[-1]["step"])
    until = own.until or (LARGEST_STEP if failed else last)  # it fails by itself
    if own.until and until > last:
        log.warning("--until %d: the recorded run ends at %d.", until, last)
        until = last
    for first, end in zip(steps, [*steps[1:], until], strict=True):
        if first not in records:
            raise RepeatError(f"the start at step {first} was not recorded")
        header, _ = record.read_whole(records[first])
        if "server_addresses" in header["flags"]:
            raise FlagError(
                f"{records[first]} is PolyBeast's and says what happened, but not "
                "enough to repeat it; see docs/debugging.md"
            )
        not_used = of_resume(typed.declared, START) | OF_THE_RUN
        recorded = {k: v for k, v in header["flags"].items() if k not in not_used}
        place = str(records[first])
        in_file = flagset.values_of_file(typed.declared, recorded, place)
        # An update waits for the main thread, which must not wait for it to save.
        here: dict[str, Any] = {
            "checkpoint_interval": math.inf,
            "checkpoint_history": 0,
        }
        here |= {"eval_interval": 0, "xpid": xpid}  # evaluations change nothing
        found = typed._replace(
            here=typed.here | {k: x for k, x in here.items() if k in typed.declared},
            in_file={k: v for k, v in in_file.items() if v is not None},
            file=place,
            signed=trust.is_signed(header["flags"], header.get("flags_signature")),
        )
        log.info("The start at step %d, up to step %d.", first, min(end, until))
        yield found, records[first], min(end, until)
        if until <= end:
            return


class Guest:
    """Gives the run actors that follow a record; compares logs.csv."""

    def __init__(self, run: Any, path: pathlib.Path) -> None:
        self.run, self.path, self.first_step = run, path, run.learner.step
        self.batch: Any = None
        then, now = record.read_whole(path)[0]["about"], record.about()
        others = [k for k in then | now if then.get(k) != now.get(k)]
        changes = [f"{k} {then.get(k)} -> {now.get(k)}" for k in others]
        self.changes = f"Changed since: {', '.join(changes)}" if changes else ""
        if changes:
            log.warning("%s", self.changes)

    def actors(self, actors: Any, rows: dict[str, Any]) -> "Repeated":
        return Repeated(self, actors, rows)

    def update(self, update: Any) -> None:
        self.batch = update.inputs[0]  # for the prompt

    def compare_logs(self) -> None:
        """Raises RepeatError if logs.csv is not that of the recorded run so far."""
        then = read_rows(self.path.parent, self.first_step)
        now = read_rows(self.run.folder, self.first_step)
        for x, y in zip(then, now, strict=False):
            for name in sorted((x.keys() | y.keys()) - NOT_COMPARED):
                if (x.get(name) or "") != (y.get(name) or ""):
                    raise RepeatError(
                        f"logs.csv differs first at step {x['step']}: {name} was "
                        f"{x.get(name)} and is {y.get(name)}. {self.changes}"
                    )
        log.info("Equal to the recorded run: %d rows.", min(len(then), len(now)))

    def open_prompt(self) -> None:
        """A Python prompt after the last update, or after a failure."""
        names = {"run": self.run, "learner": self.run.learner, "batch": self.batch}
        old = signal.signal(signal.SIGINT, signal.default_int_handler)
        text = f"Step {self.run.learner.step}. Names: {', '.join(names)}, np, torch."
        with contextlib.suppress(SystemExit):  # exit() ends the prompt alone
            code.interact(text, local={**names, "np": np, "torch": torch}, exitmsg="")
        signal.signal(signal.SIGINT, old)


class Repeated:
    """Actors that begin and finish unrolls in the order of a record.

    An unroll waits for the version of the weights that it had. A version waits until
    all earlier unrolls have begun. Rollouts that come early are held back. The recorded
    run has gone this way with as many slots and threads, so no wait is in vain.

    Raises:
      RepeatError: the record is damaged.
    """

    def __init__(self, guest: Guest, actors: Any, rows: dict[str, Any]) -> None:
        self._actors, self._rows = actors, rows
        self._run, self._path, self._guest = guest.run, guest.path, guest
        _, data = record.read_whole(guest.path)
        size = record.EVENTS.itemsize
        self._events = np.frombuffer(data, record.EVENTS, len(data) // size)
        self._check_events()
        self._begins = np.flatnonzero(self._events["who"] % 2 == 0)
        self._versions = self._events["value"][self._begins]
        self._arrived: dict[int, list[int]] = {}  # held back: slots by actor
        self._at = 0  # the next event
        self._published = self._run.learner.num_updates
        self._moved, self._stopped = threading.Condition(), False
        self._progress: Any = None
        self._progress_at = 0.0  # by the watch, which leaves out suspended time
        self._run.on_stop(self._stop)

    def _check_events(self) -> None:
        flags, who = self._run.flags, self._events["who"]
        busy: set[int] = set()
        for at, (index, finishes) in enumerate(zip(who // 2, who % 2, strict=True)):
            if index >= flags.num_actors or (index in busy) != finishes:
                raise RepeatError(f"{self._path} is damaged: event {at} is impossible")
            busy ^= {index}
        B, T = flags.batch_size, flags.unroll_length
        batches = np.sum(who % 2) * flags.envs_per_actor // B
        reached = self._guest.first_step + int(batches) * B * T
        if reached < self._run.last_step < LARGEST_STEP:
            raise RepeatError(
                f"{self._path} is damaged: its events lead to step {reached}, and the "
                f"run went on to step {self._run.last_step}"
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
        self._advance()

    def finished(self, timeout: float, wake_up: int) -> Iterator[tuple[int, list[int]]]:
        index, finishes, checked = self._next()
        timeout = 0 if finishes and index in self._arrived else timeout
        self._arrived |= dict(self._actors.finished(timeout, wake_up))
        self._advance(0)  # actors have loaded weights, so a bank may be free
        self._check_progress()
        while finishes and index in self._arrived:
            slots = self._arrived.pop(index)
            self._check_unroll(index, checked, record.checksum(self._rows, slots))
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
                self._at < self._begins[i] or not self._actors.publish(weights, version)
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
            needs = f"actor {index} needs weights of version {value}, and slots"
            needs = f"actor {index} needs to finish its unroll" if finishes else needs
            raise RepeatError(
                f"the repetition waits for {limit:g} s: {self._path} is at event "
                f"{self._at} of {len(self._events)}, "
                f"{needs if index >= 0 else 'and the run should have failed'}. If the "
                "machine is that slow, raise --actor_timeout"
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
            f"{self._guest.first_step + batches * B * T}, in steps {n * T + 1} to "
            f"{(n + 1) * T} of actor {index}, environments {index * E} to "
            f"{index * E + E - 1}: {why}. "
            f"{self._guest.changes or 'No package has changed'}"
        )


def repeat_start(
    typed: flagset.Typed, path: pathlib.Path, until: int, interactive: bool
) -> int:
    guests: list[Guest] = []

    def attach(run: Any) -> Guest:
        guests.append(Guest(run, path))
        if interactive:
            run.stack.callback(guests[0].open_prompt)
        return guests[0]

    stops = processes.raise_on_stop_signals()  # a Run ignores them at its end
    with stops, start.begin(typed, monobeast.resolve_layout) as begun:
        status = monobeast.train(begun, attach, until=until)
        for guest in guests:
            guest.compare_logs()
    return status


def repeat(own: argparse.Namespace, typed: flagset.Typed) -> int:
    for found, path, until in starts(own, typed):
        if status := repeat_start(found, path, until, own.interactive):
            return status
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 equal so far, 1 different or failed."""
    parser = argparse.ArgumentParser(
        usage="python -m torchbeast.tools.repeat XPID|FOLDER [--until STEP] "
        "[--interactive] [--savedir FOLDER] [--xpid NAME] ...",
        allow_abbrev=False,
    )
    parser.add_argument("--until", type=int)
    parser.add_argument("--interactive", action="store_true")
    run, *words = [*(sys.argv[1:] if argv is None else argv), ""]
    if not run or run.startswith("-"):
        parser.error("the first word is the recorded run: its name, or its folder")
    own, words = parser.parse_known_args(words[:-1])
    own.run = run
    typed = flagset.read(monobeast.make_parser(), words)
    return start.guarded(lambda: repeat(own, typed))


if __name__ == "__main__":
    sys.exit(main())
