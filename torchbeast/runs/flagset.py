"""Flags from the command line, files and presets: merged, then resolved.

torchbeast/flags.py declares the flags. Each takes the first value that exists: from the
command line, from the file of --config, from the checkpoint that the run resumes from,
from the preset, the default. If the command line names another preset than the
checkpoint, that preset's flags count as typed.

Importing this module does not load torch, because environment servers parse flags too.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from torchbeast.base import parts
from torchbeast.base.devices import fast_bf16, learner_device
from torchbeast.base.errors import FlagError, using
from torchbeast.base.flag import FREE, START, TUNE, Flag, FlagParser
from torchbeast.base.hardware import num_cpus
from torchbeast.flags import DECLARED, Atari, Flags, Loss, Model, Optimizer, of_resume
from torchbeast.presets import BEFORE_THE_FLAG_EXISTED, PRESETS
from torchbeast.runs import trust
from torchbeast.runs.files import (
    check_name,
)

OF_ONE_START = of_resume(DECLARED, START)
FREE_TO_CHANGE = of_resume(DECLARED, START, FREE)  # don't change what a run learns
FREE_TO_CHANGE_IN_SYNC = of_resume(DECLARED, START, FREE, TUNE)

# Flags of a meta.json that name a place, and not what the run does.
OF_ITS_RUN = {
    *("mode", "savedir", "xpid", "config", "video", "checkpoint"),
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
    if "config" not in here:
        return Typed(parser.declared, here, {}, "", True)
    file, path = f"--config {here['config']}", Path(here["config"]).expanduser()
    allowed = parser.declared.keys() - NEVER_IN_A_FILE
    with using(file):
        text, signed = path.read_text(encoding="utf-8"), False
        if path.suffix == ".json":  # the meta.json of a run, maybe of another variant
            meta = json.loads(text)
            signed = trust.is_signed(meta["args"], meta.get("flags_signature"))
            values = {**BEFORE_THE_FLAG_EXISTED, **meta["args"]}
            chosen_there = OF_ITS_RUN.union(meta.get("flags_left_open", ()))
            values = {k: values[k] for k in (values.keys() & allowed) - chosen_there}
        else:
            import tomllib  # from Python 3.11 on

            values = tomllib.loads(text)
        if unknown := sorted(values.keys() - allowed):
            raise FlagError(f"{file}: there is no flag {unknown[0]}")
    found = values_of_file(parser.declared, values, file)
    in_file = {k: v for k, v in found.items() if v is not None}
    return Typed(parser.declared, here, in_file, file, signed)


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
    layout = ("total_steps", "batch_size", "unroll_length", "rollouts")
    declared |= {name: DECLARED[name] for name in layout}
    defaults = {k: x.default for k, x in declared.items()}
    return {**defaults, "replay_ratio": 0.0, "explorer": None, **PRESETS[name]}


def differences(values: dict[str, Any]) -> dict[str, Any]:
    """Those of a run's flags that differ from its preset; without a preset, {}."""
    preset = preset_flags(values.get("preset"))
    return {k: values[k] for k, x in preset.items() if values.get(k, x) != x}


def resolve_folder(flags: Flags) -> None:
    """Fills in --savedir and --xpid. Raises FlagError if they can't name a folder."""
    with using(f"--savedir {flags.savedir}", "needs HOME; or choose another"):
        flags.savedir = str(Path(flags.savedir).expanduser())
    if not flags.xpid:  # random digits: a script may start several runs in a second
        date = time.strftime("torchbeast-%Y%m%d-%H%M%S")
        flags.xpid = f"{date}-{secrets.token_hex(3)}"
    check_name(flags.xpid, flags.savedir)


def check_ranges(declared: Mapping[str, Flag], values: Mapping[str, Any]) -> None:
    """Raises FlagError if a number is out of its range. None is allowed."""
    for name, value in values.items():
        allowed = declared[name].range
        if allowed and value is not None and value not in allowed:
            raise FlagError(f"--{name} must be {allowed.words}, got {value}")


def resolve(flags: Flags) -> Flags:
    """Fills in the flags that depend on the machine or on others; checks them.

    --savedir and --xpid are left as they are, see resolve_folder.

    Raises:
      FlagError: a value is not allowed; the message says what is.
    """
    lacking = PRESETS.get(flags.preset or "", {}).keys() - vars(flags).keys()
    if flags.mode == "train" and lacking:
        raise FlagError(
            f"--preset {flags.preset} sets {sorted(lacking)}, of a part that is deleted"
        )
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
    for name in flags.on_command_line & flags.needs.keys():
        needs, value = flags.needs[name], getattr(flags, name)
        if value and not getattr(flags, needs) and needs not in flags.on_command_line:
            raise FlagError(f"--{name} {value} has no effect without --{needs}")
    parts.call("resolve", flags)
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
    """The flags that differ from a checkpoint's: {name: (saved, now)}."""
    now = flags.as_dict()
    declared = [x for group in parts.groups() for x in group.declared().values()]
    fixed = DECLARED.keys() | {x.name for x in declared if not x.resume}
    names = sorted((saved.keys() | now.keys()) & fixed - free)
    return {k: (saved.get(k), now.get(k)) for k in names if saved.get(k) != now.get(k)}


def describe_changes(changes: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"--{name} {a} -> {b}" for name, (a, b) in changes.items())
