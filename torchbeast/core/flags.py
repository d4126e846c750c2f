"""Command-line flags: declared once, resolved once, then frozen.

A preset is a named set of flags. The order of precedence: the command line, then the
preset, then the defaults.

Importing this loads no torch: environment servers parse flags too.
"""

from __future__ import annotations

import argparse
import os
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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

# Flags that may differ when a run is resumed: they don't change what it learns. Some
# are of one variant only.
FREE_TO_CHANGE = {
    *("mode", "savedir", "preset", "allow_flag_changes", "disable_checkpoint"),
    *("tensorboard", "write_profiler_trace", "checkpoint_interval"),
    *("actor_timeout", "video", "num_test_episodes", "greedy"),
    # Where things run, and how they find each other.
    *("learner_device", "actor_device", "disable_cuda", "num_inference_threads"),
    *("pipes_basename", "server_addresses", "listen", "bind", "join"),
    *("tls_cert", "tls_key", "tls_ca", "tls_server_name", "token_file", "insecure"),
    *("connect_timeout", "max_restarts", "num_actions"),
}


class FlagError(ValueError):
    """A flag has a value that can't work."""


class Flags(argparse.Namespace):
    """Flags that can't be changed once freeze() was called."""

    def freeze(self) -> Flags:
        self.__dict__["frozen"] = True
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("frozen"):
            raise AttributeError(
                f"flags are frozen: {name} can't become {value!r} during the run"
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self.__dict__.get("frozen"):
            raise AttributeError(f"flags are frozen: {name} can't go during the run")
        super().__delattr__(name)

    def replace(self, **changes: Any) -> Flags:
        """A frozen copy with other values."""
        return Flags(**{**self.as_dict(), **changes}).freeze()

    def as_dict(self) -> dict[str, Any]:
        return {k: v for k, v in sorted(vars(self).items()) if k != "frozen"}


def make_parser(description: str) -> argparse.ArgumentParser:
    """The flags that both variants share."""
    from torchbeast.model import TORSOS

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
    add("--sync", action="store_true", help="reproducible: actors and learner in turn")
    add(
        "--allow_flag_changes",
        action="store_true",
        help="resume a run although its flags differ",
    )
    add("--disable_checkpoint", action="store_true", help="save no checkpoint")
    add(
        "--checkpoint_interval",
        type=float,
        default=600.0,
        help="seconds between checkpoints",
    )
    add("--tensorboard", action="store_true", help="write TensorBoard event files too")
    add(
        "--write_profiler_trace",
        action="store_true",
        help="profile some updates of the learner's process into trace.json",
    )

    add_environment_flags(parser)

    add = parser.add_argument_group("model").add_argument
    add("--model", default="shallow", choices=list(TORSOS))
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
    add("--disable_cuda", action="store_true", help="use no GPU")
    add("--learner_device", help="such as cuda:1 (default: the first GPU, if any)")

    add = parser.add_argument_group("loss").add_argument
    add("--entropy_cost", type=float, default=0.01)
    add("--baseline_cost", type=float, default=0.5)
    add("--discounting", type=float, default=0.99)
    add("--reward_clipping", default="abs_one", choices=["abs_one", "none"])

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


def add_environment_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say which environments there are and how they behave."""
    toggle = argparse.BooleanOptionalAction
    add = parser.add_argument_group("environment").add_argument
    add("--env", default="PongNoFrameskip-v4", help="a Gymnasium id or module:Class")
    add(
        "--envs",
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


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None = None,
    defaults: dict[str, Any] | None = None,
) -> Flags:
    """Parses argv; defaults (of a checkpoint) win over the parser's and the preset's.

    The result is not frozen yet, so that the caller can resolve what depends on others.
    """
    preset = parser.parse_known_args(argv)[0].preset
    known = {action.dest for action in parser._actions}
    parser.set_defaults(**PRESETS.get(preset, {}))
    parser.set_defaults(**{k: v for k, v in (defaults or {}).items() if k in known})
    return parser.parse_args(argv, namespace=Flags())


def resolve(flags: Flags) -> Flags:
    """Fills in what depends on the machine or the clock, and checks the rest.

    Raises:
      FlagError: a value can't work; the message says what is allowed.
    """
    flags.savedir = os.path.expanduser(flags.savedir)
    if not flags.xpid:  # random digits: a script may start several runs in a second
        flags.xpid = (
            f"{time.strftime('torchbeast-%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        )
    if os.sep in flags.xpid or flags.xpid in (".", "..", "latest"):
        raise FlagError(f"--xpid names a folder in --savedir, got {flags.xpid!r}")
    at_least_one = (
        *("total_steps", "num_actors", "batch_size", "unroll_length", "frame_skip"),
        *("num_test_episodes", "max_episode_frames"),
    )
    at_least_zero = ("seed", "noop_max", "learning_rate", "epsilon", "momentum")
    for least, names in ((1, at_least_one), (0, at_least_zero)):
        for name in names:
            value = getattr(flags, name)
            if value is not None and not value >= least:  # also refuses NaN
                raise FlagError(f"--{name} must be at least {least}, got {value}")
    for name in ("sticky_actions", "discounting", "alpha"):
        if not 0 <= getattr(flags, name) <= 1:
            raise FlagError(f"--{name} must be in [0, 1], got {getattr(flags, name)}")
    if not flags.grad_norm_clipping > 0:
        raise FlagError(
            "--grad_norm_clipping must be more than 0 (inf: no clipping), got "
            f"{flags.grad_norm_clipping}"
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


def changed(saved: dict[str, Any], flags: Flags) -> dict[str, tuple[Any, Any]]:
    """Flags that differ from those of a checkpoint: {name: (then, now)}."""
    now = flags.as_dict()
    # The number of threads depends on the machine, and changes how sums are rounded.
    free = FREE_TO_CHANGE if flags.sync else FREE_TO_CHANGE | {"torch_threads"}
    return {
        name: (saved.get(name), now.get(name))
        for name in sorted((saved.keys() | now.keys()) - free)
        if saved.get(name) != now.get(name)
    }
