"""Command-line flags: declared once, resolved once, then frozen.

A preset is a named set of flags. The order of precedence: the command line, then the
checkpoint that a run goes on from, then the preset, then the defaults. A preset on the
command line that is not the checkpoint's counts as if its flags were typed.

Importing this loads no torch: environment servers parse flags too.
"""

from __future__ import annotations

import argparse
import math
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torchbeast.core.errors import UserError

if TYPE_CHECKING:
    import torch

# Protocols and settings by name. Flags given on the command line win over them.
PRESETS: dict[str, dict[str, Any]] = {
    # Espeholt et al. 2018, appendix G, shallow model.
    "impala2018": {
        "unroll_length": 20,
        "batch_size": 32,
        "discounting": 0.99,
        "baseline_cost": 0.5,
        "entropy_cost": 0.01,
        "learning_rate": 0.0006,
        "alpha": 0.99,
        "momentum": 0.0,
        "epsilon": 0.01,
        "grad_norm_clipping": 40.0,
        "reward_clipping": "abs_one",
        "total_steps": 50_000_000,
        "noop_max": 30,
        "sticky_actions": 0.0,
        "full_action_space": False,
        "life_loss": True,
    },
    # Machado et al. 2018: sticky actions, all 18 actions, whole games.
    "sticky": {
        "unroll_length": 20,
        "batch_size": 32,
        "entropy_cost": 0.01,
        "learning_rate": 0.0006,
        "total_steps": 50_000_000,
        "noop_max": 0,
        "sticky_actions": 0.25,
        "full_action_space": True,
        "life_loss": False,
        "max_episode_frames": 108_000,
    },
    "minatar": {
        "env": "MinAtar/Breakout-v1",
        "num_actors": 2,
        "envs_per_actor": 16,
        "unroll_length": 20,
        "batch_size": 16,
        "entropy_cost": 0.01,
        "learning_rate": 0.0006,
        "epsilon": 0.0001,
        "reward_clipping": "none",
        "total_steps": 3_000_000,
    },
    "cartpole": {
        "env": "CartPole-v1",
        "num_actors": 2,
        "envs_per_actor": 8,
        "unroll_length": 20,
        "batch_size": 8,
        "entropy_cost": 0.01,
        "baseline_cost": 0.05,
        "learning_rate": 0.002,
        "alpha": 0.95,
        "reward_clipping": "none",
        "total_steps": 500_000,
    },
}

# These say what one start does, not what the run is: a checkpoint's are not taken over.
OF_ONE_START = {
    *("mode", "savedir", "xpid", "allow_flag_changes", "disable_checkpoint"),
    *("write_profiler_trace", "video", "num_test_episodes", "greedy"),
    "trust_checkpoint_env",
}

# Flags that don't change what a run learns. Some are of one variant only.
FREE_TO_CHANGE = OF_ONE_START | {
    *("preset", "tensorboard", "checkpoint_interval", "actor_timeout"),
    # Where things run, and how they find each other.
    *("learner_device", "actor_device", "disable_cuda", "num_inference_threads"),
    *("pipes_basename", "server_addresses", "listen", "bind", "join"),
    *("tls_cert", "tls_key", "tls_ca", "tls_server_name", "token_file", "insecure"),
    *("connect_timeout", "max_restarts", "num_actions"),
}

# What a run with --sync may change when it is resumed: how it learns from here on. The
# rest shapes the games in progress and the order of updates.
FREE_TO_CHANGE_IN_SYNC = FREE_TO_CHANGE | {
    *("total_steps", "learning_rate", "alpha", "momentum", "epsilon"),
    *("grad_norm_clipping", "entropy_cost", "baseline_cost", "discounting"),
    *("reward_clipping", "sync", "clip_rho", "clip_pg_rho", "clip_c"),
    "trace_decay",
}


class Range(NamedTuple):
    """The values that a flag may have."""

    low: float
    high: float
    low_included: bool = True
    high_included: bool = True

    def __contains__(self, x: object) -> bool:
        assert isinstance(x, int | float)
        return (  # false for NaN
            (self.low <= x if self.low_included else self.low < x)
            and (x <= self.high if self.high_included else x < self.high)
        )

    def __str__(self) -> str:
        if self.high < LARGEST_COUNT:
            left, right = "(["[self.low_included], ")]"[self.high_included]
            return f"in {left}{self.low:g}, {self.high:g}{right}"
        words = []
        if self.low > -math.inf:
            least = "at least" if self.low_included else "more than"
            words.append(f"{least} {self.low:g}")
        if self.high == math.inf:
            words += [] if self.high_included else ["finite"]
        elif self.high not in (LARGEST_COUNT, LARGEST_STEP):
            words.append(f"below {self.high}")
        return " and ".join(words)


