"""Command-line flags: declared once, resolved once, then frozen.

Each flag takes the first value that exists: from the command line, from the checkpoint
that the run resumes from, from the preset, the default. If the command line names
another preset than the checkpoint, that preset's flags count as typed.

Importing this module does not load torch, because environment servers parse flags too.
"""

from __future__ import annotations

import argparse
import math
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from torchbeast.core.devices import fast_bf16, learner_device
from torchbeast.core.errors import FlagError
from torchbeast.core.presets import PRESETS, current_name, preset_name
from torchbeast.core.ranges import RANGES

# These flags describe one start, not the run. A resumed run does not take them from the
# checkpoint.
OF_ONE_START = {
    *("mode", "savedir", "xpid", "allow_flag_changes", "disable_checkpoint"),
    *("write_profiler_trace", "video", "num_test_episodes", "greedy"),
    "trust_checkpoint_env",
}

# Flags that don't change what a run learns. Some exist in one variant only.
FREE_TO_CHANGE = OF_ONE_START | {
    *("preset", "tensorboard", "checkpoint_interval", "actor_timeout"),
    # Devices, addresses and security.
    *("learner_device", "actor_device", "disable_cuda", "num_inference_threads"),
    *("pipes_basename", "server_addresses", "listen", "bind", "join"),
    *("tls", "tls_cert", "tls_key", "tls_ca", "tls_server_name"),
    *("token_file", "insecure"),
    *("connect_timeout", "max_restarts", "num_actions"),
}

# Flags that a resumed run with --sync may change: those that set how it learns from now
# on. The others determine the games in progress and the order of updates.
FREE_TO_CHANGE_IN_SYNC = FREE_TO_CHANGE | {
    *("total_steps", "learning_rate", "updates_per_batch"),
    *("alpha", "momentum", "epsilon"),
    *("grad_norm_clipping", "entropy_cost", "baseline_cost", "discounting"),
    *("reward_clipping", "sync", "clip_rho", "clip_pg_rho", "clip_c"),
    *("trace_decay", "normalize_advantages", "clip_ratio"),
}

# How runs learned whose checkpoints lack the flag.
BEFORE_THE_FLAG_EXISTED = {"optimizer": "rmsprop", "updates_per_batch": 1}


