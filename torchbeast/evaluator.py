"""--eval_interval: games with the newest weights, in a process beside the training."""

from __future__ import annotations

import logging
import math
import os
import pickle
import statistics
import traceback
from multiprocessing import connection
from typing import Any

import torch

from torchbeast.core import checkpoint, processes
from torchbeast.core.actors import actor_context
from torchbeast.core.flags import Flags
from torchbeast.core.run import Run
from torchbeast.evaluate import play

log = logging.getLogger(__name__)

BEST = "model.best.tar"
CLOSE_SECONDS = 2.0


class Evaluator:
    """Evaluates every flags.eval_interval steps, and keeps the best checkpoint.

    The results are columns of logs.csv: in the next row after the games, `eval_return`
    and `eval_length` (means), and `eval_step`, that of the weights. It always plays the
    same games. While it plays, no other evaluation begins. If it fails, the log says
    so, and the run goes on without.

    Its methods are for the main thread.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.flags = run, run.flags
        self._process: Any = None
        self._busy = False
        self._weights: tuple[int, dict[str, torch.Tensor]] = (0, {})
        self._best = -math.inf
        if not self.flags.eval_interval:
            return
        self._due = run.learner.step
        self._path = run.start.folder.path / BEST
        if run.resumed and self._path.exists():
            self._best = checkpoint.load(self._path)["stats"]["eval_return"]
        run.add_columns(dict.fromkeys(("eval_step", "eval_return", "eval_length")))
        self._guardian = processes.Guardian(seconds=0)
        self._pipe, child_pipe = actor_context().Pipe()
        self._process = actor_context().Process(
            target=_evaluate, args=(self.flags, child_pipe), daemon=True
        )
        self._guardian.start(self._process)
        child_pipe.close()
        run.stack.callback(self._close)

    def poll(self) -> None:
        """Takes a result, if there is one; starts an evaluation if one is due."""
        if not self._process:
            return
        try:
            if self._busy and self._pipe.poll():
                self._take(self._pipe.recv())
            if self._process and not self._busy and self.run.learner.step >= self._due:
                self._weights = step, weights = self.run.copy_weights()
                self._pipe.send(pickle.dumps(weights))  # bytes: see evaluate.py
                self._busy = True
                interval = self.flags.eval_interval
                self._due = (step // interval + 1) * interval
        except (EOFError, OSError):
            self._process.join(1.0)
            how = processes.how_it_ended(self._process.exitcode)
            self._give_up(f"its process died {how}")

    def _take(self, result: Any) -> None:
        self._busy = False
        if isinstance(result, str):
            self._give_up(result)
            return
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
            self._best = mean
            state = {
                "model_state_dict": weights,
                "flags": self.flags.as_dict(),
                "stats": {"step": step, "eval_return": mean},
            }
            checkpoint.save(self._path, state, keep_previous=False)

    def _give_up(self, why: str) -> None:
        log.error("There are no more evaluations: %s", why)
        self._close()

    def _close(self) -> None:
        if self._process:
            self._pipe.close()
            self._guardian.end([self._process], CLOSE_SECONDS)
            self._guardian.close()
            self._process = None


def _evaluate(flags: Flags, pipe: connection.Connection) -> None:
    """The child process: answers weights with games, or with the text of an error."""
    processes.begin_child()
    os.nice(19)
    torch.set_num_threads(1)
    try:
        while True:
            weights = pickle.loads(pipe.recv())
            pipe.send(list(play(flags, weights, range(flags.eval_episodes))))
    except (EOFError, OSError):  # the run has ended
        pass
    except BaseException:
        pipe.send(traceback.format_exc())
