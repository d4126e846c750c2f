"""--eval_interval: games with the newest weights, in a process beside the training.

The results are columns of logs.csv, in the next row after the games: `eval_return` and
`eval_length` (means), and `eval_step`, that of the weights. It always plays the same
games, which are not those of --mode test. model.best.tar has the best weights.
"""

import collections
import logging
import math
import pickle
import statistics
import threading
from typing import Any

from torchbeast.base import parts
from torchbeast.base.errors import FlagError, UserError
from torchbeast.base.flag import COUNT, FREE, STEPS_OR_0, Group, flag

log = logging.getLogger(__name__)

COLUMNS = "eval_step", "eval_return", "eval_length"
# Time limits of an evaluation, and of one step: the process has the lowest priority.
MOST_SECONDS, STEP_SECONDS = 3600.0, 300.0


class Flags(Group):
    eval_interval: int = flag(
        0, "steps between evaluations beside the training; 0: none", STEPS_OR_0, FREE
    )
    eval_episodes: int = flag(10, "games of each", COUNT, FREE, needs="eval_interval")


def attach(run: Any) -> "Evaluator | None":
    if not run.flags.eval_interval:
        return None
    if not (games := parts.optional("play.games")):
        raise FlagError("--eval_interval needs extras/play, now deleted")
    return Evaluator(run, games)


class Evaluator:
    """If an evaluation fails or hangs, the log says so, and the run goes on without."""

    def __init__(self, run: Any, games: Any) -> None:
        from torchbeast.local.actors import actor_context
        from torchbeast.procs import children
        from torchbeast.runs import checkpoint

        self.run, self.flags, self.due = run, run.flags, run.learner.step
        # Of the newest evaluation.
        self.step, self.weights, self.began = -1, dict[str, Any](), 0.0
        self.games: list[Any] | None = None  # of the one in progress
        self.results: collections.deque[dict[str, Any]] = collections.deque()
        self.path, self.best = run.folder / "model.best.tar", -math.inf
        if run.resumed and self.path.exists():
            stats = checkpoint.load(self.path)["stats"]
            if stats["step"] <= run.learner.step:  # else these steps come again
                self.best = stats["eval_return"]
        self.watch = children.StepWatch(max(self.flags.actor_timeout, STEP_SECONDS))
        self.group = children.Children(actor_context())
        about = self.flags, range(self.flags.eval_episodes), games.EVAL_STREAM
        self.child: Any = games.start_player(self.group, "its process", *about)

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
            if self.games is not None and self.watch.awake - self.began > MOST_SECONDS:
                raise UserError(f"one takes more than {MOST_SECONDS:g} s")
        except UserError as error:
            log.error("There are no more evaluations: %s", error)
            self.close(1)
            return
        is_due = self.games is None and self.run.learner.step >= self.due
        if is_due and self.copy_weights():
            interval, self.games = self.flags.eval_interval, []
            self.due = self.step + interval - self.step % interval
            self.began = self.watch.awake
            self.watch.restart(self.child)
            # In a thread: the process may be slow to take them.
            data = (pickle.dumps(self.weights),)
            threading.Thread(target=self.child.send, args=data, daemon=True).start()

    def copy_weights(self) -> bool:
        """Takes the present step and weights; False if an update is too slow."""
        run = self.run
        if not run.lock.acquire(timeout=1.0):
            return False
        try:
            run.finish_begun()
            weights = run.learner.model.state_dict()
            self.step = run.learner.step
            self.weights = {k: x.cpu().clone() for k, x in weights.items()}
            return True
        finally:
            run.lock.release()

    def take(self, games: list[Any]) -> None:
        from torchbeast.runs import checkpoint, trust

        result = statistics.fmean(game.game_return for game in games)
        length = statistics.fmean(game.length for game in games)
        found = self.step, result, length
        self.results.append(dict(zip(COLUMNS, found, strict=True)))
        self.games = None
        text = "Step %d: %d test games, mean return %.2f"
        log.info(text, self.step, len(games), result)
        if result > self.best and not self.flags.disable_checkpoint:
            self.best, flags = result, self.flags.as_dict()
            state = {"model_state_dict": self.weights, "flags": flags}
            state["flags_signature"] = trust.sign(flags)
            state["stats"] = {"step": self.step, "eval_return": result}
            checkpoint.save(self.path, state, keep_previous=False)

    def columns(self) -> dict[str, Any]:
        return self.results.popleft() if self.results else dict.fromkeys(COLUMNS)

    def finish(self) -> bool:
        """Evaluates the final weights; True if a stop signal has ended the wait."""
        from torchbeast.procs import children

        self.run.save()  # the evaluation may take long
        log.info("Evaluating the final weights.")
        learner, self.due = self.run.learner, self.run.learner.step
        while self.child and (self.games is not None or self.step != learner.step):
            if self.run.stop_requested():
                return True
            children.wait([self.child], 1.0, [self.run.wake_reader])
            self.poll()
        while self.results:
            frames = learner.step * learner.env_spec.frames_per_step
            self.run.log({"step": learner.step, "frames": frames})
        return False

    def close(self, status: int) -> None:
        if self.child:
            self.group.close()
            self.child = None
