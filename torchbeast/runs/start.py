"""From a command line to the start of a run: its folder, checkpoint and flags.

flagset.py says which value each flag gets. Flags that the user left open in the saved
run, such as the number of threads, are chosen again for this machine.

Importing this module does not load torch, because environment servers use it too.
"""

import contextlib
import functools
import logging
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchbeast.base import errors, parts, ranks
from torchbeast.base.errors import FlagError
from torchbeast.base.flag import FlagParser
from torchbeast.base.seeds import derive_seed
from torchbeast.flags import Flags
from torchbeast.procs import processes
from torchbeast.runs import flagset, trust
from torchbeast.runs.files import RunFolder, read_meta, read_rows

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

        After kill -9 the final evaluation or the end of meta.json may be missing.
        """
        flags, path = self.flags, self.folder.path
        step = self.saved["stats"]["step"] if self.saved else 0
        if step < flags.total_steps or not read_meta(path).get("successful"):
            return False
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

    def begin_and_train() -> int:
        typed = flagset.read(parser, argv)
        flags = flagset.merge(typed)
        if flags.mode != "train":
            test(typed)
            return 0
        begun = functools.partial(begin, typed, resolve_layout)
        with ranks.together(flags), ranks.begun(begun) as start:
            return 0 if ranks.of_first(start.is_finished) else train(start)

    return guarded(begin_and_train)


@contextlib.contextmanager
def begin(
    typed: flagset.Typed, resolve_layout: Callable[[Flags], Flags]
) -> Iterator[Start]:
    """Locks the run's folder, reads the checkpoint, if any, and resolves the flags.

    A run that was killed before its first checkpoint starts over, with its flags.

    Args:
      resolve_layout: fills in the flags that only one variant has, and checks them.

    Raises:
      CheckpointError: the checkpoint can't be read.
      FlagError: a flag has a value that is not allowed, or not with this checkpoint;
        or the run was started before and can't be resumed.
    """
    from torchbeast.runs import checkpoint

    flags = flagset.merge(typed)
    if flags.suppress_logs:
        print_warnings_only()
    flagset.resolve_folder(flags)
    xpid, saved, notes = flags.xpid, None, []
    with contextlib.closing(RunFolder(flags.savedir, xpid)) as folder:
        path, before = folder.path / "model.tar", None
        if not flags.disable_checkpoint:
            if path.exists():
                saved = checkpoint.load(path)
                flags = merge_saved(typed, saved, path)
            step = saved["stats"]["step"] if saved else None
            if any(parts.call("fetch", flags, folder.path, step)):
                saved = checkpoint.load(path)
                flags = merge_saved(typed, saved, path)
        start_over = not saved and any(read_rows(folder.path))
        if saved:
            before = saved["flags"]
            notes = [f"Resuming at step {saved['stats']['step']}."]
            check_changes(flags, saved)
        elif start_over:
            meta = check_new_start(folder, flags)
            before = meta["flags"]
            flags = merge_saved(typed, meta, folder.path / "meta.json")
            notes = ["The run died before its first checkpoint: it starts over."]
        flags.savedir, flags.xpid = str(folder.path.parent), folder.path.name
        merged = flags.as_dict()
        flags = resolve_layout(flagset.resolve(flags))
        filled_in = set(flagset.left_open(merged, flags))
        if saved and flags.sync:
            filled_in |= set(saved.get("flags_left_open", ())) - flags.typed
        if before and (changes := flagset.changed(before, flags, flagset.OF_ONE_START)):
            notes.append(f"Changed flags: {flagset.describe_changes(changes)}.")
        yield Start(flags.freeze(), folder, saved, sorted(filled_in), start_over, notes)


def merge_saved(typed: flagset.Typed, saved: dict[str, Any], path: Path) -> Flags:
    """The flags of a resumed run, not resolved yet.

    Args:
      saved: a checkpoint, or a meta.json with its args as flags.

    Raises:
      UntrustedError: it names code or files, and nobody typed that.
    """
    signed = trust.is_signed(saved["flags"], saved.get("flags_signature"))
    given = typed.in_file | typed.here
    if (learners := saved.get("ranks", 1)) != ranks.size():
        from torchbeast.extras.ranks import several  # optional

        several.share_out(saved["flags"], learners, set(typed.here))
    outdated: set[str] = set()
    if saved["flags"].get("envs_per_actor") is None:  # of polybeast_learner
        outdated.add("envs_per_actor")
    if not given.get("sync", saved["flags"].get("sync")):
        # With --sync, threads and precision stay, too: they change rounding.
        outdated |= set(saved.get("flags_left_open", ()))
        # Even a typed number of buffers was chosen for the old layout.
        if given.keys() & {"num_actors", "envs_per_actor", "batch_size"}:
            outdated.add("num_buffers")
    kept = {k: v for k, v in saved["flags"].items() if k not in outdated}
    return flagset.merge(typed, kept, signed, str(path))


def check_new_start(folder: RunFolder, flags: Flags) -> dict[str, Any]:
    """The meta.json of a run that died before its first checkpoint.

    Raises:
      FlagError: it was another kind of run, which would be lost.
    """
    from torchbeast.runs import checkpoint

    path, meta = folder.path / "model.tar", read_meta(folder.path)
    args = meta.get("args", {"disable_checkpoint": True})
    ended = meta.get("successful") or args.get("disable_checkpoint")
    lost = checkpoint.previous_path(path).exists()
    if not (ended or lost or flags.disable_checkpoint):
        return {**meta, "flags": dict(args)}
    raise FlagError(
        f"the run {flags.xpid} was started before, in {folder.path}, and there is no "
        f"{path.name} to resume from, or --disable_checkpoint forbids it. "
        f"{checkpoint.way_back(path)}. Or choose another --xpid, or remove the folder"
    )


def announce(start: Start) -> None:
    """Logs how the run starts."""
    kind = "Run" if start.saved or start.start_over else "New run"
    log.info("%s %s in %s", kind, start.flags.xpid, start.folder.path)
    for note in start.notes:
        log.info("%s", note)


def check_changes(flags: Flags, saved: dict[str, Any]) -> None:
    """Raises FlagError for typed flags that this checkpoint can't be resumed with."""
    fixed = flagset.changed(saved["flags"], flags, flagset.FREE_TO_CHANGE_IN_SYNC)
    typed = flags.typed & fixed.keys() & saved["flags"].keys()
    if flags.init_from and "init_from" in typed:
        raise FlagError(
            f"--init_from {flags.init_from} would have no effect: the run {flags.xpid} "
            f"exists, and goes on with its weights of step {saved['stats']['step']}. "
            "Choose another --xpid for a new run, or leave out --init_from"
        )
    if flags.sync and not saved.get("actors"):
        raise FlagError(
            "--sync resumes the games in progress, but the checkpoint of "
            f"{flags.xpid} was saved without --sync and has none. Leave out --sync, or "
            "choose another --xpid"
        )
    if flags.sync and typed:
        changes = flagset.describe_changes(
            {name: fixed[name] for name in sorted(typed)}
        )
        raise FlagError(
            "a run with --sync resumes exactly, with the same games and the same order "
            f"of updates, so it can't change {changes}. Leave these flags out, choose "
            "another --xpid, or give --no-sync"
        )


