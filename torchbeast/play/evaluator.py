"""--eval_interval: games with the newest weights, in a process beside the training."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import pickle
import statistics
import threading
from multiprocessing import connection
from typing import Any

import torch

from torchbeast.base.errors import UserError
from torchbeast.core.rollout import step_counters
from torchbeast.local.actors import actor_context, seed_globals
from torchbeast.play.evaluate import EVAL_STREAM, play
from torchbeast.procs import children
from torchbeast.procs.step_watch import StepWatch
from torchbeast.records.logs_csv import EVAL_COLUMNS
from torchbeast.runs import checkpoint, trust
from torchbeast.runs.flagset import Flags
from torchbeast.runs.run import Run

log = logging.getLogger(__name__)

WARNING_SECONDS = 600.0  # between two warnings of a slow evaluation
# Time limit of one step. The process has the lowest priority, so steps may be slow.
STEP_SECONDS = 300.0


class Evaluator:
    """Evaluates every flags.eval_interval steps and at the end; keeps the best weights.

    The results are columns of logs.csv: in the next row after the games, `eval_return`
    and `eval_length` (means), and `eval_step`, that of the weights. It always plays the
    same games, which are not those of --mode test. While it plays, no other evaluation
    begins. If it fails, or takes no step for STEP_SECONDS or flags.actor_timeout
    seconds, whichever is longer, the log says so, and the run goes on without.

    Its methods are for the main thread.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.flags = run, run.flags
        self._child: Any = None
        self._busy, self._longest = False, 0.0  # seconds of the longest evaluation
        self._begun = self._warned = 0.0  # when the newest began, and the last warning
        self._weights: tuple[int, dict[str, torch.Tensor]] = (0, {})
        self._logged_step, self._best = -1, -math.inf  # of results
        if not self.flags.eval_interval:
            return
        self._due = run.learner.step
        self._path = run.start.folder.path / checkpoint.BEST
        if run.resumed and self._path.exists():
            _, self._best = checkpoint.best_result(self._path) or (0, -math.inf)
        run.add_columns(dict.fromkeys(EVAL_COLUMNS))
        self._sender: threading.Thread | None = None
        self._watch = StepWatch(
            step_counters(1), max(self.flags.actor_timeout, STEP_SECONDS)
        )
        self._group = children.Children(actor_context())
        who = "its process"
        self._child = self._group.start(who, _evaluate, self.flags, self._watch.steps)
        run.stack.callback(self._close)

    def poll(self) -> None:
        """Takes a result, if there is one; starts an evaluation if one is due."""
        if self._child:
            self._take_result()
        if self._child and not self._busy and self.run.learner.step >= self._due:
            self._begin()

    def finish(self) -> None:
        """Evaluates the final weights, if the run has reached flags.total_steps.

        The result gets a row of its own in logs.csv. A stop signal ends the wait; the
        next start evaluates. Its limit ends it for good: WARNING_SECONDS, or three
        times the longest evaluation so far.
        """
        learner = self.run.learner
        if not self._child or learner.step < self.flags.total_steps:
            return
        self.run.save()  # the evaluation may take long
        log.info("Evaluating the final weights.")
        most = max(WARNING_SECONDS, 3 * self._longest)
        begun = self._watch.awake
        while self._child and not self.run.stop_requested():
            if self._watch.awake - begun > most:
                self._give_up(f"the last one needs more than {most:.0f} s")
                break
            if self._take_result():
                frames = learner.step * learner.env_spec.frames_per_step
                self.run.log({"step": learner.step, "frames": frames})
            if self._child and not self._busy:
                if self._weights[0] == learner.step:
                    break
                self._begin()
            if self._child:
                children.wait([self._child], 1.0, [self.run.wake_reader])
        if self.run.stop_requested() and self._logged_step != learner.step:
            self.run.interrupted = True

    def _begin(self) -> None:
        """Starts an evaluation, unless an update hangs."""
        if copied := self.run.copy_weights():
            self._weights = copied
            self._busy = True
            self._begun = self._warned = self._watch.awake
            self._watch.restart(0)
            interval = self.flags.eval_interval
            self._due = (copied[0] // interval + 1) * interval
            # In a thread, because the process may be slow to take them.
            self._sender = threading.Thread(target=self._send, args=copied[1:])
            self._sender.start()

    def _take_result(self) -> bool:
        """Takes a result, if there is one; gives up if there will be none."""
        stuck = self._watch.find_stuck({0} if self._busy else ())
        if not self._busy:
            return False
        try:
            result = self._child.receive()
        except UserError as error:
            self._give_up(str(error))
            return False
        if result is not None:
            return self._log_result(result)
        if stuck is not None:
            self._give_up(
                self._watch.explain(0, "its process", self._child.process.pid)
            )
        elif self._watch.awake - self._warned > WARNING_SECONDS:
            self._warned = self._watch.awake
            log.warning(
                "The evaluation of step %s needs more than %g s.",
                *(f"{self._weights[0]:,}", WARNING_SECONDS),
            )
        return False

    def _send(self, weights: dict[str, torch.Tensor]) -> None:
        with contextlib.suppress(OSError):  # `poll` sees that the process has died
            self._child.pipe.send(pickle.dumps(weights))  # bytes: see evaluate.py

    def _log_result(self, result: Any) -> bool:
        self._busy = False
        self._longest = max(self._longest, self._watch.awake - self._begun)
        step, weights = self._weights
        returns = [game.game_return for game in result]
        mean = statistics.fmean(returns)
        length = statistics.fmean(game.length for game in result)
        columns = {"eval_step": step, "eval_return": mean, "eval_length": length}
        self.run.add_columns(columns)
        self._logged_step = step
        log.info(
            "Step %s: %d test games, mean return %.2f", f"{step:,}", len(result), mean
        )
        if mean > self._best and not self.flags.disable_checkpoint:
            state = {
                "model_state_dict": weights,
                "flags": self.flags.as_dict(),
                "flags_signature": trust.sign(self.flags.as_dict()),
                "stats": {"step": step, "eval_return": mean},
            }
            try:
                checkpoint.save(self._path, state, keep_previous=False)
            except checkpoint.CheckpointError as error:
                log.warning("%s", error)
            else:
                self._best = mean
        return True

    def _give_up(self, why: str) -> None:
        log.error("There are no more evaluations: %s", why)
        self._close()

    def _close(self) -> None:
        if self._child:
            self._group.close()  # ends `_send`, too
            if self._sender:
                self._sender.join()
            self._child.pipe.close()
            self._child = None


def _evaluate(flags: Flags, steps: torch.Tensor, pipe: connection.Connection) -> None:
    """The child process: answers weights with games, or with an error.

    It counts its steps in `steps` [1].
    """
    children.begin_child()
    os.nice(19)
    torch.set_num_threads(1)
    numbers = range(flags.eval_episodes)
    on_step = functools.partial(steps.add_, 1)
    with contextlib.suppress(EOFError, OSError):  # the run has ended
        while True:
            weights = pickle.loads(pipe.recv())
            seed_globals(flags.seed, EVAL_STREAM)  # always the same games
            with children.sending_errors(pipe, "a game failed"):
                games = play(
                    flags, weights, numbers, stream=EVAL_STREAM, on_step=on_step
                )
                pipe.send(list(games))
