"""From a command line to the start of a run: its flags, folder and checkpoint.

torchbeast/flags.py declares the flags. Each takes the first value that exists: from the
command line, from the file of --config, from the checkpoint that the run resumes from,
from the preset, the default. If the command line names another preset than the
checkpoint, that preset's flags count as typed. Flags that the user left open in the
saved run, such as the number of threads, are chosen again for this machine.

Importing this module does not load torch, because environment servers parse flags too.
"""

import contextlib
import difflib
import json
import logging
import math
import multiprocessing
import os
import pathlib
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from torchbeast.base import devices, errors, parts, ranks
from torchbeast.base.devices import fast_bf16, learner_device
from torchbeast.base.errors import FlagError, did_you_mean, using
from torchbeast.base.flag import FREE, START, TUNE, Flag, FlagParser
from torchbeast.base.hardware import num_cpus
from torchbeast.base.seeds import derive_seed
from torchbeast.flags import DECLARED, Atari, Flags, Loss, Model, Optimizer, of_resume
from torchbeast.presets import BEFORE_THE_FLAG_EXISTED, PRESETS
from torchbeast.procs import processes
from torchbeast.runs import trust
from torchbeast.runs.files import (
    RunFolder,
    check_name,
    read_meta,
    read_rows,
)

log = logging.getLogger(__name__)

OF_ONE_START = of_resume(DECLARED, START)
FREE_TO_CHANGE = of_resume(DECLARED, START, FREE)  # don't change what a run learns
FREE_TO_CHANGE_IN_SYNC = of_resume(DECLARED, START, FREE, TUNE)

# Flags of a meta.json that name a place, and not what the run does.
OF_ITS_RUN = {
    *("mode", "savedir", "xpid", "config", "video", "checkpoint", "repeat", "until"),
    *("pipes_basename", "listen", "bind", "join", "server_addresses", "ray_address"),
}
# Only the command line says whether a file is trusted.
NEVER_IN_A_FILE = ("config", "trust_checkpoint_env")


class Typed(NamedTuple):
    """What a user gave to a script.

    Attributes:
      declared: the flags of the script.
      here: the values on the command line.
      in_file: those of --config, as if they had been typed.
      file: that file, for messages.
      signed: whether it has the signature of this user, see trust.py.
    """

    declared: dict[str, Flag]
    here: dict[str, Any]
    in_file: dict[str, Any]
    file: str
    signed: bool


def read(parser: FlagParser, argv: Sequence[str] | None = None) -> Typed:
    """Parses the command line, and reads the file of --config.

    Raises:
      FlagError: the file can't be read, or has a flag that is not allowed.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    words = ["--model=deep" if word == "--use_resnet" else word for word in words]
    here = vars(parser.parse_args(words))
    file, signed = f"--config {here.get('config')}", False
    in_file: dict[str, Any] = {}
    if "config" in here:
        with using(file):
            in_file, signed = _read_config(
                parser.declared, Path(here["config"]).expanduser()
            )
    return Typed(parser.declared, here, in_file, file, signed)


def _read_config(declared: dict[str, Flag], path: Path) -> tuple[dict[str, Any], bool]:
    """The values in a TOML file or a run's meta.json, and whether it is signed."""
    text = path.read_text(encoding="utf-8")
    allowed = {k: x for k, x in declared.items() if k not in NEVER_IN_A_FILE}
    signed = False
    if path.suffix == ".json":
        meta = json.loads(text)
        if not isinstance(meta, dict) or not isinstance(meta.get("args"), dict):
            raise ValueError("this is not the meta.json of a run: it has no args")
        signed = trust.is_signed(meta["args"], meta.get("flags_signature"))
        values = {**BEFORE_THE_FLAG_EXISTED, **meta["args"]}
        chosen_there = {*OF_ITS_RUN, *meta.get("flags_left_open", ())}
        # It may be that of another variant.
        values = {k: values[k] for k in (values.keys() & allowed) - chosen_there}
    else:
        try:
            import tomllib  # from Python 3.11 on
        except ImportError as error:
            raise FlagError("--config with a .toml file needs Python 3.11") from error
        values = tomllib.loads(text)
        for name in values.keys() - allowed:
            hint = did_you_mean(name, allowed)
            raise FlagError(f"--config {path}: there is no flag {name}.{hint}")
    found = values_of_file(declared, values, f"--config {path}")
    return {k: v for k, v in found.items() if v is not None}, signed


def values_of_file(
    declared: dict[str, Flag], values: Mapping[str, Any], place: str
) -> dict[str, Any]:
    """Those values that are of declared flags; raises FlagError for a wrong one."""
    try:
        return {k: declared[k].from_file(v) for k, v in values.items() if k in declared}
    except FlagError as error:
        raise FlagError(f"{place}: {error}") from None


