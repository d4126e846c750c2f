"""How a run starts: its folder, its checkpoint and its flags.

`begin` first locks the folder, so that no other process writes a checkpoint meanwhile.
flagset.py says which value each flag gets. Flags that the user left open in the saved
run, such as the number of threads, are chosen again for this machine.
"""

import contextlib
import difflib
import logging
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torchbeast.base import devices, ranks
from torchbeast.base.errors import FlagError
from torchbeast.base.flag import FlagParser
from torchbeast.base.seeds import derive_seed
from torchbeast.envs.atari import atari_game
from torchbeast.extras import mirror, order
from torchbeast.flags import Atari, Flags
from torchbeast.procs import processes
from torchbeast.runs import checkpoint, flagset, script, trust
from torchbeast.runs.folder import RunFolder
from torchbeast.runs.logs_csv import read_rows
from torchbeast.runs.meta import complete_meta, read_meta
from torchbeast.tools import autotune

log = logging.getLogger(__name__)


class Start(NamedTuple):
    """What a run starts from.

    Attributes:
      flags: resolved and frozen.
      folder: of the run, locked.
      saved: the checkpoint to resume from, or None.
      left_open: flags that were filled in from the machine or from other flags.
      start_over: the run died before its first checkpoint.
      notes: lines for the log.
    """

    flags: Flags
    folder: RunFolder
    saved: dict[str, Any] | None
    left_open: list[str]
    start_over: bool
    notes: list[str]

    def env_seed(self) -> int:
        """The seed of the environments: another one after a resume, for new games.

        With --sync the games in progress go on, see `games`.
        """
        if self.saved is None or self.flags.sync:
            return self.flags.seed
        return derive_seed(self.flags.seed, self.saved["stats"]["step"])

    def games(self) -> list[Any] | None:
        """The saved states of the actors, with their games in progress; see --sync."""
        if not (self.saved and self.flags.sync):
            return None
        games, A = self.saved["actors"], self.flags.num_actors
        if len(games) != A * ranks.size():
            raise FlagError(
                f"--sync goes on with the games of {len(games)} actors, and "
                f"{ranks.size()} learners of --num_actors {A} have another number"
            )
        return games[ranks.rank() * A :][:A]

    def is_finished(self) -> bool:
        """Whether nothing is left to do; if so, logs it.

        The checkpoint is at --total_steps, and the final weights are evaluated or need
        no evaluation. If only the end of meta.json is missing, as after kill -9, writes
        it.
        """
        flags, path = self.flags, self.folder.path
        step = self.saved["stats"]["step"] if self.saved else 0
        if step < flags.total_steps:
            return False
        if not read_meta(path).get("successful"):
            if flags.eval_interval and not any(
                row.get("eval_step") == str(step) for row in read_rows(path)
            ):
                log.info("What is left is the evaluation of the final weights.")
                return False
            complete_meta(path, step)
        if flags.mirror:
            mirror.Mirror(flags.mirror, path).close(0, mirror.COMPLETE_SECONDS)
        log.info(
            "The run %s is at step %d of --total_steps %d already. To continue it, "
            "raise --total_steps.",
            *(flags.xpid, step, flags.total_steps),
        )
        return True


def run_script(
    parser: FlagParser,
    argv: Sequence[str] | None,
    resolve_layout: Callable[[Flags], Flags],
    train: Callable[[Start], int],
    test: Callable[[flagset.Typed], None],
) -> int:
    """The main function of a script that trains, or tests with --mode test.

    `train` returns the exit status, and so does this. For resolve_layout see begin.
    """

    def run() -> int:
        typed = flagset.read(parser, argv)
        flags = flagset.merge(typed)
        if "autotune" in typed.declared and flags.autotune:
            return autotune.main(typed, resolve_layout)
        if flags.mode != "train":
            test(typed)
            return 0
        for part in order.parts(typed):  # one, but for --repeat
            stops = processes.raise_on_stop_signals()  # a Run ignores them at its end
            with (
                stops,
                ranks.together(flags),
                begin_all(part, resolve_layout) as start,
            ):
                done = ranks.of_first(start.is_finished)
                if not done and (status := train(start)):
                    return status
        return 0

    return script.run(run)


@contextlib.contextmanager
def begin_all(
    typed: flagset.Typed, resolve_layout: Callable[[Flags], Flags]
) -> Iterator[Start]:
    """`begin` in rank 0, see extras/ranks.py; all ranks start from what it has found.

    The others write their files into folders that are removed at the end.
    """
    with contextlib.ExitStack() as stack:
        start: Any = None

        def first() -> Any:
            nonlocal start
            start = stack.enter_context(begin(typed, resolve_layout))
            return start._replace(folder=None)  # its lock stays here

        found = ranks.of_first(first)
        if start is None:
            script.print_warnings_only()
            savedir = stack.enter_context(tempfile.TemporaryDirectory())
            flags = found.flags.replace(savedir=savedir, **flagset.LEARNING_ONLY)
            folder = RunFolder(savedir, flags.xpid)
            stack.callback(folder.close)
            start = found._replace(flags=flags, folder=folder)
        yield start


