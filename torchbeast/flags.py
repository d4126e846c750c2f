"""A run's flags, one typed line each: type, default, help, range and resume.

START: describes one start. FREE: does not change what is learned. TUNE: how to learn
from now on. Only these may change at a resume with --sync; without it, every flag that
fits the checkpoint may. A flag with the default None and a type without None is filled
in by `resolve` or `resolve_layout`. Parts have their own flags. Loads no torch.
"""

import math
from collections.abc import Mapping

from torchbeast.base.flag import (
    AT_LEAST_0,
    AT_LEAST_0_OR_INF,
    BELOW_1,
    COUNT,
    COUNT_OR_0,
    FINITE,
    FREE,
    POSITIVE_OR_INF,
    SECONDS,
    SHARE,
    START,
    STEPS,
    TUNE,
    Flag,
    Group,
    Range,
    Resume,
    Values,
    flag,
    json_object,
)
from torchbeast.presets import PRESETS

WIDTH = Range(math.ulp(0), 64, "above 0 and at most 64")
SEED = Range(0, 2**64 - 1, f"at least 0 and below {2**64}")  # for torch.manual_seed


# fmt: off
class Run(Group):
    title = "run"
    mode: str = flag("train", "test: play games; test_render: also show them", START,
        choices=["train", "test", "test_render"])
    preset: str | None = flag(None, f"set of flags: {', '.join(sorted(PRESETS))}", FREE,
        choices=sorted(PRESETS), metavar="NAME")
    xpid: str = flag(None, "name of the run; if it exists, it is resumed", START)
    savedir: str = flag("~/logs/torchbeast", "directory of the runs", START)
    seed: int = flag(1, "seed of weights, actions and environments", SEED)
    total_steps: int = flag(100_000, "actions of environments to train", STEPS, TUNE)
    sync: bool = flag(False, "reproducible: actors and learner take turns", TUNE)
    trust_checkpoint_env: bool = flag(False,
        "use the code, files and machines that a file of somebody else names", START)
    disable_checkpoint: bool = flag(False, "neither save nor load a checkpoint", START)
    checkpoint_interval: float = flag(600.0, "seconds between checkpoints",
        AT_LEAST_0_OR_INF, FREE)
    suppress_logs: bool = flag(False, "print warnings and errors only", START)
    episodes_for_avg: int = flag(100, "games in the mean that is shown", COUNT, FREE)


class Environment(Group):
    """PolyBeast's learner refuses environment servers with other values."""

    title = "environment"
    env: str = flag("PongNoFrameskip-v4", "a Gymnasium id or module:Class")
    env_kwargs: str | None = flag(None,
        "arguments of the environment", converter=json_object, metavar="JSON")
    wrapper: str | None = flag(None, "what wraps each environment, innermost first",
        metavar="MODULE:FUNCTION[JSON],...")
    mask_actions: bool | None = flag(None, """obey info["action_mask"]""")


class Atari(Group):
    """These have no effect on other environments."""

    title = "Atari"
    atari_backend: str = flag("native", "ale-py's vector environment or ours",
        choices=["native", "python"], alias="envs")
    frame_skip: int = flag(4, "frames per action", COUNT)
    noop_max: int = flag(30, "maximal no-ops at the start of a game", COUNT_OR_0)
    sticky_actions: float = flag(0.0, "probability to repeat an action", SHARE)
    full_action_space: bool = flag(False, "all 18 actions")
    life_loss: bool = flag(True, "a lost life ends the training episode")
    max_episode_frames: int = flag(108_000, "frames of a game, at most", COUNT)


class Model(Group):
    title = "model"
    model: str = flag("shallow",  # the choices: model.CHOICES, which needs torch
        "size of the encoders; --use_resnet means --model deep")
    encoder: str | None = flag(None, "replaces --model", metavar="MODULE:CLASS[JSON]")
    encoder_width: float = flag(1.0, "times as many units in the encoders", WIDTH)
    layer_norm: bool = flag(False, "normalize the layers of the encoders")
    use_lstm: bool = flag(False, "add a recurrent core, see --core")
    core: str = flag("lstm", "lstm, gru or a class", needs="use_lstm",
        metavar="KIND|MODULE:CLASS[JSON]")
    core_size: int = flag(256, "units of a layer of the core", COUNT, needs="use_lstm")
    core_layers: int = flag(1, "layers of the core", COUNT, needs="use_lstm")
    forget_bias: float = flag(0.0, "of the core; 1 or 2 help", FINITE, needs="use_lstm")
    precision: str = flag("auto", "of image encoders", choices=["auto", "fp32", "bf16"])


