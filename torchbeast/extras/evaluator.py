"""--eval_interval: games with the newest weights, in a process beside the training.

The results are columns of logs.csv, in the next row after the games: `eval_return` and
`eval_length` (means), and `eval_step`, that of the weights. It always plays the same
games, which are not those of --mode test. model.best.tar has the best weights.
"""

from __future__ import annotations

import collections
import logging
import math
import pickle
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torchbeast.base.errors import CheckpointError, UserError
from torchbeast.base.flag import COUNT, FREE, STEPS_OR_0, Group, flag

log = logging.getLogger(__name__)

BEST = "model.best.tar"
LAST_SECONDS = 3600.0  # time limit of the evaluation of the final weights
# Time limit of one step. The process has the lowest priority, so steps may be slow.
STEP_SECONDS = 300.0


# fmt: off
class Flags(Group):
    eval_interval: int = flag(0,
        "steps between evaluations in a process beside the training; 0: none",
        STEPS_OR_0, FREE)
    eval_episodes: int = flag(10, "games of an evaluation", COUNT, FREE,
        needs="eval_interval")
# fmt: on


def attach(run: Any) -> Evaluator | None:
    return Evaluator(run) if run.flags.eval_interval else None


class Evaluator:
    """Evaluates every --eval_interval steps and at the end; keeps the best weights.

    While it plays, no other evaluation begins. If it fails, or takes no step for
    STEP_SECONDS or --actor_timeout seconds, whichever is longer, the log says so, and
    the run goes on without.
    """

    def __init__(self, run: Any) -> None:
        from torchbeast.local.actors import actor_context
        from torchbeast.play.evaluate import EVAL_STREAM, start_player
        from torchbeast.procs import children

        self.run, self.flags, self.due = run, run.flags, run.learner.step
        self.step = -1  # of the newest evaluation, and its weights
        self.weights: dict[str, Any] = {}
        self.games: list[Any] | None = None  # of the one in progress
        self.results: collections.deque[dict[str, Any]] = collections.deque()
        self.path = run.folder / BEST
        self.best = self.best_so_far() if run.resumed else -math.inf
        self.sender = ThreadPoolExecutor(1)  # the process may be slow to take weights
        self.watch = children.StepWatch(max(self.flags.actor_timeout, STEP_SECONDS))
        self.group = children.Children(actor_context())
        about = self.flags, range(self.flags.eval_episodes), EVAL_STREAM
        self.child: Any = start_player(self.group, "its process", *about)

    def best_so_far(self) -> float:
        """The result of the best checkpoint, or -inf if it does not count."""
        from torchbeast.runs import checkpoint

        try:
            stats = checkpoint.load(self.path)["stats"] if self.path.exists() else {}
            # A run that was killed repeats its last steps, and learns something else.
            if stats and stats["step"] <= self.run.learner.step:
                return float(stats["eval_return"])
        except Exception as error:
            log.warning("%s is not used: %s", self.path, error)
        return -math.inf

    def poll(self) -> None:
        """Takes the games that have ended; starts an evaluation if one is due."""
        if not self.child:
            return
        try:
            self.watch.check([] if self.games is None else [self.child])
            while self.games is not None and (game := self.child.receive()):
                self.games.append(game)
                if len(self.games) == self.flags.eval_episodes:
                    self.take(self.games)
        except UserError as error:
            self.give_up(str(error))
        is_due = self.games is None and self.run.learner.step >= self.due
        if self.child and is_due and (copied := self.run.copy_weights()):
            self.begin(*copied)  # there is no copy if an update hangs

    def begin(self, step: int, weights: dict[str, Any]) -> None:
        self.step, self.weights, self.games = step, weights, []
        self.watch.restart(self.child)
        interval = self.flags.eval_interval
        self.due = (step // interval + 1) * interval
        child = self.child  # it takes bytes: see evaluate.py
        self.sender.submit(lambda: child.send(pickle.dumps(weights)))

    def take(self, games: list[Any]) -> None:
        from torchbeast.runs import checkpoint, trust

        result = statistics.fmean(game.game_return for game in games)
        length = statistics.fmean(game.length for game in games)
        columns = {"eval_step": self.step, "eval_return": result, "eval_length": length}
        self.results.append(columns)
        text = "Step %s: %d test games, mean return %.2f"
        log.info(text, f"{self.step:,}", len(games), result)
        self.games, flags = None, self.flags.as_dict()
        if result <= self.best or self.flags.disable_checkpoint:
            return
        state = {"model_state_dict": self.weights, "flags": flags}
        state["flags_signature"] = trust.sign(flags)
        state["stats"] = {"step": self.step, "eval_return": result}
        try:
            checkpoint.save(self.path, state, keep_previous=False)
            self.best = result
        except CheckpointError as error:
            log.warning("%s", error)

    def columns(self) -> dict[str, Any]:
        none = dict.fromkeys(("eval_step", "eval_return", "eval_length"))
        return self.results.popleft() if self.results else none

    def finish(self) -> bool:
        """Evaluates the final weights; the result gets a row of its own in logs.csv.

        A stop signal ends the wait, then it returns True; the next start evaluates.
        """
        from torchbeast.procs import children

        self.run.save()  # the evaluation may take long
        log.info("Evaluating the final weights.")
        learner, begun = self.run.learner, self.watch.awake
        self.due = learner.step
        while self.child and (self.games is not None or self.step != learner.step):
            if self.run.stop_requested():
                return True
            children.wait([self.child], 1.0, [self.run.wake_reader])
            self.poll()
            if self.watch.awake - begun > LAST_SECONDS:
                self.give_up(f"the last one needs more than {LAST_SECONDS:.0f} s")
        while self.results:
            frames = learner.step * learner.env_spec.frames_per_step
            self.run.log({"step": learner.step, "frames": frames})
        return False

    def give_up(self, why: str) -> None:
        log.error("There are no more evaluations: %s", why)
        self.close(1)

    def close(self, status: int) -> None:
        if self.child:
            self.group.close()  # ends what the sender waits for, too
            self.sender.shutdown()
            self.child.pipe.close()
            self.child = None