LARGEST_COUNT, LARGEST_STEP = 2**31 - 1, 2**63 - 1

COUNT = Range(1, LARGEST_COUNT)
STEPS = Range(1, LARGEST_STEP)
FINITE = Range(-math.inf, math.inf, False, False)
AT_LEAST_ZERO = Range(0, math.inf, True, False)
SHARE = Range(0, 1)
SECONDS = Range(0, 1e6, False)

# The values that can work, for every flag that is a number.
RANGES: dict[str, Range] = {
    "total_steps": STEPS,
    # What torch.manual_seed takes.
    "seed": Range(0, 2**64, True, False),
    "checkpoint_interval": Range(0, math.inf),
    "frame_skip": COUNT,
    "noop_max": Range(0, LARGEST_COUNT),
    "sticky_actions": SHARE,
    "max_episode_frames": COUNT,
    "num_actors": COUNT,
    "batch_size": COUNT,
    "unroll_length": COUNT,
    "envs_per_actor": COUNT,
    "num_buffers": COUNT,
    "num_learner_threads": COUNT,
    "torch_threads": COUNT,
    "actor_timeout": SECONDS,
    "entropy_cost": FINITE,
    "baseline_cost": AT_LEAST_ZERO,
    "discounting": SHARE,
    "clip_rho": Range(0, math.inf, False),  # inf: no clipping
    "clip_pg_rho": Range(0, math.inf, False),
    "clip_c": Range(0, math.inf, False),
    "trace_decay": SHARE,
    "learning_rate": AT_LEAST_ZERO,
    "alpha": SHARE,
    "momentum": Range(0, 1, True, False),
    "epsilon": AT_LEAST_ZERO,
    "grad_norm_clipping": Range(0, math.inf, False),  # inf: no clipping
    "num_test_episodes": COUNT,
    # PolyBeast's.
    "num_servers": COUNT,
    "max_restarts": Range(0, LARGEST_COUNT),
    "max_env_failures": Range(0, LARGEST_COUNT),
    "connect_timeout": SECONDS,
    "num_inference_threads": COUNT,
    "max_learner_queue_size": COUNT,
    "num_actions": COUNT,
}


class FlagError(UserError, ValueError):
    """A flag has a value that can't work."""


