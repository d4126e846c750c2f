"""From a command line to the start of a run: its folder, checkpoint and flags.

flagset.py says which value each flag gets. Flags that the user left open in the saved
run, such as the number of threads, are chosen again for this machine. Importing this
module does not load torch, because environment servers use it too.
"""

import contextlib
import functools
import logging
import multiprocessing
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchbeast.base import errors, parts, ranks
from torchbeast.base.errors import FlagError
from torchbeast.base.flag import FlagParser
from torchbeast.base.seeds import derive_seed
from torchbeast.flags import Flags
from torchbeast.procs import processes
from torchbeast.runs import flagset
from torchbeast.runs.files import RunFolder, read_meta, read_rows

log = logging.getLogger(__name__)


class Start(NamedTuple):
    """What a run starts from."""

    flags: Flags  # resolved and frozen
    folder: RunFolder  # locked
    saved: dict[str, Any] | None  # the checkpoint to resume from
    left_open: list[str]  # flags that were filled in from the machine or other flags
    note: str  # for the log

    def env_seed(self) -> int:
        """Another one after a resume, for new games; with --sync the old ones go on."""
        if self.saved is None or self.flags.sync:
            return self.flags.seed
        return derive_seed(self.flags.seed, self.saved["stats"]["step"])

    def games(self) -> list[Any] | None:
        """The saved states of the actors, with their games in progress; see --sync."""
        if not (self.saved and self.flags.sync):
            return None
        A = self.flags.num_actors
        return self.saved["actors"][ranks.rank() * A :][:A]

    def is_finished(self) -> bool:
        """Whether nothing is left to do, as it may be after kill -9; if so, logs it."""
        step = self.saved["stats"]["step"] if self.saved else 0
        total, meta = self.flags.total_steps, read_meta(self.folder.path)
        if is_finished := step >= total and bool(meta.get("successful")):
            log.info("The run is at step %d of --total_steps %d already.", step, total)
        return is_finished


def run_script(
    parser: FlagParser,
    argv: Sequence[str] | None,
    resolve_layout: Callable[[Flags], Flags],
    train: Callable[[Start], int],
    find_player: Callable[[Flags], Any] = lambda flags: None,
) -> int:
    """What a script does. Returns the exit status, as `train` does; see `begin`.

    find_player may return what plays the games of a test, see extras/play.
    """

    def begin_and_train() -> int:
        typed = flagset.read(parser, argv)
        flags = flagset.merge(typed)
        if flags.mode != "train":
            if not parts.call("test", typed, find_player):
                raise FlagError(f"--mode {flags.mode} needs extras/play, now deleted")
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

    resolve_layout fills in the flags that only one variant has, and checks them.
    """
    from torchbeast.base import devices
    from torchbeast.runs import checkpoint

    devices.check_defaults()
    flags = flagset.merge(typed)
    if flags.suppress_logs:
        print_warnings_only()
    # Random digits: a script may start several runs in a second.
    name = time.strftime("torchbeast-%Y%m%d-%H%M%S-") + secrets.token_hex(3)
    folder = RunFolder(flags.savedir, flags.xpid or name)
    with contextlib.closing(folder):
        path, place = folder.path, folder.path / "model.tar"
        saved: dict[str, Any] | None = None
        if not flags.disable_checkpoint:
            if place.exists():
                saved = checkpoint.load(place)
                flags = merge_saved(typed, saved, place)
            if any(parts.call("fetch", flags, path, saved and saved["stats"]["step"])):
                saved = checkpoint.load(place)
                flags = merge_saved(typed, saved, place)
        before, note = saved, f"Run {path.name} in {path}."
        if saved:
            check_changes(flags, saved)
            note += f" Resuming at step {saved['stats']['step']}."
        elif before := died_early(path, flags.disable_checkpoint):
            flags = merge_saved(typed, before, path / "meta.json")
            note += " It died before its first checkpoint, and starts over."
        else:
            note = f"New run {path.name} in {path}."
        flags.savedir, flags.xpid = str(path.parent), path.name
        merged = flags.as_dict()
        flags = resolve_layout(flagset.resolve(flags)).freeze()
        is_open = {k for k, x in merged.items() if x in (None, "auto")}
        left_open = {k for k in is_open if getattr(flags, k) != merged[k]}
        if saved and flags.sync:
            left_open |= set(saved.get("flags_left_open", ())) - flags.typed
        old = before["flags"] if before else flags.as_dict()
        if changes := flagset.changed(old, flags, flagset.OF_ONE_START):
            note += f" Changed flags: {flagset.describe_changes(changes)}."
        yield Start(flags, folder, saved, sorted(left_open), note)


def merge_saved(typed: flagset.Typed, saved: dict[str, Any], path: Path) -> Flags:
    """The flags of a run that resumes from a checkpoint, not resolved yet."""
    given, flags = typed.in_file | typed.here, saved["flags"]
    if (learners := saved.get("ranks", 1)) != ranks.size():
        from torchbeast.extras.ranks import several  # optional

        several.share_out(flags, learners, set(typed.here))
    outdated = set(saved.get("flags_left_open", ()))
    if given.keys() & {"num_actors", "envs_per_actor", "batch_size"}:
        outdated.add("num_buffers")  # even a typed one was chosen for the old layout
    if given.get("sync", flags.get("sync")):
        outdated = set()  # threads and precision stay, too: they change rounding
    return flagset.merge(typed, saved, str(path), outdated)


def died_early(folder: Path, disable_checkpoint: bool) -> dict[str, Any] | None:
    """The meta.json of a run that died before its first checkpoint; None: a new run."""
    from torchbeast.runs import checkpoint

    path, meta = folder / "model.tar", read_meta(folder)
    args = meta.get("args", {"disable_checkpoint": True})
    ended = meta.get("successful") or args.get("disable_checkpoint")
    if ended or disable_checkpoint or checkpoint.previous_path(path).exists():
        if not any(read_rows(folder)):
            return None  # a new run: nothing was learned
        raise FlagError(
            f"{folder} has a run, and there is no {path.name} to resume from, or "
            f"--disable_checkpoint forbids it. {checkpoint.way_back(path)}. Or choose "
            "another --xpid, or remove the folder"
        )
    return {**meta, "flags": args}


def check_changes(flags: Flags, saved: dict[str, Any]) -> None:
    """Raises FlagError for typed flags that this checkpoint can't be resumed with."""
    parts.call("resume", flags, saved)
    changes = flagset.changed(saved["flags"], flags, flagset.FREE_TO_CHANGE_IN_SYNC)
    typed = {k: changes[k] for k in changes if k in flags.typed & saved["flags"].keys()}
    if flags.sync and (typed or not saved.get("actors")):
        words = flagset.describe_changes(typed) or "its flags"
        raise FlagError(
            "--sync resumes exactly a run that was saved with --sync, and can't change "
            f"{words}. Choose another --xpid, or --no-sync"
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
    line = "[%(levelname)s %(asctime)s] %(message)s"  # out.log has date and module, too
    logging.basicConfig(level=logging.INFO, format=line, datefmt="%H:%M:%S")
    logging.getLogger("torchbeast").setLevel(logging.INFO)  # whoever was first


def print_warnings_only() -> None:
    """For --suppress_logs: out.log still gets all lines."""
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.WARNING)


def guarded(work: Callable[[], int]) -> int:
    """Logs an exception of a script's work. Returns the exit status."""
    processes.keep_streams_open()
    configure_logging()
    levels = [(x, x.level) for x in logging.getLogger().handlers]
    if not processes.in_main_thread():
        log.warning("This is not the main thread: Ctrl-C does not save the run.")
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