class Flags(argparse.Namespace):
    """The flags of a run; read-only after freeze().

    Attributes that start with an underscore are not flags.

    Attributes:
      typed: names of the flags that the command line set, directly or by a new preset.
    """

    _frozen = False
    _typed: frozenset[str] = frozenset()

    @property
    def typed(self) -> frozenset[str]:
        return self._typed

    def freeze(self) -> Flags:
        self.__dict__["_frozen"] = True
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if self._frozen:
            raise AttributeError(
                f"flags are frozen: {name} can't be set to {value!r} during the run"
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._frozen:
            raise AttributeError(
                f"flags are frozen: {name} can't be deleted during the run"
            )
        super().__delattr__(name)

    def replace(self, **changes: Any) -> Flags:
        """A frozen copy with other values."""
        copied = Flags(**{**self.as_dict(), **changes})
        copied._typed = self._typed
        return copied.freeze()

    def as_dict(self) -> dict[str, Any]:
        return {k: v for k, v in sorted(vars(self).items()) if not k.startswith("_")}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, unless a flag has none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        no_default = action.default is None
        return action.help if no_default else super()._get_help_string(action)


def make_parser(description: str, torsos: Iterable[str]) -> argparse.ArgumentParser:
    """The flags that both variants share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=HelpFormatter
    )
    toggle = argparse.BooleanOptionalAction
    add = parser.add_argument_group("run").add_argument
    add(
        "--mode",
        default="train",
        choices=["train", "test", "test_render"],
        help="test: play games with a checkpoint; test_render: and show them",
    )
    add(
        "--preset",
        type=preset_name,
        choices=sorted(PRESETS),
        help="a named set of flags",
    )
    add("--xpid", help="name of the run; if it exists, it is resumed")
    add("--savedir", default="~/logs/torchbeast", help="directory of the runs")
    add("--seed", type=int, default=1, help="of weights, actions and environments")
    add("--total_steps", type=int, default=100_000, help="environment steps to train")
    add(
        "--sync",
        action=toggle,
        default=False,
        help="reproducible: actors and learner take turns",
    )
    add(
        "--allow_flag_changes",
        action="store_true",
        help="has no effect: typed flags always win over those of the checkpoint",
    )
    add(
        "--trust_checkpoint_env",
        action=toggle,
        default=True,
        help="allow a checkpoint to name the module to import (--env module:Class)",
    )
    add(
        "--disable_checkpoint",
        action="store_true",
        help="neither save nor load a checkpoint",
    )
    add(
        "--checkpoint_interval",
        type=float,
        default=600.0,
        help="seconds between checkpoints",
    )
    add(
        "--tensorboard",
        action=toggle,
        default=False,
        help="also write TensorBoard event files",
    )
    add(
        "--write_profiler_trace",
        action="store_true",
        help="profile some updates of the learner process; writes trace.json",
    )

    add_environment_flags(parser)

    add = parser.add_argument_group("model").add_argument
    add("--model", default="shallow", choices=list(torsos), help="torso for images")
    add("--use_lstm", action=toggle, default=False, help="add a recurrent core")
    add(
        "--precision",
        default="auto",
        choices=["auto", "fp32", "bf16"],
        help="dtype of the image encoders; auto: bf16 if the hardware supports it",
    )

    add = parser.add_argument_group("layout").add_argument
    add(
        "--num_actors",
        type=int,
        default=2,
        help="actor processes, or streams in PolyBeast",
    )
    add("--batch_size", type=int, default=4, help="rollouts per learner batch")
    add("--unroll_length", type=int, default=20, help="steps per rollout")
    add("--disable_cuda", action=toggle, default=False, help="use no GPU")
    add("--learner_device", help="for example cuda:1; default: the first GPU, if any")

    add = parser.add_argument_group("loss").add_argument
    add("--entropy_cost", type=float, default=0.01, help="weight of the entropy bonus")
    add("--baseline_cost", type=float, default=0.5, help="weight of the value loss")
    add("--discounting", type=float, default=0.99, help="γ")
    add(
        "--reward_clipping",
        default="abs_one",
        choices=["abs_one", "none"],
        help="abs_one clips rewards to [-1, 1]",
    )
    add("--clip_rho", type=float, default=1.0, help="V-trace's ρ̄ (inf: no clipping)")
    add("--clip_pg_rho", type=float, default=1.0, help="ρ̄ of the policy gradient")
    add("--clip_c", type=float, default=1.0, help="V-trace's c̄")
    add("--trace_decay", type=float, default=1.0, help="V-trace's λ")
    add(
        "--normalize_advantages",
        action=toggle,
        default=False,
        help="scale the advantages of a batch to mean 0 and standard deviation 1",
    )
    add("--clip_ratio", type=float, default=math.inf, help="PPO's ε (inf: no clipping)")

    add = parser.add_argument_group("optimizer").add_argument
    add("--optimizer", choices=("rmsprop", "adam"), default="rmsprop")
    add("--learning_rate", type=float, default=0.0007, help="falls linearly to 0")
    add(
        "--updates_per_batch",
        type=int,
        default=1,
        help="how often to learn from a batch; more need fewer steps, but more time",
    )
    add("--alpha", type=float, default=0.99, help="RMSProp's smoothing")
    add("--momentum", type=float, default=0.0, help="RMSProp's momentum")
    add("--epsilon", type=float, default=1e-6, help="the optimizer's ε")
    add(
        "--grad_norm_clipping",
        type=float,
        default=40.0,
        help="largest norm of the gradient (inf: no clipping)",
    )

    add = parser.add_argument_group("test").add_argument
    add("--num_test_episodes", type=int, default=10, help="games to play")
    add("--greedy", action="store_true", help="take the most likely action")
    add("--video", help="record the test to this .mp4 file")
    return parser


ATARI = "Atari"  # title of the group of flags that have no effect on other environments


def add_environment_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that determine the environment.

    PolyBeast's learner refuses environment servers with other values.
    """
    toggle = argparse.BooleanOptionalAction
    add = parser.add_argument_group("environment").add_argument
    add("--env", default="PongNoFrameskip-v4", help="a Gymnasium id or module:Class")
    add = parser.add_argument_group(ATARI).add_argument
    add(
        *("--atari_backend", "--envs"),
        default="native",
        choices=["native", "python"],
        help="ale-py's vector environment (C++) or the Python wrappers",
    )
    add("--frame_skip", type=int, default=4, help="frames per action")
    add(
        "--noop_max", type=int, default=30, help="maximal no-ops at the start of a game"
    )
    add(
        "--sticky_actions",
        type=float,
        default=0.0,
        help="probability of repeating the previous action",
    )
    add("--full_action_space", action=toggle, default=False, help="all 18 actions")
    add(
        "--life_loss",
        action=toggle,
        default=True,
        help="a lost life ends the training episode",
    )
    add(
        "--max_episode_frames",
        type=int,
        default=108_000,
        help="frames after which a game is truncated",
    )


def environment_flags(is_atari: bool) -> list[argparse.Action]:
    """The flags of add_environment_flags that have an effect."""
    parser = argparse.ArgumentParser(add_help=False)
    add_environment_flags(parser)
    groups = [g for g in parser._action_groups if is_atari or g.title != ATARI]
    return [action for group in groups for action in group._group_actions]


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None = None,
    saved: dict[str, Any] | None = None,
) -> Flags:
    """Parses argv. The result is not resolved and not frozen yet.

    Args:
      saved: flags of a checkpoint. They win over the defaults and the checkpoint's own
        preset.

    Raises:
      FlagError: a saved flag has a value that is not allowed.
    """
    flags = parser.parse_args(argv, Flags())
    typed = _parse_typed(parser, argv)
    preset = PRESETS.get(flags.preset, {}) if flags.preset else {}
    saved = {k: v for k, v in (saved or {}).items() if k not in OF_ONE_START}
    if saved:
        saved = {**BEFORE_THE_FLAG_EXISTED, **saved}
        saved["preset"] = current_name(saved.get("preset"))
    for action in parser._actions:
        name = action.dest
        if name in saved and not _fits(action, saved[name]):
            raise FlagError(
                f"the checkpoint's flag {name} is {saved[name]!r}, which is not "
                "allowed: the file was written by another program, or is damaged"
            )
    if saved and "preset" in typed and flags.preset != saved.get("preset"):
        typed = preset | typed  # a new preset counts as typed
    elif saved:
        preset = PRESETS.get(saved["preset"] or "", {})
    known = flags.as_dict()
    for values in (preset, saved, typed):
        for name, value in values.items():
            if name in known:
                setattr(flags, name, value)
    flags._typed = frozenset(typed)
    return flags


