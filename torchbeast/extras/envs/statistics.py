"""Warns of wrappers whose running statistics are in no checkpoint."""

import logging
from typing import Any

from gymnasium.wrappers import NormalizeObservation, NormalizeReward

log = logging.getLogger(__name__)

BETTER = {
    NormalizeObservation: "normalize_observations",
    NormalizeReward: "normalize_rewards",
}


def examine(env: Any) -> None:
    """Looks at the first game of an Environment; once per training and per test."""
    found = env.games[0] if env.games else None
    while found is not None:
        if flag := BETTER.get(type(found)):
            log.warning(
                "--env %s has a %s. Its running statistics are not saved: each actor "
                "has its own, and a resumed run or a test begins without them. Use "
                "--%s, whose statistics are part of the model.",
                *(env.flags.env, type(found).__name__, flag),
            )
        found = getattr(found, "env", None)