def check_games_can_be_saved(flags: Flags, exact_resume: bool) -> None:
    """Raises FlagError if --sync shall save games, and the environment can't."""
    if flags.sync and not flags.disable_checkpoint and not exact_resume:
        raise FlagError(
            "--sync saves the games in progress, but native vector environments can't "
            "do that: add --disable_checkpoint, or for Atari --atari_backend python"
        )


# --- Around a script


def configure_logging() -> None:
    logging.basicConfig(
        level=logging.INFO, format="[%(levelname)s %(asctime)s %(name)s] %(message)s"
    )
    logging.getLogger("torchbeast").setLevel(logging.INFO)  # whoever was first


def print_warnings_only() -> None:
    """For --suppress_logs: out.log still gets all lines."""
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.WARNING)


def guarded(work: Callable[[], int]) -> int:
    """The main function of a script. Returns the exit status.

    Configures logging. An exception in `work` is logged and gives the exit status.
    """
    processes.keep_streams_open()
    configure_logging()
    levels = [(x, x.level) for x in logging.getLogger().handlers]
    if not processes.in_main_thread():
        log.warning(
            "This is not the main thread, and only there Python handles signals: "
            "Ctrl-C and SIGTERM neither stop the run nor save it."
        )
    with processes.raise_on_stop_signals():
        try:
            if getattr(multiprocessing.current_process(), "_inheriting", False):
                raise errors.UserError(
                    "a child process imports your script, which calls main() again: "
                    "put the call under `if __name__ == '__main__':`"
                )
            return work()
        except (Exception, KeyboardInterrupt) as error:
            return errors.report(error)
        finally:
            for handler, level in levels:  # print_warnings_only may have changed it
                handler.setLevel(level)
