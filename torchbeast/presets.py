"""--preset: named sets of flags.

A preset sets every flag that determines what a run learns, also if it has the default
value: so a later change of the defaults does not change the preset. It leaves out flags
that fit the run to the machine, unless the preset depends on them.
"""

import argparse
import math
from typing import Any

# Espeholt et al. 2018, appendix G, shallow model without LSTM.
_IMPALA: dict[str, Any] = {
    "model": "shallow",
    "use_lstm": False,
    "normalize_observations": False,
    "normalize_rewards": False,
    "unroll_length": 20,
    "batch_size": 32,
    "updates_per_batch": 1,
    "minibatches": 1,
    "discounting": 0.99,
    "baseline_cost": 0.5,
    "entropy_cost": 0.01,
    "reward_clipping": "abs_one",
    "clip_rho": 1.0,
    "clip_pg_rho": 1.0,
    "clip_c": 1.0,
    "trace_decay": 1.0,
    "normalize_advantages": False,
    "clip_ratio": math.inf,
    "rollouts": "fixed",
    "replay_ratio": 0.0,
    "optimizer": "rmsprop",
    "learning_rate": 0.0006,
    "alpha": 0.99,
    "momentum": 0.0,
    "epsilon": 0.01,
    "grad_norm_clipping": 40.0,
    "total_steps": 50_000_000,
    "frame_skip": 4,
    "noop_max": 30,
    "sticky_actions": 0.0,
    "full_action_space": False,
    "life_loss": True,
    "max_episode_frames": 108_000,
}

# What the presets with Adam share.
_ADAM: dict[str, Any] = {
    "num_actors": 2,
    "model": "shallow",
    "use_lstm": False,
    "normalize_observations": False,
    "normalize_rewards": False,
    "discounting": 0.99,
    "reward_clipping": "none",
    "clip_rho": 1.0,
    "clip_pg_rho": 1.0,
    "clip_c": 1.0,
    "trace_decay": 0.95,
    "rollouts": "fixed",
    "replay_ratio": 0.0,
    "optimizer": "adam",
    "alpha": 0.99,  # of RMSProp; not used
    "momentum": 0.0,  # of RMSProp; not used
    "epsilon": 0.00001,
    "grad_norm_clipping": 40.0,
}

# The command line wins over these.
PRESETS: dict[str, dict[str, Any]] = {
    "impala-atari": _IMPALA,
    "impala2018": _IMPALA,  # its older name
    # Machado et al. 2018: sticky actions, all 18 actions, whole games.
    "sticky-atari": {
        **_IMPALA,
        "noop_max": 0,
        "sticky_actions": 0.25,
        "full_action_space": True,
        "life_loss": False,
    },
    # Schmitt et al. 2019: 7 replayed rollouts for each online one. They keep 10 million
    # steps, which need 71 GB; this is a tenth.
    "laser-atari": {
        **_IMPALA,
        "batch_size": 4,
        "replay_size": 1_000_000,
        "replay_ratio": 7.0,
        "learn_start": 20_000,
        "kl_threshold": 0.3,
    },
    "minatar": {
        **_ADAM,
        "env": "MinAtar/Breakout-v1",
        "envs_per_actor": 16,
        "unroll_length": 20,
        "batch_size": 16,
        "updates_per_batch": 4,
        "minibatches": 1,
        "baseline_cost": 0.5,
        "entropy_cost": 0.02,
        "normalize_advantages": False,
        "clip_ratio": math.inf,
        "learning_rate": 0.001,
        "total_steps": 10_000_000,
    },
    # PPO's scaled advantages and clipping. The values of CartPole reach 100: the small
    # baseline_cost keeps their loss from filling the gradient.
    "classic-control": {
        **_ADAM,
        "env": "CartPole-v1",
        "envs_per_actor": 8,
        "unroll_length": 32,
        "batch_size": 8,
        "updates_per_batch": 4,
        "minibatches": 1,
        "baseline_cost": 0.01,
        "entropy_cost": 0.01,
        "normalize_advantages": True,
        "clip_ratio": 0.2,
        "learning_rate": 0.001,
        "total_steps": 500_000,
    },
    # Continuous control, with PPO's clipping, normalization and minibatches. Few
    # environments keep the policy lag small.
    "mujoco": {
        **_ADAM,
        "env": "HalfCheetah-v5",
        "envs_per_actor": 4,
        "normalize_observations": True,
        "normalize_rewards": True,
        "unroll_length": 32,
        "batch_size": 8,
        "updates_per_batch": 16,
        "minibatches": 4,
        "baseline_cost": 0.5,
        "entropy_cost": 0.0,
        "normalize_advantages": True,
        "clip_ratio": 0.2,
        "learning_rate": 0.0003,
        "total_steps": 1_000_000,
    },
}

# Values for flags that are newer than a saved run, whatever its preset says now.
BEFORE_THE_FLAG_EXISTED: dict[str, Any] = {
    "optimizer": "rmsprop",
    "updates_per_batch": 1,
    "minibatches": 1,
}

RENAMED = {"sticky": "sticky-atari", "cartpole": "classic-control"}


def preset_name(name: str) -> str:
    """Checks a value of --preset, for argparse."""
    if name in RENAMED:
        raise argparse.ArgumentTypeError(
            f"{name!r} is now named {RENAMED[name]!r}: give --preset {RENAMED[name]}"
        )
    return name


def current_name(name: Any) -> Any:
    """The present name of a preset that a checkpoint names."""
    return RENAMED.get(name, name) if isinstance(name, str) else name


def differences(values: dict[str, Any]) -> dict[str, Any]:
    """Those of a run's flags that differ from its preset; without a preset, {}."""
    preset = PRESETS.get(values.get("preset") or "", {})
    return {k: values[k] for k, x in preset.items() if values.get(k, x) != x}
