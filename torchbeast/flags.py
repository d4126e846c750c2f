"""The flags that both variants share, and those of environments.

Importing this module does not load torch, because environment servers parse flags too.
"""

import argparse
import json
import math
from collections.abc import Iterable

from torchbeast.presets import PRESETS, preset_name


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
        help="test: play games with a checkpoint; test_render: also show them",
    )
    add(
        "--preset",
        type=preset_name,
        choices=sorted(PRESETS),
        help="a named set of flags",
    )
    add(
        "--config",
        metavar="FILE",
        help="flags from a .toml file or a run's meta.json; the command line wins",
    )
    add("--xpid", help="name of the run; if it exists, it is resumed")
    add(
        "--init_from",
        metavar="XPID|FILE",
        help="start with the weights of another run, as far as they fit",
    )
    add("--savedir", default="~/logs/torchbeast", help="directory of the runs")
    add("--seed", type=int, default=1, help="seed of weights, actions and environments")
    add(
        "--total_steps",
        type=int,
        default=100_000,
        help="environment steps to train; a step is an action of one environment",
    )
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
        default=False,
        help="use what another user's checkpoint or a file of --config names: code "
        "(--env module:Class, --wrapper), its arguments, files and machines",
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
        "--checkpoint_history",
        type=int,
        default=0,
        help="checkpoints to keep, evenly over the run, as model.STEP.tar",
    )
    add(
        "--eval_interval",
        type=int,
        default=0,
        help="steps between evaluations in a process beside the training; 0: none",
    )
    add("--eval_episodes", type=int, default=10, help="games of an evaluation")
    add(
        "--tensorboard",
        action=toggle,
        default=False,
        help="also write TensorBoard event files",
    )
    add("--wandb", metavar="PROJECT", help="also log to Weights & Biases")
    add(
        "--write_profiler_trace",
        action="store_true",
        help="profile some updates of the learner process; writes trace.json",
    )

    add("--suppress_logs", action="store_true", help="print warnings and errors only")
    add(
        "--episodes_for_avg",
        type=int,
        default=100,
        help="games in the mean return that is printed",
    )

    add_environment_flags(parser)

    add = parser.add_argument_group("model").add_argument
    add(
        "--model",
        default="shallow",
        choices=list(torsos),
        help="size of the encoders: the torso for images, the MLP for vectors. "
        "--use_resnet means --model deep",
    )
    add("--use_lstm", action=toggle, default=False, help="add a recurrent core")
    add(
        "--normalize_observations",
        action=toggle,
        default=False,
        help="scale numbers, but not images and categories, by running mean and "
        "deviation; their MLPs then have tanh instead of ReLU",
    )
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
        help="actor processes; PolyBeast: streams, by default one per server",
    )
    add("--batch_size", type=int, default=4, help="rollouts per learner batch")
    add("--unroll_length", type=int, default=20, help="steps per rollout")
    add(
        "--rollouts",
        default="fixed",
        choices=["fixed", "episode"],
        help="episode: the learner cuts rollouts where episodes end",
    )
    add(
        "--actor_timeout",
        type=float,
        default=120.0,
        help="time limit of a step in seconds. MonoBeast: the run fails after it; "
        "PolyBeast: the stream counts as lost",
    )
    add(
        *("--num_learner_threads", "--num_threads"),
        type=int,
        default=1,
        help="threads that gather batches; one at a time learns",
    )
    add(
        "--torch_threads",
        type=int,
        help="CPU threads per torch operation of the learner (default: half the cores)",
    )
    add("--disable_cuda", action=toggle, default=False, help="use no GPU")
    add("--learner_device", help="for example cuda:1; default: the first GPU, if any")

    add = parser.add_argument_group("loss").add_argument
    add("--entropy_cost", type=float, default=0.01, help="weight of the entropy bonus")
    add("--baseline_cost", type=float, default=0.5, help="weight of the value loss")
    add("--discounting", type=float, default=0.99, help="discount factor γ")
    add(
        "--reward_clipping",
        default="abs_one",
        choices=["abs_one", "none"],
        help="abs_one clips rewards to [-1, 1]",
    )
    add(
        "--normalize_rewards",
        action=toggle,
        default=False,
        help="divide rewards by the standard deviation of their discounted sum; then "
        "--reward_clipping has no effect",
    )
    add("--clip_rho", type=float, default=1.0, help="V-trace's ρ̄ (inf: no clipping)")
    add(
        "--clip_pg_rho",
        type=float,
        default=1.0,
        help="V-trace's ρ̄ of the policy gradient",
    )
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
    add(
        "--optimizer",
        choices=("rmsprop", "adam"),
        default="rmsprop",
        help="rmsprop: as in TensorFlow, with ε under the root",
    )
    add(
        "--learning_rate",
        type=float,
        default=0.0007,
        help="at the start; falls linearly to 0 over --total_steps",
    )
    add(
        "--updates_per_batch",
        type=int,
        default=1,
        help="updates per batch; more updates need fewer steps, but more compute",
    )
    add(
        "--minibatches",
        type=int,
        default=1,
        help="split each batch into this many random parts; an update uses one",
    )
    add("--alpha", type=float, default=0.99, help="decay of RMSProp's mean square")
    add("--momentum", type=float, default=0.0, help="RMSProp's momentum")
    add("--epsilon", type=float, default=1e-6, help="the optimizer's ε")
    add(
        "--grad_norm_clipping",
        type=float,
        default=40.0,
        help="largest norm of the gradient (inf: no clipping)",
    )

    add = parser.add_argument_group("replay (LASER)").add_argument
    add("--replay_size", type=int, default=0, help="steps that the replay holds")
    add(
        "--replay_ratio",
        type=float,
        default=0.0,
        help="replayed rollouts per new rollout",
    )
    add(
        "--learn_start",
        type=int,
        help="learn when the replay has this many steps (default: 10,000, at most half "
        "of the replay)",
    )
    add(
        "--kl_threshold",
        type=float,
        default=0.3,
        help="a replayed step counts if KL(π ‖ π̃) is at most this, in nats",
    )
    add(
        "--replay_file",
        help="keep the replay in this file; it is deleted when the run ends",
    )
    add(
        "--save_replay",
        action=toggle,
        default=False,
        help="save the replay with each checkpoint",
    )

    add = parser.add_argument_group("test").add_argument
    add("--num_test_episodes", type=int, default=10, help="games to play")
    add(
        "--checkpoint",
        default="model.tar",
        help="file in the folder of the run, such as model.best.tar",
    )
    add("--greedy", action="store_true", help="take the most likely action")
    add("--video", help="record the test to this .mp4 file, and to --wandb")
    return parser


def json_object(text: str) -> str:
    """Checks a JSON object, for argparse. Returns it with sorted names."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"""{text!r} is not an object, such as '{{"size": 8}}'"""
        )
    return json.dumps(value, sort_keys=True)


ATARI = "Atari"  # title of the group of flags that have no effect on other environments


def add_environment_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that determine the environment.

    PolyBeast's learner refuses environment servers with other values.
    """
    toggle = argparse.BooleanOptionalAction
    add = parser.add_argument_group("environment").add_argument
    add("--env", default="PongNoFrameskip-v4", help="a Gymnasium id or module:Class")
    add(
        "--env_kwargs",
        type=json_object,
        metavar="JSON",
        help="""arguments of the environment, such as '{"size": 8}'""",
    )
    add(
        "--wrapper",
        metavar="MODULE:FUNCTION[JSON],...",
        help="functions or classes that wrap each environment, the innermost first; "
        "a JSON object of arguments may follow each",
    )
    add(
        "--mask_actions",
        action=toggle,
        help="""never take an action that info["action_mask"] forbids""",
    )
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
