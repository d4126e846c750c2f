"""A search with Optuna: which settings the next runs of a sweep get."""

import logging
import pathlib
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optuna
from optuna import distributions
from optuna.trial import TrialState
from sqlalchemy import URL

from torchbeast.base.errors import FlagError, using
from torchbeast.tools.jobs import STOPPED, Job
from torchbeast.tools.saved_runs import read_run

log = logging.getLogger(__name__)

FORMS = "uniform:LOW:HIGH, loguniform:LOW:HIGH, int:LOW:HIGH or choice:A:B:..."


def distribution(text: str) -> distributions.BaseDistribution:
    """The values of --search FLAG=KIND:VALUE:VALUE..., from its part after the "=".

    Raises:
      FlagError: it is not of this form.
    """
    kind, *values = text.split(":")
    with using(f"--search FLAG={text}", f"is not {FORMS}"):
        match kind, values:
            case "uniform" | "loguniform", [low, high]:
                ends, is_log = (float(low), float(high)), kind == "loguniform"
                return distributions.FloatDistribution(*ends, log=is_log)
            case "int", [low, high]:
                return distributions.IntDistribution(int(low), int(high))
            case "choice", [_, *_]:
                return distributions.CategoricalDistribution(values)
        raise ValueError(f"unknown kind, or number of values: {kind}")


def final_return(folder: pathlib.Path) -> float | None:
    """What a run counts in a search; None if its files are damaged.

    With --eval_interval it is the eval_return of the final weights, else the mean
    return of the last 100 games.
    """
    try:
        run = read_run(folder)
    except ValueError as error:
        log.warning("%s does not count: %s", folder.name, error)
        return None
    if not run.meta.get("args", {}).get("eval_interval"):
        return run.last("mean_game_return_100")
    is_final = run.last("eval_step") == run.last("step")
    return run.last("eval_return") if is_final else None


class Search:
    """An Optuna study in a SQLite file, new or continued. A trial has a run per seed.

    Args:
      space: the values of each flag, see `distribution`.
      shared: what all trials share: command line and seeds.
      make_jobs: from a trial's name and settings to its runs.

    Raises:
      FlagError: the file can't be used, or its study has other values.
    """

    def __init__(
        self,
        path: pathlib.Path,
        space: Sequence[tuple[str, str]],
        shared: Sequence[str],
        make_jobs: Callable[[str, dict[str, Any]], list[Job]],
    ) -> None:
        self.space = {name: distribution(text) for name, text in space}
        self.make_jobs = make_jobs
        fixed = [*shared, *(f"--search {name}={text}" for name, text in space)]
        # The runs of each trial in progress, with their exit statuses.
        self._open: dict[int, dict[Job, int | None]] = {}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with using(path, "can't be used"):
            self.study = optuna.create_study(
                storage=URL.create("sqlite", database=str(path)).render_as_string(),
                study_name="sweep",
                direction="maximize",
                load_if_exists=True,
            )
            before = self.study.user_attrs.get("fixed", fixed)
            self.study.get_trials()
            self.study.set_user_attr("fixed", before)
        if before != fixed:
            raise FlagError(
                f"{path} has a search that was started with {' '.join(before)}. Give "
                "the same values and seeds again, or another --name"
            )

    def jobs(self, num_trials: int) -> Iterator[Job]:
        """The runs of unfinished trials, then those of new ones, up to `num_trials`.

        A trial whose flags do not fit together has failed.
        """
        for trial in self.study.get_trials(states=[TrialState.RUNNING]):
            if trial.params.keys() == self.space.keys():
                yield from self._begin(trial.number, trial.params)
            else:  # killed before it had all its settings
                self.study.tell(trial.number, state=TrialState.FAIL)
        while len(self.study.trials) < num_trials:
            new = self.study.ask(self.space)
            yield from self._begin(new.number, new.params)

    def _begin(self, trial: int, settings: dict[str, Any]) -> list[Job]:
        try:
            jobs = self.make_jobs(f"trial{trial}", settings)
        except (FlagError, SystemExit) as error:
            self.study.tell(trial, state=TrialState.FAIL)
            why = error if isinstance(error, FlagError) else "see above"  # by argparse
            log.warning("Trial %d, with %s, can't be run: %s", trial, settings, why)
            return []
        self._open[trial] = dict.fromkeys(jobs)
        return jobs

    def all_failed(self) -> bool:
        return {trial.state for trial in self.study.trials} == {TrialState.FAIL}

    def ended(self, job: Job, status: int) -> None:
        """Notes the end of a run; after the last one of a trial, tells the study."""
        trial, jobs = next(pair for pair in self._open.items() if job in pair[1])
        jobs[job] = status
        statuses = set(jobs.values())
        # In progress, or to be resumed. A killed run may have had its result already.
        if statuses & {None, *STOPPED, -signal.SIGKILL}:
            return
        returns = [None if any(statuses) else final_return(job.folder) for job in jobs]
        known = [x for x in returns if x is not None]
        if len(known) < len(returns):
            self.study.tell(trial, state=TrialState.FAIL)
            log.warning("Trial %d: a run has failed, or has no return.", trial)
            return
        told = self.study.tell(trial, statistics.fmean(known))
        best = self.study.best_trial
        log.info(
            "Trial %d reached %.2f with %s. The best is trial %d with %.2f.",
            *(trial, told.value, told.params, best.number, best.value),
        )
