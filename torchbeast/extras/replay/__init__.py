"""LASER: learning from replayed episodes, too (Schmitt et al. 2019).

mixer.py adds them to batches, episodes.py and frames.py store them, memory.py holds
them and saves them with a checkpoint.
"""

import math
from typing import Any

from torchbeast.base import flag as f
from torchbeast.base.errors import FlagError
from torchbeast.base.flag import Group, flag

NEEDS = "replay_ratio"


# fmt: off
class Flags(Group):
    title = "replay (LASER)"
    replay_size: int = flag(0, "steps that the replay holds", f.COUNT_OR_0, needs=NEEDS)
    replay_ratio: float = flag(0.0, "replayed rollouts per new rollout", f.AT_LEAST_0)
    learn_start: int = flag(None,
        "learn when the replay has this many steps (default: 10,000, at most half "
        "of the replay)", f.COUNT_OR_0, needs=NEEDS)
    kl_threshold: float = flag(0.3,
        "a replayed step counts if KL(π ‖ π̃) is at most this, in nats",
        f.AT_LEAST_0_OR_INF, f.TUNE, needs=NEEDS)
    replay_file: str | None = flag(None,
        "keep the replay in this file; it is deleted when the run ends", f.FREE,
        needs=NEEDS)
    save_replay: bool = flag(False, "save the replay with each checkpoint", f.FREE,
        needs=NEEDS)
# fmt: on


def resolve(flags: Any) -> None:
    """Fills in --learn_start. Raises FlagError if a run can't train with the flags."""
    if flags.learn_start is None:
        flags.learn_start = min(10_000, flags.replay_size // 2)
    if not flags.replay_ratio or flags.mode != "train":
        return
    T, ratio = flags.unroll_length, flags.replay_ratio
    batch = math.ceil(ratio * flags.batch_size * T)  # replayed steps
    if flags.replay_size < (least := max(8 * T, batch, flags.learn_start)):
        raise FlagError(
            f"--replay_size {flags.replay_size:,} is too small: it must be at least "
            f"--learn_start, 8 times --unroll_length and --replay_ratio {ratio:g} "
            f"times a batch, that is {least:,} steps"
        )
    if flags.num_learner_threads > 1 or flags.minibatches > 1:
        raise FlagError("--replay_ratio needs --num_learner_threads 1 --minibatches 1")
    if flags.sync and not flags.disable_checkpoint:
        raise FlagError("a replay needs --disable_checkpoint with --sync")


def attach(run: Any) -> Any:
    if not run.learner.mixer:
        return None
    from torchbeast.extras.replay.memory import Saved

    return Saved(run)
