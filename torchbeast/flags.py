"""A run's flags, one typed line each: type, default, help, range and resume.

    entropy_cost: float = flag(0.01, "weight of the entropy bonus", FINITE, TUNE)

Parts declare their own: polybeast/flags.py, extras/.

START: describes one start. FREE: does not change what is learned. TUNE: how to learn
from now on. Only these may change at a resume with --sync; without it, every flag that
fits the checkpoint may. flagset.preset_flags says what a preset sets.

A flag with the default None and a type without None is filled in by `resolve` or by
`resolve_layout` of a script. Importing this module does not load torch, because
environment servers parse flags too.
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
    mode: str = flag("train",
        "test: play games with a checkpoint; test_render: also show them", START,
        choices=["train", "test", "test_render"])
    preset: str | None = flag(None,
        "a named set of flags", FREE, choices=sorted(PRESETS))
    config: str | None = flag(None,
        "flags from a .toml file or a run's meta.json; the command line wins",
        START, metavar="FILE")
    xpid: str = flag(None, "name of the run; if it exists, it is resumed", START)
    init_from: str | None = flag(None,
        "start with the weights of another run, as far as they fit",
        metavar="XPID|FILE")
    savedir: str = flag("~/logs/torchbeast", "directory of the runs", START)
    seed: int = flag(1, "seed of weights, actions and environments", SEED)
    total_steps: int = flag(100_000,
        "environment steps to train; a step is an action of one environment",
        STEPS, TUNE)
    sync: bool = flag(False, "reproducible: actors and learner take turns", TUNE)
    trust_checkpoint_env: bool = flag(False,
        "use what another user's checkpoint or a file of --config names: code (--env "
        "module:Class, --wrapper, ...), its arguments, files and machines", START)
    disable_checkpoint: bool = flag(False, "neither save nor load a checkpoint", START)
    checkpoint_interval: float = flag(600.0, "seconds between checkpoints",
        AT_LEAST_0_OR_INF, FREE)
    suppress_logs: bool = flag(False, "print warnings and errors only", START)
    episodes_for_avg: int = flag(100, "games in the mean return that is printed", COUNT,
        FREE)


class Environment(Group):
    """PolyBeast's learner refuses environment servers with other values."""

    title = "environment"
    env: str = flag("PongNoFrameskip-v4", "a Gymnasium id or module:Class")
    env_kwargs: str | None = flag(None,
        """arguments of the environment, such as '{"size": 8}'""",
        converter=json_object, metavar="JSON")
    wrapper: str | None = flag(None,
        "functions or classes that wrap each environment, the innermost first; "
        "a JSON object of arguments may follow each",
        metavar="MODULE:FUNCTION[JSON],...")
    mask_actions: bool | None = flag(None,
        """never take an action that info["action_mask"] forbids""")


class Atari(Group):
    """These have no effect on other environments."""

    title = "Atari"
    atari_backend: str = flag("native",
        "ale-py's vector environment (C++) or the Python wrappers",
        choices=["native", "python"], alias="envs")
    frame_skip: int = flag(4, "frames per action", COUNT)
    noop_max: int = flag(30, "maximal no-ops at the start of a game", COUNT_OR_0)
    sticky_actions: float = flag(0.0, "probability of repeating the previous action",
        SHARE)
    full_action_space: bool = flag(False, "all 18 actions")
    life_loss: bool = flag(True, "a lost life ends the training episode")
    max_episode_frames: int = flag(108_000, "frames after which a game is truncated",
        COUNT)


class Model(Group):
    title = "model"
    model: str = flag("shallow",  # the choices: model.CHOICES, which needs torch
        "size of the encoders: the torso for images, the MLP for vectors. "
        "--use_resnet means --model deep")
    encoder: str | None = flag(None,
        "a class that encodes the whole observation instead; it gets the space, "
        "--encoder_width, --layer_norm and the JSON object",
        metavar="MODULE:CLASS[JSON]")
    encoder_width: float = flag(1.0,
        "times as many channels and units in the encoders", WIDTH)
    layer_norm: bool = flag(False, "normalize the layers of the encoders")
    use_lstm: bool = flag(False, "add a recurrent core, see --core")
    core: str = flag("lstm", "kind of the recurrent core: lstm, gru or a class",
        metavar="KIND|MODULE:CLASS[JSON]")
    core_size: int = flag(256, "units of each layer of the recurrent core", COUNT,
        needs="use_lstm")
    core_layers: int = flag(1, "layers of the recurrent core", COUNT,
        needs="use_lstm")
    forget_bias: float = flag(0.0,
        "added to the bias of the gate that keeps the core's state; 1 or 2 help it "
        "to remember from the start", FINITE, needs="use_lstm")
    normalize_observations: bool = flag(False,
        "scale numbers, but not images and categories, by running mean and "
        "deviation; their MLPs then have tanh instead of ReLU")
    precision: str = flag("auto",
        "dtype of the image encoders; auto: bf16 if the hardware supports it",
        choices=["auto", "fp32", "bf16"])


