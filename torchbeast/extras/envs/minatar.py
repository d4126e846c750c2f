"""MinAtar's games: --env MinAtar/Breakout-v1, after `pip install minatar`."""

import argparse
import importlib
from typing import Any

import gymnasium

from torchbeast.base.errors import needing
from torchbeast.envs.make_env import from_gymnasium


def make(
    flags: argparse.Namespace, render_mode: str | None, arguments: dict[str, Any]
) -> gymnasium.Env | None:
    """A game of MinAtar; None if --env is something else."""
    if not flags.env.startswith("MinAtar/"):
        return None
    if "MinAtar/Breakout-v1" not in gymnasium.registry:
        with needing(f"--env {flags.env}", "minatar"):
            importlib.import_module("minatar.gym").register_envs()
    return MinAtarGame(from_gymnasium(flags.env, render_mode, arguments))


class MinAtarGame(gymnasium.Wrapper):
    """Forgets the last action at reset(): MinAtar would repeat it in the next game."""

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        game: Any = self.get_wrapper_attr("game")
        game.last_action = 0
        return self.env.reset(**arguments)
