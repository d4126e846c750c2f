"""What a start of a run begins with: its folder, its checkpoint and its flags.

The folder is locked first, so that no process saves between the reading of the
checkpoint and the start. Then each flag takes the first of these values that exists:
typed, saved in the checkpoint, of the preset, the default. What was left open in the
checkpoint's run, such as the number of threads, is found anew on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torchbeast.core import checkpoint, devices
from torchbeast.core import flags as flags_lib
from torchbeast.core.file_writer import (
    RunExistsError,
    RunFolder,
    has_content,
    read_meta,
)
from torchbeast.core.flags import FlagError, Flags

log = logging.getLogger(__name__)


class Beginning(NamedTuple):
    """What a start of a run begins with.

    Attributes:
      flags: resolved and frozen.
      folder: of the run, locked.
      saved: the checkpoint to go on from, or None.
      left_open: flags not given; they follow from the machine and others.
      anew: the run died before its first checkpoint; what it logged is cut.
      notes: what to log of all this.
    """

    flags: Flags
    folder: RunFolder
    saved: dict[str, Any] | None
    left_open: list[str]
    anew: bool
    notes: list[str]

    def is_finished(self) -> bool:
        """Whether nothing is left to learn; says so in the log."""
        step = self.saved["stats"]["step"] if self.saved else 0
        if step < self.flags.total_steps:
            return False
        log.info(
            "The run %s is at step %d of --total_steps %d already: there is nothing to "
            "do. To go on, give a larger --total_steps.",
            *(self.flags.xpid, step, self.flags.total_steps),
        )
        return True


@contextlib.contextmanager
def begin(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    resolve_layout: Callable[[Flags], Flags],
) -> Iterator[Beginning]:
    """Locks the run's folder, reads its checkpoint, if any, and makes the flags.

    Args:
      resolve_layout: fills in the flags that only one variant has, and checks them.

    Raises:
      CheckpointError: the checkpoint can't be read.
      FlagError: a flag can't work, or not with this checkpoint.
      RunExistsError: the run was started before and can't go on.
    """
    flags = flags_lib.parse(parser, argv)
    flags_lib.resolve_folder(flags)
    with RunFolder(flags.savedir, flags.xpid) as folder:
        yield _begin(parser, argv, folder, resolve_layout)


def _begin(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    folder: RunFolder,
    resolve_layout: Callable[[Flags], Flags],
) -> Beginning:
    flags = flags_lib.parse(parser, argv)
    saved, anew = None, False
    notes: list[str] = []
    path = folder.path / "model.tar"
    if not flags.disable_checkpoint and path.exists():
        saved = checkpoint.load(path)
        checkpoint.check(saved, path)
        flags = merge(parser, argv, saved, notes)
        if flags.sync:
            check_sync(flags, saved)
    elif has_content(folder.path / "logs.csv"):
        check_new_start(folder, flags)
        anew = True
    flags.savedir, flags.xpid = str(folder.path.parent), folder.path.name
    before = flags.as_dict()
    flags = resolve_layout(flags_lib.resolve(flags))
    left_open = set(flags_lib.left_open(before, flags))
    if saved:
        if flags.sync:
            left_open |= set(saved.get("flags_left_open", ())) - flags.typed
        notes += describe(flags, saved["flags"])
    return Beginning(flags.freeze(), folder, saved, sorted(left_open), anew, notes)


def merge(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    saved: dict[str, Any],
    notes: list[str],
) -> Flags:
    """The flags to go on with, not resolved yet."""
    flags = flags_lib.parse(parser, argv, saved["flags"])
    if flags.sync:
        return (
            flags  # also threads and precision stay: they change how sums are rounded
        )
    # The buffers were enough for what was, even if somebody typed their number.
    outdated = set(saved.get("flags_left_open", ()))
    if flags.typed & {"num_actors", "envs_per_actor", "batch_size"}:
        outdated.add("num_buffers")
    for name, find in (
        ("learner_device", devices.learner_device),
        ("actor_device", devices.actor_device),
    ):
        if saved["flags"].get(name) and name not in flags.typed:
            try:
                find(flags)
            except FlagError as error:
                notes.append(f"Another device is used: {error}.")
                outdated.add(name)
    kept = {k: v for k, v in saved["flags"].items() if k not in outdated}
    return flags_lib.parse(parser, argv, kept)


def check_new_start(folder: RunFolder, flags: Flags) -> None:
    """Refuses to begin a run anew that only lacks a checkpoint.

    Raises:
      RunExistsError: it has logged something, and did not die before its first
        checkpoint.
    """
    previous = checkpoint.previous_path(folder.path / "model.tar")
    meta = read_meta(folder.path)
    if flags.disable_checkpoint:
        why = "With --disable_checkpoint it can't go on"
    elif previous.exists():
        command = shlex.join(["cp", str(previous), str(folder.path / "model.tar")])
        why = f"Its model.tar is missing. To go on from {previous.name}: {command}"
    elif meta.get("successful") or meta.get("args", {}).get("disable_checkpoint"):
        why = "It has no checkpoint to go on from"
    else:
        return
    raise RunExistsError(
        f"the run {flags.xpid} was started before, in {folder.path}. {why}. Choose "
        "another --xpid, or remove the folder"
    )


def check_sync(flags: Flags, saved: dict[str, Any]) -> None:
    """Raises FlagError if a run with --sync can't go on exactly where it was."""
    actors = saved.get("actors")
    if not actors:
        raise FlagError(
            f"--sync goes on with the games in progress, but the checkpoint of "
            f"{flags.xpid} was saved without --sync and has none: leave out --sync, or "
            "choose another --xpid"
        )
    changes = flags_lib.changed(saved["flags"], flags, flags_lib.FREE_TO_CHANGE_IN_SYNC)
    typed = {
        name: change
        for name, change in changes.items()
        if name in flags.typed and name in saved["flags"]
    }
    if typed:
        raise FlagError(
            "a run with --sync goes on exactly where it was, with the same games and "
            f"the same order of updates: {flags_lib.describe_changes(typed)} is not "
            "possible. Leave these flags out, choose another --xpid, or go on without "
            "that promise: --no-sync"
        )