def _parse_typed(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> dict[str, Any]:
    """The flags that argv sets, without defaults."""
    defaults = [(action, action.default) for action in parser._actions]
    others, parser._defaults = parser._defaults, {}
    for action, _ in defaults:
        action.default = argparse.SUPPRESS
    try:
        return vars(parser.parse_args(argv))
    finally:
        parser._defaults = others
        for action, default in defaults:
            action.default = default


def _fits(action: argparse.Action, value: Any) -> bool:
    """Whether a checkpoint's value has the right type and is among the choices."""
    if value is None:
        return True
    if action.choices is not None:
        return value in action.choices
    if action.nargs == 0:  # a switch
        return isinstance(value, bool)
    if action.type in (int, float):
        numbers = int if action.type is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool)
    return action.type is not None or isinstance(value, str)


def resolve_folder(flags: Flags) -> None:
    """Fills in --savedir and --xpid, and checks them.

    Raises:
      FlagError: they don't name a folder.
    """
    savedir = os.path.expanduser(flags.savedir)
    if savedir.startswith("~"):
        raise FlagError(
            f"--savedir {flags.savedir}: the home folder is unknown. Set HOME, or "
            "choose another --savedir"
        )
    flags.savedir = savedir
    if not flags.xpid:  # random digits: a script may start several runs in a second
        flags.xpid = (
            f"{time.strftime('torchbeast-%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        )
    if os.sep in flags.xpid or flags.xpid in (".", "..", "latest"):
        raise FlagError(
            f'--xpid must be the name of a folder in --savedir, without "{os.sep}" and '
            f'other than "latest", got {flags.xpid!r}'
        )


def check_ranges(flags: argparse.Namespace) -> None:
    """Raises FlagError if a number is out of its range. None is allowed."""
    for name, value in vars(flags).items():
        allowed = RANGES.get(name)
        if allowed and value is not None and value not in allowed:
            raise FlagError(f"--{name} must be {allowed}, got {value}")


def resolve(flags: Flags) -> Flags:
    """Fills in the flags that depend on the machine or the clock; checks the others.

    Raises:
      FlagError: a value is not allowed; the message says what is.
    """
    resolve_folder(flags)
    check_ranges(flags)
    steps = flags.batch_size * flags.unroll_length
    if flags.mode == "train" and steps > flags.total_steps:
        raise FlagError(
            f"one batch has {steps:,} steps (--batch_size {flags.batch_size} times "
            f"--unroll_length {flags.unroll_length}), more than --total_steps "
            f"{flags.total_steps:,}: the run would end before its first update. Raise "
            "--total_steps or make the batch smaller"
        )
    if flags.mode == "train" and flags.video:
        raise FlagError(
            f"--video {flags.video} records a test, not training: add --mode test"
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
    saved: dict[str, Any], flags: Flags, free: set[str] = FREE_TO_CHANGE
) -> dict[str, tuple[Any, Any]]:
    """Flags that differ from a checkpoint's: {name: (saved, now)}."""
    now = flags.as_dict()
    return {
        name: (saved.get(name), now.get(name))
        for name in sorted((saved.keys() | now.keys()) - free)
        if saved.get(name) != now.get(name)
    }


def describe_changes(changes: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"--{name} {a} -> {b}" for name, (a, b) in changes.items())
