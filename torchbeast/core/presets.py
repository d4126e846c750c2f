"""--preset: named sets of flags."""

from typing import Any

# The command line wins over these.
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