@contextlib.contextmanager
def begin(
    typed: flagset.Typed, resolve_layout: Callable[[Flags], Flags]
) -> Iterator[Start]:
    """Locks the run's folder, reads the checkpoint, if any, and resolves the flags.

    Args:
      resolve_layout: fills in the flags that only one variant has, and checks them.

    Raises:
      CheckpointError: the checkpoint can't be read.
      FlagError: a flag has a value that is not allowed, or not with this checkpoint;
        or the run was started before and can't be resumed.
    """
    flags = flagset.merge(typed)
    if flags.suppress_logs:
        script.print_warnings_only()
    flagset.resolve_folder(flags)
    saved, start_over = None, False
    notes: list[str] = []
    with contextlib.closing(RunFolder(flags.savedir, flags.xpid)) as folder:
        path = folder.path / "model.tar"

        def load() -> tuple[dict[str, Any], Flags]:
            saved = checkpoint.load(path)
            checkpoint.check(saved, path)
            return saved, merge(typed, saved, path, notes)

        if not flags.disable_checkpoint:
            saved, flags = load() if path.exists() else (None, flags)
            step = saved["stats"]["step"] if saved else None
            if flags.mirror and mirror.fetch(flags.mirror, folder.path, step):
                notes.clear()
                saved, flags = load()
        if saved:
            if flags.sync:
                check_sync(flags, saved)
            check_init_from(flags, saved)
        elif any(read_rows(folder.path)):
            check_new_start(folder, flags)
            start_over = True
        flags.savedir, flags.xpid = str(folder.path.parent), folder.path.name
        before = flags.as_dict()
        flags = resolve_layout(flagset.resolve(flags))
        if ranks.size() > 1 and (flags.record or getattr(flags, "repeat", None)):
            raise FlagError("--record and --repeat need one learner, without torchrun")
        notes += notes_on_unused_flags(flags)
        left_open = set(flagset.left_open(before, flags))
        if saved:
            if flags.sync:
                left_open |= set(saved.get("flags_left_open", ())) - flags.typed
            notes += notes_on_changed_flags(flags, saved["flags"])
        yield Start(flags.freeze(), folder, saved, sorted(left_open), start_over, notes)


def merge(
    typed: flagset.Typed, saved: dict[str, Any], path: pathlib.Path, notes: list[str]
) -> Flags:
    """Returns the flags of a resumed run, not resolved yet.

    Raises:
      UntrustedError: the checkpoint names code or files, and nobody typed it.
    """
    signed = trust.is_signed(saved["flags"], saved.get("flags_signature"))
    if (learners := saved.get("ranks", 1)) != ranks.size():
        share_out(saved["flags"], learners, set(typed.here))
    # Nothing is used yet: outdated values, such as addresses, need no trust.
    flags = flagset.merge(typed, saved["flags"], signed=True)
    outdated: set[str] = set()
    if saved["flags"].get("envs_per_actor") is None:  # of polybeast_learner
        outdated.add("envs_per_actor")
    if not flags.sync:  # which keeps threads and precision, too: they change rounding
        outdated |= set(saved.get("flags_left_open", ()))
        # Even a typed number of buffers was chosen for the old layout.
        if flags.typed & {"num_actors", "envs_per_actor", "batch_size"}:
            outdated.add("num_buffers")
        for find in (devices.learner_device, devices.actor_device):
            name = find.__name__
            if saved["flags"].get(name) and name not in flags.typed:
                try:
                    find(flags)
                except FlagError as error:
                    notes.append(f"Using another device: {error}.")
                    outdated.add(name)
    kept = {k: v for k, v in saved["flags"].items() if k not in outdated}
    return flagset.merge(typed, kept, signed, str(path))


def share_out(saved: dict[str, Any], learners: int, typed: set[str]) -> None:
    """Changes the flags so that all ranks together act and learn as `learners` did.

    Raises:
      FlagError: they can't share something equally, and it was not typed.
    """
    for name in ("num_actors", "batch_size"):
        if saved.get(name) is None:
            continue
        own, left = divmod(saved[name] * learners, ranks.size())
        if left and name not in typed:
            raise FlagError(
                f"{ranks.size()} learners can't share the --{name} of {learners} "
                f"equally, which was {saved[name]} each: give --{name}"
            )
        saved[name] = max(1, own)
    for name in {"num_buffers", "max_learner_queue_size"} & saved.keys():
        saved[name] = None  # chosen again


