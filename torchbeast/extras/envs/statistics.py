"""Warns of wrappers whose running statistics are in no checkpoint."""

import logging
from typing import Any

log = logging.getLogger(__name__)

# What Gymnasium's NormalizeObservation and NormalizeReward have, and a better flag.
BETTER = {"obs_rms": "normalize_observations", "return_rms": "normalize_rewards"}
FIRST = 0, 10_000  # the numbers of the first environments of a training and of a test


def examine(env: Any) -> None:
    """Looks at the wrappers of an Environment, if it is the first one."""
    found = env.games[0] if env.games else env.envs
    while found is not None and env.indices.start in FIRST:
        for name in BETTER.keys() & getattr(found, "__dict__", {}).keys():
            log.warning(
                "--env %s has a %s. Its running statistics are not saved: each actor "
                "has its own, and a resumed run or a test begins without them. Use "
                "--%s, whose statistics are part of the model.",
                *(env.flags.env, type(found).__name__, BETTER[name]),
            )
        found = getattr(found, "env", None)
