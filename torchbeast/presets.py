"""--preset: differences from the defaults in flags.py, see flagset.preset_flags."""

from typing import Any

# Espeholt et al. 2018, appendix G, shallow model without LSTM.
_IMPALA: dict[str, Any] = {
    "batch_size": 32,
    "learning_rate": 0.0006,
    "epsilon": 0.01,
    "total_steps": 50_000_000,
}

_ADAM: dict[str, Any] = {
    "num_actors": 2,
    "reward_clipping": "none",
    "trace_decay": 0.95,
    "optimizer": "adam",
    "learning_rate": 0.001,
    "epsilon": 0.00001,
    "updates_per_batch": 4,
}

# Schulman et al. 2017: scaled advantages and clipping.
_PPO: dict[str, Any] = {
    **_ADAM,
    "unroll_length": 32,
    "batch_size": 8,
    "normalize_advantages": True,
    "clip_ratio": 0.2,
}

PRESETS: dict[str, dict[str, Any]] = {
    "impala-atari": _IMPALA,
    "impala2018": _IMPALA,  # its older name
    # Machado et al. 2018: sticky actions, all 18 actions, whole games. The optimizer's
    # step is that of Cleanba (Huang et al. 2023); batch and network are not.
    "sticky-atari": {
        **_IMPALA,
        "epsilon_outside_root": True,
        "noop_max": 0,
        "sticky_actions": 0.25,
        "full_action_space": True,
        "life_loss": False,
    },
    # Asynchronous PPO (Schulman et al. 2017, table 5, and what implementations add): 8
    # environments, 4 passes in 4 minibatches of 256 steps. Their mean loss has 0.5 for
    # grad_norm_clipping; ours is the sum over the 256 steps.
    "appo-atari": {
        **_PPO,
        "reward_clipping": "abs_one",
        "envs_per_actor": 4,
        "unroll_length": 128,
        "clip_ratio": 0.1,
        "learning_rate": 0.00025,
        "updates_per_batch": 16,
        "minibatches": 4,
        "grad_norm_clipping": 128.0,
        "total_steps": 10_000_000,
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
        "batch_size": 16,
        "entropy_cost": 0.02,
        "clip_ratio": 0.2,  # without it, single batches can destroy the policy
        "total_steps": 10_000_000,
    },
    # The values of CartPole reach 100: the small baseline_cost keeps their loss from
    # filling the gradient.
    "classic-control": {
        **_PPO,
        "env": "CartPole-v1",
        "num_actors": 1,
        "envs_per_actor": 16,
        "baseline_cost": 0.01,
        "total_steps": 500_000,
    },
    # Continuous control. Smaller batches learned less in three of four tasks.
    "mujoco": {
        **_PPO,
        "env": "HalfCheetah-v5",
        "envs_per_actor": 4,
        "normalize_observations": True,
        "normalize_rewards": True,
        "batch_size": 64,
        "updates_per_batch": 160,
        "minibatches": 32,
        "entropy_cost": 0.0,
        "learning_rate": 0.0003,
        "total_steps": 1_000_000,
    },
}
