"""The protocol of a run: what makes its scores comparable with others.

It follows from the flags in meta.json or test.json. plot.py and report.py show it.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from torchbeast.base import parts

_ATARI_FLAGS = (
    *("frame_skip", "noop_max", "sticky_actions", "full_action_space", "life_loss"),
    "max_episode_frames",
)
# MinAtar's ids have sticky actions, and these games get more difficult over time. Games
# with -v0 have all actions, those with -v1 only the ones that have an effect.
_MINATAR_STICKY_ACTIONS = 0.1
_MINATAR_RAMPING = ("Asterix", "Seaquest", "SpaceInvaders")


def find_protocol(flags: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The protocol of a run with these flags; None without --env."""
    atari = parts.optional("envs.atari")  # loads the emulator
    values = flags or {}
    if not (env := values.get("env")):
        return None
    arguments = json.loads(values.get("env_kwargs") or "{}")
    protocol: dict[str, Any] = {"env": env}
    if game := atari and atari.atari_game(env):
        protocol = {"env": f"Atari {game}"}  # the same game for each form of the id
        protocol |= {name: values[name] for name in _ATARI_FLAGS if name in values}
    elif env.startswith("MinAtar/"):
        protocol["sticky_actions"] = arguments.pop(
            "sticky_action_prob", _MINATAR_STICKY_ACTIONS
        )
        minimal = arguments.pop("use_minimal_action_set", env.endswith("-v1"))
        protocol["full_action_space"] = not minimal
        ramping = arguments.pop("difficulty_ramping", True)
        if env.startswith(tuple(f"MinAtar/{game}-" for game in _MINATAR_RAMPING)):
            protocol["difficulty_ramping"] = ramping
    if arguments:
        protocol["env_kwargs"] = json.dumps(arguments, sort_keys=True)
    protocol |= {k: values[k] for k in ("wrapper", "mask_actions") if values.get(k)}
    if "reward_clipping" in values:
        protocol["reward_clipping"] = values["reward_clipping"]
    return protocol


def describe(protocol: Mapping[str, Any] | None) -> str:
    """A protocol, or a part of one, in one line."""
    if protocol is None:
        return "protocol unknown"
    parts = (str(x) if k == "env" else f"{k} {x}" for k, x in protocol.items())
    return ", ".join(parts)


def split_common(
    protocols: Iterable[Mapping[str, Any] | None],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What all known protocols share, and what each has besides; {} if unknown."""
    every = list(protocols)
    known = [p for p in every if p is not None]
    first = known[0] if known else {}
    same = {k: x for k, x in first.items() if all(p.get(k) == x for p in known)}
    rest = [{k: x for k, x in (p or {}).items() if k not in same} for p in every]
    return same, rest
