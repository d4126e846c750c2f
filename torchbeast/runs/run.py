"""Files, signals, threads and checkpoints around the loop of a training run.

with Run(start, learner) as run:
    run.on_stop(stop)
    run.start_thread("learner-0", work)
    while run.going():
        ...  # at most a second
return run.exit_status
"""

import collections
import contextlib
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from torchbeast.base import errors, parts, ranks
from torchbeast.core.columns import join_columns, spread
from torchbeast.core.timings import Timings
from torchbeast.procs import processes
from torchbeast.procs.threads import Threads
from torchbeast.runs import checkpoint, trust
from torchbeast.runs.files import FileWriter
from torchbeast.runs.start import Start

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0  # least time limit for threads to end


class Run:
    """A training run from its first log line to its exit status.

    On exit it stops the threads, saves a checkpoint if there is something new and valid
    to save, closes `stack` and completes meta.json. An exception in the body or in a
    thread ends the run: it is logged, and the exit status is 1. Learner threads use
    `updating`, and updates `log`; the rest but `wake` is for the main thread.

    The learner loads the checkpoint, if there is one. The functions `attach` return
    guests, beside those of base/parts.py; the step `until` replaces --total_steps.
    """

    def __init__(
        self,
        start: Start,
        learner: Any,
        attach: Iterable[Callable[["Run"], Any]] = (),
        until: int | None = None,
    ) -> None:
        self.start, self.learner, self.flags = start, learner, start.flags
        self.resumed, self.folder = start.saved is not None, start.folder.path
        if start.saved:
            with errors.using(self.folder / "model.tar", "does not fit these flags"):
                learner.load_state_dict(start.saved)
        elif not ranks.rank():
            parts.call("initialize", self.flags, learner.model)
        ranks.copy_first(learner.model.state_dict().values())
        if learner.device.type == "cpu":
            torch.set_num_threads(self.flags.torch_threads)
        self.stack = contextlib.ExitStack()  # closed after the last checkpoint
        self.timings = Timings()  # of the learner threads, inside `updating`
        self.shares: dict[str, Any] = {}  # of the time of each part, for meta.json
        self.last_step = until or self.flags.total_steps
        self.exit_status = 1  # 0 finished, 128 + n ended by signal n
        self._error: str | None = None  # what ended the run, for meta.json
        self._signal, self._signalled_at, self._signal_logged = 0, 0.0, False
        self.saving = False  # or about to end
        self.save_soon = False  # set by a guest: the next round saves
        self.all_stop = False  # all ranks end after the same update
        # Called to wait for an update, to publish and log it.
        self.on_update: Callable[[Any], None] = lambda update: None
        self._begun: collections.deque[Any] = collections.deque()  # not yet finished
        self.add = self._begun.append  # takes an update that has begun, in `updating`
        self._turn = threading.Lock()  # the updates of all ranks have one order
        self.lock = threading.Lock()  # protects the learner
        self._longest_update = 0.0  # seconds
        self._saved_step, self._saved_update = learner.step, learner.num_updates
        self._last_save = self.round_at = time.monotonic()
        self.guests, self._attach = parts.Guests(), attach
        self.show = functools.partial(self.guests.all, "show")
        self._wake_pipe = processes.WakePipe()
        self.wake, self.wake_reader = self._wake_pipe.wake, self._wake_pipe.reader
        self._threads = Threads(self.wake)
        self.start_thread, self.on_stop = self._threads.start, self._threads.on_stop

    def __enter__(self) -> "Run":
        with contextlib.ExitStack() as undo:
            undo.callback(self.abandon)
            undo.callback(self.guests.close, 1)  # those made before an error
            values = self.flags.as_dict()
            of_parts = [x.attach for x in parts.find() if hasattr(x, "attach")]
            for attach in (*of_parts, *self._attach) if not ranks.rank() else ():
                if guest := attach(self):
                    self.guests.append(guest)
            # From now on signals are only noted: meta.json gets the end of the run.
            for number in processes.handled_signals():
                signal.signal(number, self._on_signal)
            self._of_start = {
                "flags_left_open": self.start.left_open,
                "flags_signature": trust.sign(values),
                "ranks": ranks.size(),
            }
            about = join_columns(*self.guests.all("about"), self._of_start)
            step = self.learner.step if self.resumed else None
            self._writer = FileWriter(self.start.folder, values, step, about)
            self._wake_pipe.wake_on_signals()
            log.info("%s", self.start.note)
            undo.pop_all()
        return self

    # --- The main loop

    def going(self) -> bool:
        """Starts a round of the main loop; False: end. Raises what a thread raised."""
        stop_requested = self.stop_requested() and (self.all_stop or ranks.size() == 1)
        if stop_requested or self.learner.step >= self.last_step:
            return False
        self.guests.all("poll")
        return True

    def stop_requested(self) -> bool:
        """Whether a stop signal has come; logs it. Raises what a thread has raised."""
        self.round_at = time.monotonic()
        self._log_signal()
        self._wake_pipe.drain()
        if self._threads.errors:
            raise self._threads.errors[0]
        return bool(self._signal)

    # --- Threads and updates

    @contextlib.contextmanager
    def updating(self) -> Iterator[bool]:
        """Surrounds the learning from a batch; only one thread at a time can be inside.

        Yields True: then the caller begins an update and calls `add`. Or False: then it
        drops the batch, since the run ends or the weights are not finite.
        """
        learner = self.learner
        with self._turn:
            # With --sync the last round is learned from completely.
            finished = learner.step >= self.last_step or self.all_stop
            finished = finished and not self.flags.sync
            if not finished and (number := ranks.highest(self._signal)):
                self._signal, self.all_stop = self._signal or number, True
            with self.lock:
                if finished or learner.diverged:
                    yield False
                    return
                if not self.timings.seconds:
                    self.timings.reset()  # don't count the start of the actors
                self.timings.time("wait")
                started = time.monotonic()
                yield True
                self.finish_begun(all_but=1 if learner.is_ahead else 0)
                seconds = time.monotonic() - started
                self._longest_update = max(self._longest_update, seconds)
                self.timings.time("learn")

    def finish_updates(self) -> None:
        """Finishes the newest update, too. Call it if no batch waits."""
        with self.lock:
            self.timings.time("wait")
            self.finish_begun()
            self.timings.time("learn")

    def finish_begun(self, all_but: int = 0) -> None:
        """Finishes all updates but the newest; the caller holds the lock."""
        try:
            while len(self._begun) > all_but:
                update = self._begun.popleft()
                self.guests.all("update", update)
                self.on_update(update)
        except BaseException:
            self._begun.clear()  # they go on from a bad update
            raise

    def log(self, *columns: dict[str, Any]) -> None:
        """Writes a row to logs.csv. Raises ColumnError, see spread."""
        row = spread(join_columns(*columns, *self.guests.all("columns")))
        self._writer.log(row)
        self.guests.all("row", row)

    # --- Checkpoints

    def save_is_due(self) -> bool:
        seconds = time.monotonic() - self._last_save
        is_due = seconds > self.flags.checkpoint_interval or self.save_soon
        return is_due and self.has_news()

    def has_news(self) -> bool:
        """Whether there is something to save since the last checkpoint."""
        is_new = self.learner.step != self._saved_step
        return is_new and not self.flags.disable_checkpoint

    def save(self, more: Callable[[], dict[str, Any]] = dict) -> None:
        """Saves a checkpoint, with what `more` returns, if there were steps.

        Waits for an update in progress, but not after a stop signal.
        """
        learner, path = self.learner, self.folder / "model.tar"
        if not self.has_news():
            return
        while not self.lock.acquire(timeout=1.0):
            if self.stop_requested():
                return
        try:
            self.finish_begun()
            if learner.diverged:
                return  # keep the last checkpoint, whose weights are finite
            state = learner.state_dict() | more()
            self.saving = True
            state |= {"flags": self.flags.as_dict(), **self._of_start}
            # The previous checkpoint is the last one with other weights: while a replay
            # fills, there are steps without updates.
            step, update = learner.step, learner.num_updates
            checkpoint.save(path, state, keep_previous=update != self._saved_update)
            self.guests.all("save", path, step)
            self._saved_step, self._saved_update = step, update
            self._last_save, self.save_soon = time.monotonic(), False
        finally:
            self.saving = False
            self.lock.release()
        log.info("Saved %s at step %d.", path, step)
        self.guests.all("saved", path, step)

    # --- Signals and the end

    def _on_signal(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        is_same = now - self._signalled_at <= processes.SAME_REQUEST_SECONDS
        if not self._signalled_at:  # don't log here: it may interrupt another log line
            self._signal, self._signalled_at = self._signal or number, now
        elif not (is_same or self.saving):
            raise KeyboardInterrupt(number)  # second request: don't wait, don't save

    def _log_signal(self) -> None:
        if self._signal and not self._signal_logged:
            self._signal_logged = True
            log.warning("%s: ending the run.", signal.Signals(self._signal).name)

    def _fail(self, error: BaseException) -> None:
        if self._error:  # the first is the cause
            log.warning("%s: %s", type(error).__name__, error)
            return
        if not isinstance(error, KeyboardInterrupt):
            self._error = f"{type(error).__name__}: {error}"[:1000]
        self.exit_status = errors.report(error)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        worth_saving = True
        try:
            self._log_signal()
            try:
                if error:
                    raise error
                left = self.learner.step < self.last_step
                left = left or any(self.guests.all("finish"))
                self.exit_status = 128 + self._signal if left else 0
            except BaseException as failed:
                self._fail(failed)
                # With --sync only complete rounds can be resumed.
                ends = errors.CheckpointError | KeyboardInterrupt
                worth_saving = not (self.flags.sync or isinstance(failed, ends))
            try:
                self._end(worth_saving)
            except BaseException as failed:
                self._fail(failed)
        finally:
            # From now on shutdown is bounded in time; further signals are ignored. The
            # caller restores the handlers.
            for number in processes.handled_signals():
                signal.signal(number, signal.SIG_IGN)
            self._close()
        return True

    def abandon(self) -> None:
        """Ends a run that has not been entered."""
        if not self._threads.end(STOP_SECONDS):  # else they may still wake
            self._wake_pipe.close()

    def _end(self, worth_saving: bool) -> None:
        """Stops the threads and saves the last checkpoint."""
        busy = self._threads.end(max(STOP_SECONDS, 2 * self._longest_update))
        if self._threads.errors and self.exit_status != 1:  # raised after the loop
            self._fail(self._threads.errors[0])
            worth_saving = worth_saving and not self.flags.sync
        if busy:
            late = f"{', '.join(busy)} did not stop in time"
            if self.lock.locked():  # an update hangs
                log.error("%s: no last checkpoint is saved.", late)
                if self._longest_update or not self._signal:  # the first may be slow
                    self._error, self.exit_status = self._error or late, 1
                return
            log.warning("%s.", late)
        self.finish_updates()
        if worth_saving:
            self.save()

    def _close(self) -> None:
        self.saving = True
        learner, counters = self.learner, self.learner.counters
        try:
            self.stack.close()
        except Exception as error:
            self._fail(error)
        mean = counters.mean_return(self.flags.episodes_for_avg)
        status = self.exit_status
        log.info(
            "%s at step %d, %.0f SPS, %d games, mean return %s",
            "Failed" if status == 1 else "Stopped" if status else "Finished",
            *(learner.step, counters.sps() or 0, counters.games),
            "-" if mean is None else f"{mean:.2f}",
        )
        why = self._error if status == 1 else None
        end = {"last_step": learner.step, "error": why, "timings": self.shares}
        self._writer.close(status, **end)
        self.guests.close(status)
        if self._threads.busy():
            # Python can't exit cleanly while a thread is inside torch.
            logging.shutdown()
            os._exit(status)
        self._wake_pipe.close()
