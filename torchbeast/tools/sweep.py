"""Trains with several seeds and settings: as processes here, or as a Slurm array.

    python -m torchbeast.sweep --jobs 2 --seeds 1-3 --grid learning_rate=0.0003,0.001 \
        -- monobeast --preset minatar --total_steps 1000000

After `--` comes a command of monobeast or polybeast. Each run is a process of its own,
named by what differs: sweep-learning_rate=0.001-3 has seed 3. With --search, Optuna
chooses the values.

The same command again skips finished runs and resumes the others.
"""

import argparse
import contextlib
import logging
import pathlib
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torchbeast.base.errors import FlagError, UserError, needing
from torchbeast.flags import Flags
from torchbeast.procs import children
from torchbeast.runs import flagset, start
from torchbeast.runs.files import RunFolder, read_meta
from torchbeast.tools import grid, jobs, variants
from torchbeast.tools.jobs import Job

log = logging.getLogger(__name__)


class Sweep:
    """The command that all runs share. Raises FlagError.

    Args:
      name: the first part of the runs' names.
      command: a variant and its flags.
    """

    def __init__(self, name: str, command: Sequence[str], seeds: Sequence[int]) -> None:
        self.name, self.seeds = name, seeds
        self.variant, *self.words = command
        self.module = f"torchbeast.{self.variant}"
        self.script = variants.load(self.variant)
        self.parser = self.script.make_parser()
        typed = flagset.read(self.parser, self.words)
        if typed.here.keys() & {"seed", "xpid"}:  # those of --config are replaced
            raise FlagError("give --seeds and --name in place of --seed and --xpid")
        flags = flagset.merge(typed)
        self.savedir = pathlib.Path(flags.savedir).expanduser().absolute()

    def make_jobs(self, label: str, settings: dict[str, Any]) -> list[Job]:
        """The runs with these values of flags, one per seed; their flags are checked.

        Raises:
          FlagError: a flag is not allowed.
          UserError: such a run was started with other flags.
        """
        words = [*self.words]
        for name, value in settings.items():
            switch = {"true": f"--{name}", "false": f"--no-{name}"}
            words.append(switch.get(value, f"--{name}={value}"))
        found = []
        for seed in self.seeds:
            xpid = "-".join(filter(None, [self.name, label, str(seed)]))
            own = [f"--savedir={self.savedir}", f"--xpid={xpid}", f"--seed={seed}"]
            command = (sys.executable, "-m", self.module, *words, *own)
            found.append(Job(xpid, self.savedir / xpid, command))
            self._check(found[-1])
        return found

    def flags(self, job: Job) -> Flags:
        return flagset.parse(self.parser, job.command[3:])

    def _check(self, job: Job) -> None:
        flags, meta = self.flags(job), read_meta(job.folder)
        saved, free = meta.get("args", {}), {*flagset.FREE_TO_CHANGE, "total_steps"}
        free |= set(meta.get("flags_left_open", ()))
        changes = flagset.changed(saved, flags, free)
        both = saved.keys() & flags.as_dict().keys()  # flags can be newer, or be gone
        if changes := {name: x for name, x in changes.items() if name in both}:
            raise UserError(
                f"{job.folder} has a run with other flags "
                f"({flagset.describe_changes(changes)}). Give another --name"
            )
        self.script.resolve_layout(flagset.resolve(flags))

    def is_finished(self, job: Job) -> bool:
        meta = read_meta(job.folder)
        last_step = meta.get("last_step") or 0
        return bool(meta.get("successful")) and last_step >= self.flags(job).total_steps


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchbeast.sweep",
        usage="%(prog)s [options] -- {monobeast,polybeast} [flags of all runs]",
        description="Trains with several seeds and settings.",
    )
    add = parser.add_argument
    setting: dict[str, Any] = {"action": "append", "type": grid.setting, "default": []}
    seeds: dict[str, Any] = {"type": grid.seed_list, "default": [1], "metavar": "1-3,7"}
    grid_help = "values of a flag; several --grid give all combinations"
    cores_help = "CPU cores per run (here all divided by --jobs, with Slurm 2)"
    add("--name", default="sweep", help="begins the runs' names (sweep)")
    add("--seeds", **seeds, help="each setting is trained with each seed (1)")
    add("--grid", **setting, metavar="FLAG=VALUE,VALUE", help=grid_help)
    add("--jobs", type=grid.positive, help="runs at a time (here 1, with Slurm all)")
    add("--cores", type=grid.positive, help=cores_help)
    search_help = "Optuna chooses: uniform:LOW:HIGH, loguniform, int or choice:A:B:..."
    add("--search", **setting, metavar="FLAG=KIND:VALUES", help=search_help)
    add("--trials", type=grid.positive, default=20, help="of a search in all (20)")
    submit_help = "as an array through submitit; local: its processes on this machine"
    add("--submit", choices=["slurm", "local"], help=submit_help)
    add("--minutes", type=grid.positive, default=1440, help="limit of a Slurm job")
    sbatch_help = "an option of sbatch, such as partition=gpu or gres=gpu:1"
    add("--sbatch", **setting, metavar="OPTION=VALUE", help=sbatch_help)
    return parser