class Layout(Group):
    title = "layout"
    num_actors: int = flag(2, "actor processes; PolyBeast: streams", COUNT)
    batch_size: int = flag(4, "rollouts per learner batch", COUNT)
    unroll_length: int = flag(20, "steps per rollout", COUNT)
    actor_timeout: float = flag(120.0, "seconds that a step may take", SECONDS, FREE)
    num_learner_threads: int = flag(1, "gathering batches", COUNT, alias="num_threads")
    torch_threads: int = flag(None, "of the learner (default: half the cores)", COUNT)
    disable_cuda: bool = flag(False, "use no GPU", FREE)
    learner_device: str | None = flag(None, "cuda:1, xpu, mps (default: a GPU)", FREE)
    compile: str | None = flag(None, "use torch.compile in this mode",
        FREE, choices=["default", "reduce-overhead", "max-autotune"])


class Loss(Group):
    title = "loss"
    loss: str | None = flag(None, "replaces the loss", metavar="MODULE:FUNCTION[JSON]")
    entropy_cost: float = flag(0.01, "weight of the entropy bonus", FINITE, TUNE)
    final_entropy_cost: float | None = flag(None, "its value at the end", FINITE, TUNE)
    baseline_cost: float = flag(0.5, "weight of the value loss", AT_LEAST_0, TUNE)
    discounting: float = flag(0.99, "discount factor γ", SHARE, TUNE)
    reward_clipping: str = flag("abs_one", "abs_one clips rewards to [-1, 1]", TUNE,
        choices=["abs_one", "none"])
    clip_rho: float = flag(1.0, "V-trace's ρ̄ (inf: no clipping)", POSITIVE_OR_INF, TUNE)
    clip_pg_rho: float = flag(1.0, "ρ̄ of the policy gradient", POSITIVE_OR_INF, TUNE)
    clip_c: float = flag(1.0, "V-trace's c̄", POSITIVE_OR_INF, TUNE)
    trace_decay: float = flag(1.0, "V-trace's λ", SHARE, TUNE)
    normalize_advantages: bool = flag(False, "scale to mean 0 and deviation 1", TUNE)
    clip_ratio: float = flag(math.inf, "PPO's ε (inf: none)", POSITIVE_OR_INF, TUNE)
    max_policy_lag: int | None = flag(None,
        "leave out steps of weights that are more updates old", COUNT_OR_0, TUNE)


class Optimizer(Group):
    title = "optimizer"
    optimizer: str = flag("rmsprop", "rmsprop: as in TensorFlow, ε under the root",
        choices=["rmsprop", "adam"])
    learning_rate: float = flag(0.0007, "at the start", AT_LEAST_0, TUNE)
    learning_rate_schedule: str = flag("linear", "linear, cosine: falls to 0", TUNE,
        choices=["linear", "cosine", "constant"])
    updates_per_batch: int = flag(1, "updates per batch", COUNT, TUNE)
    minibatches: int = flag(1, "random parts of a batch, one per update", COUNT, TUNE)
    alpha: float = flag(0.99, "decay of RMSProp's mean square", SHARE, TUNE)
    momentum: float = flag(0.0, "RMSProp's momentum", BELOW_1, TUNE)
    epsilon: float = flag(1e-6, "the optimizer's ε", AT_LEAST_0, TUNE)
    epsilon_outside_root: bool = flag(False, "g / (√v + ε) and not g / √(v + ε)", TUNE)
    grad_norm_clipping: float = flag(40.0, "largest L2 norm", POSITIVE_OR_INF, TUNE)


class MonoBeast(Group):
    title = "MonoBeast"
    envs_per_actor: int = flag(None, "environments of an actor (default: 8)", COUNT)
    num_buffers: int = flag(None, "slots for rollouts in shared memory", COUNT)


class Flags(Values, Run, Environment, Atari, Model, Layout, Loss, Optimizer,
        MonoBeast):
    """The typed flags of a script, which has those of some groups only."""


# fmt: on
TRAINING = (Run, Environment, Atari, Model, Layout, Loss, Optimizer)
GROUPS = (*TRAINING, MonoBeast)
DECLARED = {k: x for group in GROUPS for k, x in group.declared().items()}


def of_resume(declared: Mapping[str, Flag], *classes: Resume) -> frozenset[str]:
    """The flags that a resumed run may change for these reasons."""
    return frozenset(name for name, x in declared.items() if x.resume in classes)
