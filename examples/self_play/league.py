"""E games of self-play at once, whose opponents act in batches.

--env examples.self_play.league:League has the --env_kwargs of SelfPlay. Started as a
program with a file, it measures what a move of its agent costs:

    python -m examples.self_play.league ~/logs/torchbeast/NAME/model.tar --games 16
"""

import argparse
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from examples.self_play import players
from examples.self_play.games import SelfPlay, let_opponents_move
from torchbeast import load_agent


class League(gymnasium.vector.VectorEnv):
    """Each game has its own opponent; those of one checkpoint share their forward."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int, **arguments: Any) -> None:
        self.num_envs = num_envs
        self.games = [SelfPlay(**arguments) for _ in range(num_envs)]
        self.single_observation_space = self.games[0].observation_space
        self.single_action_space = self.games[0].action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        for i, game in enumerate(self.games):
            game.begin(None if seed is None else seed + i, options)
        let_opponents_move(self.games)
        return self.observe(), {}

    def step(self, actions: Any) -> Any:
        for game, action in zip(self.games, actions, strict=True):
            game.begin_step(action)
        let_opponents_move(self.games)
        last = self.observe()
        _, rewards, *ends, _ = zip(*(x.end_step() for x in self.games), strict=True)
        over = [x for x, *y in zip(self.games, *ends, strict=True) if any(y)]
        for game in over:
            game.begin()
        let_opponents_move(over)
        return self.observe(), *map(np.array, (rewards, *ends)), {"final_obs": last}

    def observe(self) -> dict[str, np.ndarray]:
        seen = [x.observe(x.me, x.number) for x in self.games]
        return {k: np.stack([x[k] for x in seen]) for k in seen[0]}

    def close_extras(self, **arguments: Any) -> None:
        for game in self.games:
            game.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="What a move of an opponent costs.")
    parser.add_argument("checkpoint", help="a file such as model.tar")
    parser.add_argument("--games", type=int, default=16)
    parser.add_argument("--trust", action="store_true", help="load_agent's trust_env")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as in the processes of environments
    agent, rng = load_agent(args.checkpoint, trust_env=args.trust), np.random
    agents = [players.Saved(agent, rng.default_rng(i)) for i in range(args.games)]
    seen = [agent.observation_space.sample() for _ in agents]
    seen = [{**x, "action_mask": np.ones_like(x["action_mask"])} for x in seen]

    def one_by_one() -> None:
        for player, observation in zip(agents, seen, strict=True):
            player.move(observation)

    for name, act in (
        ("one by one", one_by_one),
        ("in one batch", lambda: players.move_batch(agents, seen)),
    ):
        times = []
        for _ in range(100):
            start = time.process_time()
            act()
            times.append(time.process_time() - start)
        print(
            f"{name}: {np.median(times) / args.games * 1e3:.3f} ms of a core per move"
        )


if __name__ == "__main__":
    main()
