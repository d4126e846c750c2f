"""LASER: learning from replayed episodes, too (Schmitt et al. 2019).

episodes.py stores and replays them, frames.py each frame once; memory.py holds them and
saves them with a checkpoint; mixer.py adds them to batches.
"""

import math
from typing import Any

from torchbeast.base.errors import FlagError
from torchbeast.base.flag import (
    AT_LEAST_0,
    AT_LEAST_0_OR_INF,
    COUNT_OR_0,
    FREE,
    TUNE,
    Group,
    flag,
)

NEEDS = "replay_ratio"


# fmt: off
class Flags(Group):
    title = "replay (LASER)"
    replay_size: int = flag(0, "steps that the replay holds", COUNT_OR_0, needs=NEEDS)
    replay_ratio: float = flag(0.0, "replayed rollouts per new rollout", AT_LEAST_0)
    learn_start: int = flag(None,
        "learn when the replay has this many steps (default: 10,000, at most half "
        "of the replay)", COUNT_OR_0, needs=NEEDS)
    kl_threshold: float = flag(0.3,
        "a replayed step counts if KL(π ‖ π̃) is at most this, in nats",
        AT_LEAST_0_OR_INF, TUNE, needs=NEEDS)
    replay_file: str | None = flag(None,
        "keep the replay in this file; it is deleted when the run ends", FREE,
        needs=NEEDS)
    save_replay: bool = flag(False, "save the replay with each checkpoint", FREE,
        needs=NEEDS)
# fmt: on


def resolve(flags: Any) -> None:
    """Fills in --learn_start. Raises FlagError if a run can't train with the flags."""
    if flags.learn_start is None:
        flags.learn_start = min(10_000, flags.replay_size // 2)
    if not flags.replay_ratio or flags.mode != "train":
        return
    ratio, B, T = flags.replay_ratio, flags.batch_size, flags.unroll_length
    for least, why in (
        (8 * T, f"8 times --unroll_length {T}"),
        (
            math.ceil(ratio * B * T),
            f"--replay_ratio {ratio:g} times --batch_size {B} and --unroll_length {T}",
        ),
        (flags.learn_start, f"--learn_start {flags.learn_start:,}"),
    ):
        if flags.replay_size < least:
            raise FlagError(
                f"--replay_size {flags.replay_size:,} is too small: {why} needs at "
                f"least {least:,} steps"
            )
    for name in ("num_learner_threads", "minibatches"):
        if (value := getattr(flags, name)) > 1:
            raise FlagError(
                f"--{name} {value} can't be used with --replay_ratio {ratio:g}: the "
                "replay takes whole batches, in order. Give --{name} 1"
            )
    if flags.sync and not flags.disable_checkpoint:
        raise FlagError(
            "--sync resumes exactly, which a run with a replay can't: add "
            "--disable_checkpoint, or leave out --sync"
        )
    if flags.save_replay and flags.disable_checkpoint:
        raise FlagError("--save_replay has no effect with --disable_checkpoint")


def attach(run: Any) -> Any:
    if not run.learner.mixer:
        return None
    from torchbeast.extras.replay.memory import Saved

    return Saved(run)