class Flags(argparse.Namespace):
    """Flags that can't be changed once freeze() was called.

    Names with an underscore before them are no flags.

    Attributes:
      typed: the flags that the command line gave, itself or by a preset that is new.
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
                f"flags are frozen: {name} can't become {value!r} during the run"
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._frozen:
            raise AttributeError(f"flags are frozen: {name} can't go during the run")
        super().__delattr__(name)

    def replace(self, **changes: Any) -> Flags:
        """A frozen copy with other values."""
        copied = Flags(**{**self.as_dict(), **changes})
        copied._typed = self._typed
        return copied.freeze()

    def as_dict(self) -> dict[str, Any]:
        return {k: v for k, v in sorted(vars(self).items()) if not k.startswith("_")}


def make_parser(description: str, torsos: Iterable[str]) -> argparse.ArgumentParser:
    """The flags that both variants share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    toggle = argparse.BooleanOptionalAction
    add = parser.add_argument_group("run").add_argument
    add("--mode", default="train", choices=["train", "test", "test_render"])
    add("--preset", choices=sorted(PRESETS), help="a named set of flags")
    add("--xpid", help="name of the run; an existing one is resumed")
    add("--savedir", default="~/logs/torchbeast", help="where the runs lie")
    add("--seed", type=int, default=1)
    add("--total_steps", type=int, default=100_000, help="environment steps to train")
    add(
        "--sync",
        action=toggle,
        default=False,
        help="reproducible: actors and learner in turn",
    )
    add(
        "--allow_flag_changes",
        action="store_true",
        help="not needed any more: what is typed wins over what was saved",
    )
    add(
        "--trust_checkpoint_env",
        action=toggle,
        default=True,
        help="import the module that a checkpoint names as --env module:Class",
    )
    add(
        "--disable_checkpoint",
        action="store_true",
        help="save no checkpoint, and go on from none",
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
        help="write TensorBoard event files too",
    )
    add(
        "--write_profiler_trace",
        action="store_true",
        help="profile some updates of the learner's process into trace.json",
    )

    add_environment_flags(parser)

    add = parser.add_argument_group("model").add_argument
    add("--model", default="shallow", choices=list(torsos))
    add("--use_lstm", action=toggle, default=False, help="a recurrent core")
    add(
        "--precision",
        default="auto",
        choices=["auto", "fp32", "bf16"],
        help="of the image encoders; auto: bf16 if the hardware computes in it",
    )

    add = parser.add_argument_group("layout").add_argument
    add("--num_actors", type=int, default=2, help="actor processes")
    add("--batch_size", type=int, default=8, help="rollouts a learner batch")
    add("--unroll_length", type=int, default=20, help="steps a rollout")
    add("--disable_cuda", action=toggle, default=False, help="use no GPU")
    add("--learner_device", help="such as cuda:1 (default: the first GPU, if any)")

    add = parser.add_argument_group("loss").add_argument
    add("--entropy_cost", type=float, default=0.01)
    add("--baseline_cost", type=float, default=0.5)
    add("--discounting", type=float, default=0.99)
    add("--reward_clipping", default="abs_one", choices=["abs_one", "none"])
    add("--clip_rho", type=float, default=1.0, help="V-trace's ρ̄ (inf: none)")
    add("--clip_pg_rho", type=float, default=1.0, help="ρ̄ of the policy gradient")
    add("--clip_c", type=float, default=1.0, help="V-trace's c̄, of the trace")
    add("--trace_decay", type=float, default=1.0, help="V-trace's λ")

    add = parser.add_argument_group("optimizer").add_argument
    add("--learning_rate", type=float, default=0.0006)
    add("--alpha", type=float, default=0.99, help="RMSProp smoothing")
    add("--momentum", type=float, default=0.0, help="RMSProp momentum")
    add("--epsilon", type=float, default=0.01, help="RMSProp epsilon")
    add("--grad_norm_clipping", type=float, default=40.0)

    add = parser.add_argument_group("test").add_argument
    add("--num_test_episodes", type=int, default=10, help="games to play")
    add("--greedy", action="store_true", help="the likeliest action, not a sample")
    add("--video", help="record the test to this .mp4 file")
    return parser


ATARI = "Atari"  # the title of the flags that other environments ignore