def run_sweep(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Returns the exit status: 0 all runs finished, 1 some failed, 128 + n signal n.

    Raises:
      FlagError: a flag has a value that is not allowed; nothing was started.
    """
    sweep = Sweep(options.name, command, options.seeds)
    varied = dict(options.grid + options.search).keys()
    if unknown := varied - sweep.parser.declared.keys():
        raise FlagError(f"{sweep.variant} has no flag --{min(unknown)}")
    statuses: dict[Job, int] = {}
    with contextlib.closing(RunFolder(str(sweep.savedir), sweep.name)) as own:
        folder = own.path  # for the files of the sweep itself
        search = None
        if options.search:
            with needing("--search", "optuna"):
                from torchbeast.tools.search import Search
            shared = [sweep.variant, *sweep.words, f"--seeds {sweep.seeds}"]
            path = folder / "study.db"
            search = Search(path, options.search, shared, sweep.make_jobs)
        planned = search.jobs(options.trials) if search else make_grid(sweep, options)

        def ended(job: Job, status: int) -> None:
            statuses[job] = status
            how = f"ended {children.how_it_ended(status)}" if status else "finished"
            log.info("%s %s.", job.xpid, how)
            if search:
                search.ended(job, status)

        def unfinished() -> Iterator[Job]:
            for job in planned:
                if sweep.is_finished(job):
                    ended(job, 0)
                else:
                    yield job

        if options.submit:
            with needing("--submit", "submitit"):
                from torchbeast.tools import slurm_jobs
            stopped_by = slurm_jobs.submit(options, list(unfinished()), folder, ended)
        else:
            cores = jobs.split_cores(options.jobs or 1, options.cores)
            stopped_by = jobs.run_here(unfinished(), cores, ended)
    failed = [x for x, status in statuses.items() if status not in {0, *jobs.STOPPED}]
    for job in failed:
        how = children.how_it_ended(statuses[job])
        log.error("%s ended %s. %s:\n%s", job.xpid, how, job.console, job.tail())
    finished = sum(status == 0 for status in statuses.values())
    table = shlex.join(["--savedir", str(sweep.savedir), "--group", f"{sweep.name}-*"])
    log.info("Finished: %d runs. python -m torchbeast.report %s", finished, table)
    if stopped_by:
        log.warning("Give the same command again to continue with the other runs.")
    if failed:
        names = ", ".join(job.xpid for job in failed)
        log.error("Failed: %d of %d runs: %s", len(failed), len(statuses), names)
    if lost := search is not None and search.all_failed():
        log.error("Failed: all trials.")
    return 128 + stopped_by if stopped_by else int(lost or finished < len(statuses))


def make_grid(sweep: Sweep, options: argparse.Namespace) -> list[Job]:
    """All runs of a grid, checked. Raises FlagError, also if two have one name."""
    found = [job for each in grid.grid(options.grid) for job in sweep.make_jobs(*each)]
    name, count = Counter(job.xpid for job in found).most_common(1)[0]
    if count > 1:
        raise FlagError(f"two runs of the grid would be named {name}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status, see run_sweep."""
    words = list(sys.argv[1:] if argv is None else argv)
    own = words[: words.index("--")] if "--" in words else words
    parser = make_parser()
    options = parser.parse_args(own)
    command = words[len(own) + 1 :]
    if not command or command[0] not in variants.VARIANTS:
        parser.error(f"after -- comes {' or '.join(variants.VARIANTS)}, with its flags")
    if options.search and (options.grid or options.submit):
        parser.error("--search goes neither with --grid nor with --submit")
    names = [name for name, _ in options.grid + options.search]
    if twice := [name for name in names if names.count(name) > 1]:
        parser.error(f"{twice[0]} is given twice: give all its values in one")
    return start.guarded(lambda: run_sweep(options, command))