def parse(parser: FlagParser, argv: Sequence[str] | None = None) -> Flags:
    """The flags of a command line, without a checkpoint; see `merge`."""
    return merge(read(parser, argv))


def merge(
    typed: Typed,
    saved: dict[str, Any] | None = None,
    signed: bool = False,
    place: str = "the checkpoint",
) -> Flags:
    """The flags of a script. They are not resolved and not frozen yet.

    All that a run, a test or a notebook takes from a file comes through here.

    Args:
      saved: flags of a checkpoint. They win over the defaults and the checkpoint's own
        preset.
      signed: whether the checkpoint has the signature of this user, see trust.py.
      place: of the checkpoint, for messages.

    Raises:
      FlagError: a flag has a value that is not allowed.
      UntrustedError: a file names code, another file or a machine, and nobody typed it.
    """
    declared, here = typed.declared, typed.here
    given = {**typed.in_file, **here}  # the command line wins
    preset = preset_flags(given.get("preset"))
    if given.get("preset") != typed.in_file.get("preset"):
        # The command line names the preset, which wins over the file.
        given = {k: v for k, v in given.items() if k not in preset or k in here}
    from_file = {k: v for k, v in given.items() if k not in here}
    of_one_start = of_resume(declared, START)
    saved = {k: v for k, v in (saved or {}).items() if k not in of_one_start}
    if saved:
        saved = {**BEFORE_THE_FLAG_EXISTED, **saved}
        saved = values_of_file(declared, saved, place)
        if "preset" not in given:
            preset = preset_flags(saved.get("preset"))
        elif preset != preset_flags(saved.get("preset")):  # names can mean the same
            given = preset | given  # a new preset counts as typed
    if not given.get("trust_checkpoint_env"):
        if not typed.signed:
            trust.check(typed.file, trust.risky(declared, from_file))
        if not signed:
            found = trust.risky(declared, {k: saved[k] for k in saved.keys() - given})
            if given.get("mode", "train") != "train":
                # A test neither uses nor opens what these name.
                free = of_resume(declared, START, FREE) | {"init_from"}
                for name in found.keys() & free:
                    del saved[name], found[name]
            trust.check(place, found)
    defaults = {name: x.default for name, x in declared.items()}
    values = {**defaults, **preset, **saved, **given}
    values = {name: values[name] for name in declared}
    check_ranges(declared, values)
    flags = Flags(**values)
    flags.typed, flags.on_command_line = frozenset(given), frozenset(here)
    flags.needs = {k: x.needs for k, x in declared.items() if x.needs}
    return flags


def preset_flags(name: str | None) -> dict[str, Any]:
    """What --preset sets: the differences in PRESETS, and the other flags' defaults."""
    if name not in PRESETS:
        return {}
    groups = [Model, Loss, Optimizer, *([] if "env" in PRESETS[name] else [Atari])]
    declared = {k: x for group in groups for k, x in group.declared().items()}
    for of_machine in ("precision", "atari_backend"):
        declared.pop(of_machine, None)
    layout = ("total_steps", "batch_size", "unroll_length", "rollouts", "replay_ratio")
    declared |= {name: DECLARED[name] for name in layout}
    return {k: x.default for k, x in declared.items()} | PRESETS[name]


def differences(values: dict[str, Any]) -> dict[str, Any]:
    """Those of a run's flags that differ from its preset; without a preset, {}."""
    preset = preset_flags(values.get("preset"))
    return {k: values[k] for k, x in preset.items() if values.get(k, x) != x}


