"""The range of each numeric flag."""

import math
from typing import NamedTuple


class Range(NamedTuple):
    """A closed, half-open or open interval, and its description in words."""

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
        else:
            words.append(f"{'at most' if self.high_included else 'below'} {self.high}")
        return " and ".join(words)


LARGEST_COUNT, LARGEST_STEP = 2**31 - 1, 2**63 - 1

COUNT = Range(1, LARGEST_COUNT)
STEPS = Range(1, LARGEST_STEP)
FINITE = Range(-math.inf, math.inf, False, False)
AT_LEAST_ZERO = Range(0, math.inf, True, False)
SHARE = Range(0, 1)
SECONDS = Range(0, 1e6, False)

RANGES: dict[str, Range] = {
    "total_steps": STEPS,
    "episodes_for_avg": COUNT,
    "seed": Range(0, 2**64, True, False),  # for torch.manual_seed
    "checkpoint_interval": Range(0, math.inf),
    "checkpoint_history": Range(0, LARGEST_COUNT),
    "eval_interval": Range(0, LARGEST_STEP),
    "eval_episodes": COUNT,
    "frame_skip": COUNT,
    "noop_max": Range(0, LARGEST_COUNT),
    "sticky_actions": SHARE,
    "max_episode_frames": COUNT,
    "num_actors": COUNT,
    "batch_size": COUNT,
    "unroll_length": COUNT,
    "replay_size": Range(0, LARGEST_COUNT),
    "replay_ratio": AT_LEAST_ZERO,
    "learn_start": Range(0, LARGEST_COUNT),
    "kl_threshold": Range(0, math.inf),
    "updates_per_batch": COUNT,
    "minibatches": COUNT,
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
    "clip_ratio": Range(0, math.inf, False),  # inf: no clipping
    "trace_decay": SHARE,
    "learning_rate": AT_LEAST_ZERO,
    "alpha": SHARE,
    "momentum": Range(0, 1, True, False),
    "epsilon": AT_LEAST_ZERO,
    "grad_norm_clipping": Range(0, math.inf, False),  # inf: no clipping
    "num_test_episodes": COUNT,
    # PolyBeast only:
    "num_servers": COUNT,
    "max_restarts": Range(0, LARGEST_COUNT),
    "max_env_failures": Range(0, LARGEST_COUNT),
    "connect_timeout": SECONDS,
    "num_inference_threads": COUNT,
    "max_learner_queue_size": COUNT,
    "num_actions": COUNT,
}