def check_new_start(folder: RunFolder, flags: Flags) -> None:
    """Raises FlagError unless the run died before its first checkpoint."""
    path, meta = folder.path / "model.tar", read_meta(folder.path)
    if flags.disable_checkpoint:
        why = "With --disable_checkpoint it can't be resumed."
    elif checkpoint.previous_path(path).exists():
        why = f"Its model.tar is missing. {checkpoint.way_back(path)}"
    elif meta.get("successful") or meta.get("args", {}).get("disable_checkpoint"):
        why = "It has no checkpoint to resume from."
    else:
        return
    raise FlagError(
        f"the run {flags.xpid} was started before, in {folder.path}. {why} Or "
        "choose another --xpid, or remove the folder"
    )


def check_init_from(flags: Flags, saved: dict[str, Any]) -> None:
    """Raises FlagError if other weights are typed than those that the run began with.

    The run's own command can be given again.
    """
    if flags.init_from not in (None, saved["flags"].get("init_from")):
        raise FlagError(
            f"--init_from {flags.init_from} would have no effect: the run {flags.xpid} "
            f"exists, and goes on with its weights of step {saved['stats']['step']}. "
            "Choose another --xpid for a new run, or leave out --init_from"
        )


def new_run_warning(start: Start) -> str | None:
    """A warning if a new run was possibly meant to be the resume of another one."""
    flags, path = start.flags, start.folder.path
    if "xpid" not in flags.typed or flags.typed & {"env", "preset", "config"}:
        return None
    others = [x.parent.name for x in path.parent.glob("*/logs.csv") if x.parent != path]
    similar = difflib.get_close_matches(path.name, sorted({*others} - {"latest"}))
    if similar or flags.typed <= {"xpid", "savedir"}:
        return (
            f"There was no run {path.name} in {path.parent}, so this one is new, and "
            f"learns the default --env {flags.env} from step 0. Similar names: "
            f"{', '.join(similar) or 'none'}."
        )
    return None


def announce(start: Start) -> None:
    """Logs how the run starts."""
    is_new = start.saved is None and not start.start_over
    name, path = start.flags.xpid, start.folder.path
    log.info("%s %s in %s", "New run" if is_new else "Run", name, path)
    if is_new and (warning := new_run_warning(start)):
        log.warning("%s", warning)
    if start.saved:
        log.info("Resuming at step %d.", start.saved["stats"]["step"])
    elif start.start_over:
        log.warning("%s died before its first checkpoint: it starts over.", name)
    for note in start.notes:
        log.info("%s", note)


def check_sync(flags: Flags, saved: dict[str, Any]) -> None:
    """Raises FlagError if a run with --sync can't be resumed exactly."""
    actors = saved.get("actors")
    if not actors:
        raise FlagError(
            "--sync resumes the games in progress, but the checkpoint of "
            f"{flags.xpid} was saved without --sync and has none. Leave out --sync, or "
            "choose another --xpid"
        )
    changes = flagset.changed(saved["flags"], flags, flagset.FREE_TO_CHANGE_IN_SYNC)
    typed = {
        name: change
        for name, change in changes.items()
        if name in flags.typed and name in saved["flags"]
    }
    if typed:
        raise FlagError(
            "a run with --sync resumes exactly, with the same games and the same order "
            f"of updates, so it can't change {flagset.describe_changes(typed)}. "
            "Leave these flags out, choose another --xpid, or give --no-sync"
        )


def check_games_can_be_saved(flags: Flags, exact_resume: bool) -> None:
    """Raises FlagError if --sync shall save games, and the environment can't."""
    if flags.sync and not flags.disable_checkpoint and not exact_resume:
        raise FlagError(
            "--sync saves the games in progress, but native vector environments can't "
            "do that: add --disable_checkpoint, or for Atari --atari_backend python"
        )


def notes_on_changed_flags(flags: Flags, saved: dict[str, Any]) -> list[str]:
    """Describes the flags that differ from the saved ones, one line per reason."""
    now = flags.as_dict()
    reasons: dict[str, list[str]] = {}
    for name, (old, new) in flagset.changed(saved, flags, flagset.OF_ONE_START).items():
        if name in flags.typed:
            reason, change = "Changed flags", f"{old} -> {new}"
        elif name not in now:
            reason, change = "Dropped unknown flags", f"{old}"
        elif name not in saved:
            reason, change = "Default values, not in the checkpoint", f"{new}"
        else:
            reason, change = "Chosen again for this machine", f"{old} -> {new}"
        if name in now or old is not None:
            reasons.setdefault(reason, []).append(f"--{name} {change}")
    return [f"{reason}: {', '.join(x)}." for reason, x in reasons.items()]


def notes_on_unused_flags(flags: Flags) -> list[str]:
    """A note about typed flags of Atari, if the environment is another one."""
    if atari_game(flags.env):
        return []
    preset = flagset.preset_flags(flags.preset)
    typed = [
        f"--{name} {getattr(flags, name)}"
        for name, declared in sorted(Atari.declared().items())
        if name in flags.typed
        and getattr(flags, name) != preset.get(name, declared.default)
    ]
    note = (
        f"Without effect, because {flags.env} is not an Atari game: "
        f"{', '.join(typed)}. --env_kwargs passes arguments to an environment."
    )
    return [note] if typed else []