def resolve_folder(flags: Flags) -> None:
    """Fills in --savedir and --xpid, and checks that they can name a folder.

    Raises:
      FlagError: they can't.
    """
    with using(f"--savedir {flags.savedir}", "needs HOME; or choose another"):
        flags.savedir = str(Path(flags.savedir).expanduser())
    if not flags.xpid:  # random digits: a script may start several runs in a second
        flags.xpid = (
            f"{time.strftime('torchbeast-%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        )
    check_name(flags.xpid, flags.savedir)
    folder = os.path.join(flags.savedir, flags.xpid)
    longest = max(len(os.fsencode(name)) for name in folder.split(os.sep))
    if longest > 255 or len(os.fsencode(folder)) > 4000:
        raise FlagError(
            "--savedir and --xpid (a sweep's --name, --grid) can't name a folder: "
            f"File name too long: {folder[:100]!r}... Give shorter ones, with at most "
            "255 bytes per name"
        )


def check_effects(flags: Flags) -> None:
    """Raises FlagError if a flag of the command line has no effect.

    A --config may have such flags: that of a run has all flags.
    """
    here, trains = flags.on_command_line, flags.mode == "train"

    def refuse(off: bool, cause: str, *names: str) -> None:
        for name in names:
            if off and name in here and (value := getattr(flags, name)):
                raise FlagError(f"--{name} {value} has no effect {cause}")

    for name, needs in flags.needs.items():
        if name in here and needs not in here:
            refuse(not getattr(flags, needs), f"without --{needs}", name)
    replay, core = (
        getattr(flags, name) or name in here for name in ("replay_ratio", "use_lstm")
    )
    why = "without a replay: add --replay_ratio, for example 7"
    replays = "replay_size", "replay_file", "save_replay", "learn_start", "kl_threshold"
    refuse(not replay, why, *replays)
    why = "without a recurrent core: add --use_lstm"
    refuse(not core, why, "core", "core_size", "core_layers", "forget_bias")
    why = "without checkpoints"
    refuse(flags.disable_checkpoint, why, "save_replay")
    repeats = getattr(flags, "repeat", None)
    refuse(not repeats, "without --repeat XPID", "until", "interactive")
    is_ray = getattr(flags, "launcher", None) == "ray"
    alone = bool(flags.sync or repeats or is_ray)
    refuse(alone, "with --sync, --repeat or --launcher ray", "record")
    refuse(flags.sync, "with --sync", "num_learner_threads", "num_inference_threads")
    is_adam = flags.optimizer == "adam"
    refuse(is_adam, "with Adam", "alpha", "momentum", "epsilon_outside_root")
    refuse(bool(flags.encoder), "with --encoder", "model")
    why = "in training, which resumes from model.tar: add --mode test, or "
    refuse(trains, f"{why}start another run with --init_from", "checkpoint")
    refuse(trains, "in training", "num_test_episodes")


def check_ranges(declared: Mapping[str, Flag], values: Mapping[str, Any]) -> None:
    """Raises FlagError if a number is out of its range. None is allowed."""
    for name, value in values.items():
        allowed = declared[name].range
        if allowed and value is not None and value not in allowed:
            raise FlagError(f"--{name} must be {allowed.words}, got {value}")


def check_replay(flags: Flags) -> None:
    """Raises FlagError if a run can't train with its --replay_ratio."""
    ratio, B, T = flags.replay_ratio, flags.batch_size, flags.unroll_length
    for least, why in (
        (8 * T, f"8 times --unroll_length {T}"),
        (
            math.ceil(ratio * B * T),
            f"--replay_ratio {ratio:g} times --batch_size {B} and --unroll_length {T}",
        ),
        (flags.learn_start, f"--learn_start {flags.learn_start:,}"),
    ):
        if flags.replay_size < least:
            raise FlagError(
                f"--replay_size {flags.replay_size:,} is too small: {why} needs at "
                f"least {least:,} steps"
            )
    for name in ("num_learner_threads", "minibatches"):
        if (value := getattr(flags, name)) > 1:
            raise FlagError(
                f"--{name} {value} can't be used with --replay_ratio {ratio:g}: the "
                "replay takes whole batches, in order, and mixes each with replayed "
                f"rollouts. Give --{name} 1"
            )
    if flags.sync and not flags.disable_checkpoint:
        raise FlagError(
            "--sync resumes exactly, which a run with a replay can't: add "
            "--disable_checkpoint, or leave out --sync"
        )


def resolve(flags: Flags) -> Flags:
    """Fills in the flags that depend on the machine or on others; checks them.

    --savedir and --xpid are left as they are, see resolve_folder.

    Raises:
      FlagError: a value is not allowed; the message says what is.
    """
    steps = flags.batch_size * flags.unroll_length
    if flags.mode == "train" and steps > flags.total_steps:
        raise FlagError(
            f"one batch has {steps:,} steps (--batch_size {flags.batch_size} times "
            f"--unroll_length {flags.unroll_length}), more than --total_steps "
            f"{flags.total_steps:,}: the run would end after one update. Raise "
            "--total_steps or make the batch smaller"
        )
    if flags.torch_threads is None:
        learners = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)  # torchrun's
        # Half of the cores are for the actors.
        flags.torch_threads = max(1, num_cpus() // 2 // learners)
    check_effects(flags)
    if flags.learn_start is None:
        flags.learn_start = min(10_000, flags.replay_size // 2)
    if flags.replay_ratio and flags.mode == "train":
        check_replay(flags)
    if flags.encoder and flags.normalize_observations:
        raise FlagError("--normalize_observations has no effect with --encoder")
    M, U = flags.minibatches, flags.updates_per_batch
    if flags.batch_size % M or U % M:
        raise FlagError(
            f"--minibatches {M} must divide --batch_size {flags.batch_size} and "
            f"--updates_per_batch {U}, so that all rollouts count equally: "
            f"--updates_per_batch {M} is one pass over a batch. --minibatches 1 is "
            "always possible"
        )
    if flags.precision == "auto":
        flags.precision = "bf16" if fast_bf16(learner_device(flags)) else "fp32"
    return flags


def left_open(before: dict[str, Any], flags: Flags) -> list[str]:
    """Names of the flags that were filled in from the machine or from other flags.

    Args:
      before: the flags before they were resolved.
    """
    return sorted(
        name
        for name, value in flags.as_dict().items()
        if before.get(name) in (None, "auto") and value != before.get(name)
    )


def changed(
    saved: dict[str, Any], flags: Flags, free: Set[str] = FREE_TO_CHANGE
) -> dict[str, tuple[Any, Any]]:
    """The core's flags that differ from a checkpoint's: {name: (saved, now)}.

    Those of other parts don't change what a run learns.
    """
    now = flags.as_dict()
    names = sorted((saved.keys() | now.keys()) & DECLARED.keys() - free)
    return {k: (saved.get(k), now.get(k)) for k in names if saved.get(k) != now.get(k)}


def describe_changes(changes: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"--{name} {a} -> {b}" for name, (a, b) in changes.items())


# --- The start


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
        for what in filter(None, parts.call("left", flags, path, step)):
            log.info("What is left is %s.", what)
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
    test: Callable[[Typed], None],
) -> int:
    """The main function of a script that trains, or tests with --mode test.

    `train` returns the exit status, and so does this. For resolve_layout see begin.
    """

    from torchbeast.extras import order

    def run() -> int:
        typed = read(parser, argv)
        flags = merge(typed)
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

    return guarded(run)


@contextlib.contextmanager
def begin_all(
    typed: Typed, resolve_layout: Callable[[Flags], Flags]
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
            print_warnings_only()
            savedir = stack.enter_context(tempfile.TemporaryDirectory())
            flags = found.flags.replace(savedir=savedir, disable_checkpoint=True)
            folder = RunFolder(savedir, flags.xpid)
            stack.callback(folder.close)
            start = found._replace(flags=flags, folder=folder)
        yield start


@contextlib.contextmanager
def begin(typed: Typed, resolve_layout: Callable[[Flags], Flags]) -> Iterator[Start]:
    """Locks the run's folder, reads the checkpoint, if any, and resolves the flags.

    Args:
      resolve_layout: fills in the flags that only one variant has, and checks them.

    Raises:
      CheckpointError: the checkpoint can't be read.
      FlagError: a flag has a value that is not allowed, or not with this checkpoint;
        or the run was started before and can't be resumed.
    """
    from torchbeast.runs import checkpoint

    flags = merge(typed)
    if flags.suppress_logs:
        print_warnings_only()
    resolve_folder(flags)
    saved, start_over = None, False
    notes: list[str] = []
    with contextlib.closing(RunFolder(flags.savedir, flags.xpid)) as folder:
        path = folder.path / "model.tar"

        def load() -> tuple[dict[str, Any], Flags]:
            saved = checkpoint.load(path)
            return saved, merge_saved(typed, saved, path, notes)

        if not flags.disable_checkpoint:
            saved, flags = load() if path.exists() else (None, flags)
            step = saved["stats"]["step"] if saved else None
            if any(parts.call("fetch", flags, folder.path, step)):
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
        flags = resolve_layout(resolve(flags))
        if ranks.size() > 1 and (flags.record or getattr(flags, "repeat", None)):
            raise FlagError("--record and --repeat need one learner, without torchrun")
        filled_in = set(left_open(before, flags))
        if saved:
            if flags.sync:
                filled_in |= set(saved.get("flags_left_open", ())) - flags.typed
            notes += notes_on_changed_flags(flags, saved["flags"])
        yield Start(flags.freeze(), folder, saved, sorted(filled_in), start_over, notes)


def merge_saved(
    typed: Typed, saved: dict[str, Any], path: pathlib.Path, notes: list[str]
) -> Flags:
    """Returns the flags of a resumed run, not resolved yet.

    Raises:
      UntrustedError: the checkpoint names code or files, and nobody typed it.
    """
    signed = trust.is_signed(saved["flags"], saved.get("flags_signature"))
    if (learners := saved.get("ranks", 1)) != ranks.size():
        share_out(saved["flags"], learners, set(typed.here))
    # Nothing is used yet: outdated values, such as addresses, need no trust.
    flags = merge(typed, saved["flags"], signed=True)
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
    return merge(typed, kept, signed, str(path))


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
    from torchbeast.runs import checkpoint

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
    changes = changed(saved["flags"], flags, FREE_TO_CHANGE_IN_SYNC)
    typed = {
        name: change
        for name, change in changes.items()
        if name in flags.typed and name in saved["flags"]
    }
    if typed:
        raise FlagError(
            "a run with --sync resumes exactly, with the same games and the same order "
            f"of updates, so it can't change {describe_changes(typed)}. "
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
    for name, (old, new) in changed(saved, flags, OF_ONE_START).items():
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