def describe(flags: Flags, saved: dict[str, Any]) -> list[str]:
    """What is other than it was saved, a line for each kind of reason."""
    now = flags.as_dict()
    changes = flags_lib.changed(saved, flags, flags_lib.OF_ONE_START)
    typed = {name: x for name, x in changes.items() if name in flags.typed}
    gone = {name: x for name, x in changes.items() if name not in now}
    new = {name: x for name, x in changes.items() if name not in saved}
    notes = []
    if typed:
        notes.append(f"Changed by hand: {flags_lib.describe_changes(typed)}.")
    dropped = [f"--{name} {x}" for name, (x, _) in gone.items() if x is not None]
    if dropped:
        notes.append(f"Dropped, because these flags don't exist: {', '.join(dropped)}.")
    added = [f"--{name} {x}" for name, (_, x) in new.items() if name not in typed]
    if added:
        notes.append(f"Not in the checkpoint, so by default: {', '.join(added)}.")
    rest = {k: x for k, x in changes.items() if k not in {*typed, *gone, *new}}
    if rest:
        notes.append(
            "Found anew on this machine: " + flags_lib.describe_changes(rest) + "."
        )
    return notes


def announce_environment(flags: Flags, saved: dict[str, Any] | None) -> None:
    """Says which module will be imported because a checkpoint names it.

    Raises:
      FlagError: --no-trust_checkpoint_env refuses it.
    """
    named = (saved or {}).get("flags", {}).get("env")
    if "env" in flags.typed or flags.env != named or ":" not in flags.env:
        return
    module = flags.env.partition(":")[0]
    if not flags.trust_checkpoint_env:
        raise FlagError(
            f"the checkpoint names --env {flags.env}, and --no-trust_checkpoint_env "
            f"refuses to import the module {module} for it. If you trust it, type "
            f"--env {flags.env}"
        )
    log.warning(
        "The checkpoint names --env %s: the module %s will be imported and its code "
        "run. To refuse that, give --no-trust_checkpoint_env.",
        *(flags.env, module),
    )