class Layout(Group):
    title = "layout"
    num_actors: int = flag(2,
        "actor processes; PolyBeast: streams, by default one per server, or 4", COUNT)
    batch_size: int = flag(4, "rollouts per learner batch", COUNT)
    unroll_length: int = flag(20, "steps per rollout", COUNT)
    rollouts: str = flag("fixed",
        "episode: the learner cuts rollouts where episodes end",
        choices=["fixed", "episode"])
    actor_timeout: float = flag(120.0,
        "time limit of a step in seconds. MonoBeast: the run fails after it; "
        "PolyBeast: the stream counts as lost", SECONDS, FREE)
    num_learner_threads: int = flag(1,
        "threads that gather batches; one at a time learns", COUNT, alias="num_threads")
    torch_threads: int = flag(None,
        "CPU threads per torch operation of the learner (default: half the cores)",
        COUNT)
    disable_cuda: bool = flag(False, "use no GPU", FREE)
    learner_device: str | None = flag(None,
        "for example cuda:1, xpu or mps; default: the first GPU, if any", FREE)
    compile: str | None = flag(None,
        "compile the update and acting with torch.compile in this mode; "
        "reduce-overhead has CUDA graphs",
        FREE, choices=["default", "reduce-overhead", "max-autotune"])


class Loss(Group):
    title = "loss"
    loss: str | None = flag(None,
        "a function that replaces the loss, see docs/forking.md",
        metavar="MODULE:FUNCTION[JSON]")
    entropy_cost: float = flag(0.01, "weight of the entropy bonus", FINITE, TUNE)
    final_entropy_cost: float | None = flag(None,
        "its value at the end, if it changes (linearly) during the run", FINITE, TUNE)
    baseline_cost: float = flag(0.5, "weight of the value loss", AT_LEAST_0, TUNE)
    discounting: float = flag(0.99, "discount factor γ", SHARE, TUNE)
    reward_clipping: str = flag("abs_one", "abs_one clips rewards to [-1, 1]", TUNE,
        choices=["abs_one", "none"])
    normalize_rewards: bool = flag(False,
        "divide rewards by the standard deviation of their discounted sum; then "
        "--reward_clipping has no effect")
    clip_rho: float = flag(1.0, "V-trace's ρ̄ (inf: no clipping)", POSITIVE_OR_INF, TUNE)
    clip_pg_rho: float = flag(1.0, "V-trace's ρ̄ of the policy gradient",
        POSITIVE_OR_INF, TUNE)
    clip_c: float = flag(1.0, "V-trace's c̄", POSITIVE_OR_INF, TUNE)
    trace_decay: float = flag(1.0, "V-trace's λ", SHARE, TUNE)
    normalize_advantages: bool = flag(False,
        "scale the advantages of a batch to mean 0 and standard deviation 1", TUNE)
    clip_ratio: float = flag(math.inf, "PPO's ε (inf: no clipping)", POSITIVE_OR_INF,
        TUNE)


class Optimizer(Group):
    title = "optimizer"
    optimizer: str = flag("rmsprop",
        "rmsprop: as in TensorFlow, with ε under the root by default",
        choices=["rmsprop", "adam"])
    learning_rate: float = flag(0.0007,
        "at the start; see --learning_rate_schedule", AT_LEAST_0, TUNE)
    learning_rate_schedule: str = flag("linear",
        "linear and cosine fall to 0 over --total_steps", TUNE,
        choices=["linear", "cosine", "constant"])
    updates_per_batch: int = flag(1,
        "updates per batch; more updates need fewer steps, but more compute",
        COUNT, TUNE)
    minibatches: int = flag(1,
        "split each batch into this many random parts; an update uses one", COUNT, TUNE)
    alpha: float = flag(0.99, "decay of RMSProp's mean square", SHARE, TUNE)
    momentum: float = flag(0.0, "RMSProp's momentum", BELOW_1, TUNE)
    epsilon: float = flag(1e-6, "the optimizer's ε", AT_LEAST_0, TUNE)
    epsilon_outside_root: bool = flag(False,
        "RMSProp's step is g / (√v + ε) and not g / √(v + ε)", TUNE)
    grad_norm_clipping: float = flag(40.0,
        "largest norm of the gradient (inf: no clipping)", POSITIVE_OR_INF, TUNE)


class Test(Group):
    title = "test"
    num_test_episodes: int = flag(10,
        "games to play, at most --num_actors times --envs_per_actor at once", COUNT,
        START)
    checkpoint: str = flag("model.tar",
        "file in the folder of the run, such as model.best.tar", START)
    greedy: bool = flag(False, "take the most likely action, also in evaluations", FREE)


class MonoBeast(Group):
    title = "MonoBeast"
    serial: bool = flag(False,
        "act and learn in one process and thread, for debuggers and profilers; "
        "sets --num_actors 1", START)
    envs_per_actor: int = flag(None,
        "environments per actor (default: 8, or what --num_buffers allows)", COUNT)
    num_buffers: int = flag(None,
        "slots for rollouts in shared memory (default: one per environment, and "
        "without --sync the larger of --batch_size and --envs_per_actor more)", COUNT)


class Flags(Values, Run, Environment, Atari, Model, Layout, Loss, Optimizer,
        Test, MonoBeast):
    """The typed flags of a script, which has those of some groups only.

    Those of other parts, as of PolyBeast, count as Any.
    """


# fmt: on
TRAINING = (Run, Environment, Atari, Model, Layout, Loss, Optimizer, Test)
GROUPS = (*TRAINING, MonoBeast)
DECLARED: dict[str, Flag] = {
    name: declared for group in GROUPS for name, declared in group.declared().items()
}


def of_resume(declared: Mapping[str, Flag], *classes: Resume) -> frozenset[str]:
    """The flags that a resumed run may change for these reasons."""
    return frozenset(name for name, x in declared.items() if x.resume in classes)