def add_environment_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say which environments there are and how they behave.

    PolyBeast's learner refuses environment servers that were started with others.
    """
    toggle = argparse.BooleanOptionalAction
    add = parser.add_argument_group("environment").add_argument
    add("--env", default="PongNoFrameskip-v4", help="a Gymnasium id or module:Class")
    add = parser.add_argument_group(ATARI).add_argument
    add(
        *("--atari_backend", "--envs"),
        default="native",
        choices=["native", "python"],
        help="Atari through ale-py's vector environment or through Python wrappers",
    )
    add("--frame_skip", type=int, default=4, help="Atari: frames an action lasts")
    add("--noop_max", type=int, default=30, help="Atari: most no-ops at a game's start")
    add("--sticky_actions", type=float, default=0.0, help="Atari: chance of repeating")
    add("--full_action_space", action=toggle, default=False, help="Atari: 18 actions")
    add(
        "--life_loss",
        action=toggle,
        default=True,
        help="Atari: a lost life ends the training episode",
    )
    add(
        "--max_episode_frames",
        type=int,
        default=108_000,
        help="Atari: frames after which a game is truncated",
    )


def environment_flags(is_atari: bool) -> list[argparse.Action]:
    """What add_environment_flags declares, without Atari's if it has no effect."""
    parser = argparse.ArgumentParser(add_help=False)
    add_environment_flags(parser)
    groups = [g for g in parser._action_groups if is_atari or g.title != ATARI]
    return [action for group in groups for action in group._group_actions]


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None = None,
    saved: dict[str, Any] | None = None,
) -> Flags:
    """Parses argv.

    The result is not frozen yet, so that the caller can resolve what depends on others.

    Args:
      saved: flags of a checkpoint, which win over the defaults and over the preset that
        the checkpoint has too.

    Raises:
      FlagError: a saved flag has a value that it can't have.
    """
    flags = parser.parse_args(argv, Flags())
    typed = _parse_typed(parser, argv)
    preset = PRESETS.get(flags.preset, {}) if flags.preset else {}
    saved = {k: v for k, v in (saved or {}).items() if k not in OF_ONE_START}
    for action in parser._actions:
        name = action.dest
        if name in saved and not _fits(action, saved[name]):
            raise FlagError(
                f"the checkpoint's flag {name} is {saved[name]!r}, which can't be: the "
                "file was written by another program, or is damaged"
            )
    if saved and "preset" in typed and flags.preset != saved.get("preset"):
        typed = preset | typed  # a new preset is as good as typed
    elif saved:
        preset = PRESETS.get(saved.get("preset") or "", {})
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
    """The flags that argv has, without any defaults."""
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
    """Whether a flag can have this value, of a checkpoint."""
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
      FlagError: they name no folder.
    """
    savedir = os.path.expanduser(flags.savedir)
    if savedir.startswith("~"):
        raise FlagError(
            f"--savedir {flags.savedir}: the home folder is not known. Set HOME, or "
            "give another --savedir"
        )
    flags.savedir = savedir
    if not flags.xpid:  # random digits: a script may start several runs in a second
        flags.xpid = (
            f"{time.strftime('torchbeast-%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        )
    if os.sep in flags.xpid or flags.xpid in (".", "..", "latest"):
        raise FlagError(f"--xpid names a folder in --savedir, got {flags.xpid!r}")


def check_ranges(flags: argparse.Namespace) -> None:
    """Raises FlagError if a number is out of its range; None stays open."""
    for name, value in vars(flags).items():
        allowed = RANGES.get(name)
        if allowed and value is not None and value not in allowed:
            raise FlagError(f"--{name} must be {allowed}, got {value}")


def resolve(flags: Flags) -> Flags:
    """Fills in what depends on the machine or the clock, and checks the rest.

    Raises:
      FlagError: a value can't work; the message says what is allowed.
    """
    resolve_folder(flags)
    check_ranges(flags)
    steps = flags.batch_size * flags.unroll_length
    if flags.mode == "train" and steps > flags.total_steps:
        raise FlagError(
            f"one batch has {steps:,} steps (--batch_size {flags.batch_size} times "
            f"--unroll_length {flags.unroll_length}), more than --total_steps "
            f"{flags.total_steps:,}: there is nothing to learn from. Raise "
            "--total_steps or make the batch smaller"
        )
    if flags.mode == "train" and flags.video:
        raise FlagError(
            f"--video {flags.video} records a test, not the training: add --mode test"
        )
    if flags.precision == "auto":
        flags.precision = "bf16" if fast_bf16(learner_device(flags)) else "fp32"
    return flags


def learner_device(flags: Flags) -> torch.device:
    """--learner_device; by default the first GPU, unless there is none.

    Raises:
      FlagError: it is not there.
    """
    return _device(flags, "learner_device", 0)


def actor_device(flags: Flags) -> torch.device:
    """--actor_device; by default the second GPU, or else the learner's device.

    Raises:
      FlagError: it is not there.
    """
    return _device(flags, "actor_device", 1)


def _device(flags: Flags, name: str, gpu: int) -> torch.device:
    import torch

    given = getattr(flags, name, None)
    gpus = 0 if flags.disable_cuda else torch.cuda.device_count()
    if not given:
        if name == "actor_device" and (gpus < 2 or flags.learner_device):
            return learner_device(flags)
        return torch.device("cuda", gpu) if gpus else torch.device("cpu")
    try:
        device = torch.device(given)
    except RuntimeError as error:
        raise FlagError(f"--{name} {given}: {error}") from error
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise FlagError(
            f"--{name} {given}: there are {gpus} GPUs"
            + (" with --disable_cuda" if flags.disable_cuda else "")
        )
    if device.type not in ("cuda", "cpu"):
        raise FlagError(f"--{name} must be cpu, cuda or cuda:N, got {given}")
    return device


def fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies matrices in bfloat16."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))


def left_open(before: dict[str, Any], flags: Flags) -> list[str]:
    """The flags that were filled in: they follow from the machine and from others.

    Args:
      before: the flags as they were before they were resolved.
    """
    return sorted(
        name
        for name, value in flags.as_dict().items()
        if before.get(name) in (None, "auto") and value != before.get(name)
    )


def changed(
    saved: dict[str, Any], flags: Flags, free: set[str] = FREE_TO_CHANGE
) -> dict[str, tuple[Any, Any]]:
    """Flags that differ from those of a checkpoint: {name: (then, now)}."""
    now = flags.as_dict()
    return {
        name: (saved.get(name), now.get(name))
        for name in sorted((saved.keys() | now.keys()) - free)
        if saved.get(name) != now.get(name)
    }


def describe_changes(changes: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"--{name} {a} -> {b}" for name, (a, b) in changes.items())
