"""--eval_interval: games with the newest weights, in a process beside the training."""

from __future__ import annotations

import logging
import math
import pickle
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from torchbeast.base.errors import UserError
from torchbeast.flags import Atari, Environment
from torchbeast.local.actors import actor_context
from torchbeast.play.evaluate import EVAL_STREAM, Game, start_player
from torchbeast.procs import children
from torchbeast.runs import checkpoint, trust
from torchbeast.runs.files import EVAL_COLUMNS
from torchbeast.runs.run import Run

log = logging.getLogger(__name__)

LEAST_SECONDS = 600.0  # time limit of the evaluation of the final weights, at least
# Time limit of one step. The process has the lowest priority, so steps may be slow.
STEP_SECONDS = 300.0
# The flags that say which games are played, and how.
GAMES = {*Environment.declared(), *Atari.declared(), "greedy", "eval_episodes"}


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
        self._games: list[Game] = []  # of the newest evaluation
        self._busy, self._begun = False, 0.0  # the time at which the newest began
        self._longest = 0.0  # seconds of the longest evaluation
        self._weights: tuple[int, dict[str, torch.Tensor]] = (0, {})
        self._best = -math.inf  # result so far
        if not self.flags.eval_interval:
            return
        self._due = run.learner.step
        self._path = run.start.folder.path / checkpoint.BEST
        if run.resumed and self._path.exists():
            self._best = self._best_so_far()
        run.add_columns(dict.fromkeys(EVAL_COLUMNS))
        self._sender = ThreadPoolExecutor(1)  # the process may be slow to take weights
        self._watch = children.StepWatch(max(self.flags.actor_timeout, STEP_SECONDS))
        self._group = children.Children(actor_context())
        numbers = range(self.flags.eval_episodes)
        self._child = start_player(
            self._group, "its process", self.flags, numbers, EVAL_STREAM
        )
        run.stack.callback(self._close)

    def _best_so_far(self) -> float:
        """The result that the best checkpoint has in these games, or -inf."""
        if not (found := checkpoint.best_result(self._path)):
            return -math.inf
        _, result, then = found
        now = self.flags.as_dict()
        if changed := sorted(x for x in GAMES if then.get(x, now[x]) != now[x]):
            why = "does not count: it was found with another"
            log.warning("%s %s --%s.", checkpoint.BEST, why, ", --".join(changed))
            return -math.inf
        return result

    def poll(self) -> None:
        """Takes a result, if there is one; starts an evaluation if one is due."""
        if self._child:
            self._take_result()
        if self._child and not self._busy and self.run.learner.step >= self._due:
            self._begin()

    def finish(self) -> None:
        """Evaluates the final weights, if the run has reached flags.total_steps.

        The result gets a row of its own in logs.csv. A stop signal ends the wait; the
        next start evaluates. Its limit ends it for good: LEAST_SECONDS, or three
        times the longest evaluation so far.
        """
        learner = self.run.learner
        if not self._child or learner.step < self.flags.total_steps:
            return
        self.run.save()  # the evaluation may take long
        log.info("Evaluating the final weights.")
        begun = self._watch.awake
        while self._child and not self.run.stop_requested():
            if not self._busy:
                if self._weights[0] == learner.step:
                    break
                self._begin()
                begun = self._watch.awake
            most = max(LEAST_SECONDS, 3 * self._longest)
            children.wait([self._child], 1.0, [self.run.wake_reader])
            if self._take_result():
                frames = learner.step * learner.env_spec.frames_per_step
                self.run.log({"step": learner.step, "frames": frames})
            elif self._child and self._watch.awake - begun > most:
                self._give_up(f"the last one needs more than {most:.0f} s")
        missing = self._busy or self._weights[0] != learner.step
        self.run.interrupted = self.run.stop_requested() and missing

    def _begin(self) -> None:
        """Starts an evaluation, unless an update hangs."""
        if copied := self.run.copy_weights():
            self._weights = copied
            self._busy, self._games = True, []
            self._begun = self._watch.awake
            self._watch.restart(self._child)
            interval = self.flags.eval_interval
            self._due = (copied[0] // interval + 1) * interval
            child, weights = self._child, copied[1]  # bytes: see evaluate.py
            self._sender.submit(lambda: child.send(pickle.dumps(weights)))

    def _take_result(self) -> bool:
        """Takes a result, if there is one; gives up if there will be none."""
        try:
            self._watch.check([self._child] if self._busy else [])
            while self._busy and (game := self._child.receive()):
                self._games.append(game)
        except UserError as error:
            self._give_up(str(error))
            return False
        if not self._busy or len(self._games) < self.flags.eval_episodes:
            return False
        self._log_result()
        return True

    def _log_result(self) -> None:
        result, self._busy = self._games, False
        self._longest = max(self._longest, self._watch.awake - self._begun)
        step, weights = self._weights
        returns = [game.game_return for game in result]
        mean = statistics.fmean(returns)
        length = statistics.fmean(game.length for game in result)
        columns = {"eval_step": step, "eval_return": mean, "eval_length": length}
        self.run.add_columns(columns)
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

    def _give_up(self, why: str) -> None:
        log.error("There are no more evaluations: %s", why)
        self._close()

    def _close(self) -> None:
        if self._child:
            self._group.close()  # ends what the sender waits for, too
            self._sender.shutdown()
            self._child.pipe.close()
            self._child = None
