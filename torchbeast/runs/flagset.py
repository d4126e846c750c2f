"""Flags from the command line, files and presets: merged, then resolved.

Each flag takes the first value that exists: from the command line, from the file of
--config, from the checkpoint that the run resumes from, from the preset, the default.
If the user names another preset than the checkpoint, that preset's flags count as
typed. Importing this module does not load torch: environment servers parse flags.
"""

import os
import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from torchbeast.base import parts
from torchbeast.base.errors import FlagError
from torchbeast.base.flag import FREE, START, TUNE, Flag, FlagParser
from torchbeast.base.hardware import num_cpus
from torchbeast.core.columns import join_columns
from torchbeast.flags import DECLARED, Atari, Flags, Loss, Model, Optimizer, of_resume
from torchbeast.presets import PRESETS
from torchbeast.runs import trust

OF_ONE_START = of_resume(DECLARED, START)
FREE_TO_CHANGE = of_resume(DECLARED, START, FREE)  # don't change what a run learns
FREE_TO_CHANGE_IN_SYNC = of_resume(DECLARED, START, FREE, TUNE)


class Typed(NamedTuple):
    """What a user gave to a script."""

    declared: dict[str, Flag]  # the flags of the script
    here: dict[str, Any]  # the values on the command line
    in_file: dict[str, Any]  # those that parts add, such as those of --config


def read(parser: FlagParser, argv: Sequence[str] | None = None) -> Typed:
    """Parses the command line. Raises FlagError."""
    words = list(sys.argv[1:] if argv is None else argv)
    words = ["--model=deep" if word == "--use_resnet" else word for word in words]
    parts.call("command_line", parser, words)
    here = vars(parser.parse_args(words))
    more = join_columns(*parts.call("more_flags", parser.declared, here))
    return Typed(parser.declared, here, more)


def from_file(
    declared: Mapping[str, Flag],
    file: Mapping[str, Any],
    place: str,
    names: Set[str],
    typed: Mapping[str, Any],
    unused: Set[str] = frozenset(),
) -> dict[str, Any]:
    """The flags of these names in a file. Raises FlagError, or UntrustedError.

    `file` has "flags", and "flags_signature" if a run has written it. Those that are
    not harmless must be typed, see trust.py; or they are left out, if in `unused`.
    """
    flags = file["flags"]
    names = flags.keys() & declared.keys() & names
    found = {k: declared[k].from_file(flags[k], place) for k in names}
    found = {k: x for k, x in found.items() if x is not None}
    if trust.is_signed(flags, file.get("flags_signature")):
        return found
    risky = {k for k, x in found.items() if not trust.is_harmless(declared[k], x)}
    risky -= typed.keys()
    if not typed.get("trust_checkpoint_env"):
        trust.refuse(place, {k: found[k] for k in risky - unused})
    return {k: x for k, x in found.items() if k not in risky & unused}


def parse(parser: FlagParser, argv: Sequence[str] | None = None) -> Flags:
    """The flags of a command line, without a checkpoint; see `merge`."""
    return merge(read(parser, argv))


def merge(
    typed: Typed,
    saved: Mapping[str, Any] | None = None,
    place: str = "the checkpoint",
    outdated: Set[str] = frozenset(),
) -> Flags:
    """The flags of a script. They are not resolved and not frozen yet.

    `saved`: a checkpoint at `place`; its flags in `outdated` are not used. Raises
    FlagError for a value that is not allowed, and UntrustedError, see trust.py.
    """
    declared, here = typed.declared, typed.here
    given = {**typed.in_file, **here}  # the command line wins
    old: dict[str, Any] = saved["flags"] if saved else {}
    preset = preset_flags(given.get("preset", old.get("preset")))
    if saved:
        if preset != preset_flags(old.get("preset")):
            given = preset | given  # a new preset counts as typed
        names, unused = declared.keys() - of_resume(declared, START), set[str]()
        if given.get("mode", "train") != "train":
            # A test neither uses nor opens what these name.
            unused = {*of_resume(declared, FREE), "init_from"}
        old = from_file(declared, saved, place, names - outdated, given, unused)
    defaults = {name: x.default for name, x in declared.items()}
    values = {**defaults, **preset, **old, **given}
    values = {name: values[name] for name in declared}
    for name, x in values.items():
        allowed = declared[name].range
        if allowed and x is not None and not allowed.low <= x <= allowed.high:  # or NaN
            raise FlagError(f"--{name} must be {allowed.words}, got {x}")
    flags = Flags(**values)
    flags.typed = frozenset(given)
    needs = {k: declared[k].needs for k, x in here.items() if x}
    flags.idle = {k: x for k, x in needs.items() if x and not (values[x] or x in here)}
    return flags


def preset_flags(name: Any) -> dict[str, Any]:
    """What --preset sets: the differences in PRESETS, and the other flags' defaults."""
    if str(name) not in PRESETS:
        return {}
    groups = [Model, Loss, Optimizer, *([] if "env" in PRESETS[name] else [Atari])]
    declared = {k: x for group in groups for k, x in group.declared().items()}
    layout = ("total_steps", "batch_size", "unroll_length")
    declared |= {name: DECLARED[name] for name in layout}
    of_machine = ("precision", "atari_backend")
    defaults = {k: x.default for k, x in declared.items() if k not in of_machine}
    of_parts = {"rollouts": "fixed", "replay_ratio": 0.0, "explorer": None}
    of_parts |= {"normalize_observations": False, "normalize_rewards": False}
    return defaults | of_parts | PRESETS[name]


def resolve(flags: Flags) -> Flags:
    """Fills in the flags that depend on the machine or on others. Raises FlagError."""
    lacking = PRESETS.get(flags.preset or "", {}).keys() - vars(flags).keys()
    if flags.mode == "train" and lacking:
        raise FlagError(
            f"--preset {flags.preset} sets {sorted(lacking)}, of a part that is deleted"
        )
    B, M, U = flags.batch_size, flags.minibatches, flags.updates_per_batch
    if flags.mode == "train" and B * flags.unroll_length > flags.total_steps:
        raise FlagError("one batch has more steps than --total_steps")
    for name, needs in flags.idle.items():
        raise FlagError(f"--{name} has no effect without --{needs}")
    parts.call("resolve", flags)
    if B % M or U % M:
        raise FlagError(
            f"--minibatches {M} must divide --batch_size {B}, --updates_per_batch {U}"
        )
    if flags.torch_threads is None:
        learners = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)  # torchrun's
        # Half of the cores are for the actors.
        flags.torch_threads = max(1, num_cpus() // 2 // learners)
    if flags.precision == "auto":
        from torchbeast.base.devices import fast_bf16, learner_device  # with torch

        flags.precision = "bf16" if fast_bf16(learner_device(flags)) else "fp32"
    return flags


def changed(
    saved: dict[str, Any], flags: Flags, free: Set[str] = FREE_TO_CHANGE
) -> dict[str, tuple[Any, Any]]:
    """The flags that differ from a checkpoint's: {name: (saved, now)}."""
    now = flags.as_dict()
    declared = {k: x for group in parts.groups() for k, x in group.declared().items()}
    fixed = DECLARED.keys() | {name for name, x in declared.items() if not x.resume}
    names = sorted((saved.keys() | now.keys()) & fixed - free)
    both = {k: (saved.get(k), now.get(k)) for k in names}
    return {k: (a, b) for k, (a, b) in both.items() if a != b and str(a) != str(b)}


def describe_changes(changes: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"--{name} {a} -> {b}" for name, (a, b) in changes.items())
