"""Plays games of a run against the scripted player, half of them from each seat.

python -m examples.self_play.match ~/logs/torchbeast/NAME --games 200
"""

import argparse
import json
import math

import numpy as np

from examples.self_play.games import SelfPlay
from examples.self_play.players import saved
from torchbeast import load_agent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "checkpoint", help="folder of a run, or a file such as model.tar"
    )
    parser.add_argument(
        "--against", default="scripted", help="random, scripted or a file"
    )
    parser.add_argument("--games", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--greedy", action="store_true", help="the most likely actions")
    parser.add_argument(
        "--trust", action="store_true", help="see load_agent's trust_env"
    )
    args = parser.parse_args()

    agent = load_agent(args.checkpoint, trust_env=args.trust)
    arguments = json.loads(agent.flags.env_kwargs or "{}")
    env = SelfPlay(**{**arguments, "against": args.against, "trust": args.trust})
    results = np.zeros((2, 3), int)  # of each seat: lost, drawn, won
    for game in range(args.games):
        seat, over = game % 2, False
        observation, _ = env.reset(seed=args.seed + game, options={"seat": seat})
        player = saved(agent, env.np_random, args.greedy)
        while not over:
            observation, reward, *ends, _ = env.step(player.move(observation))
            over = any(ends)
        results[seat, 1 + int(np.sign(reward))] += 1
    for name, (lost, drawn, won) in zip(
        ("moving first", "moving second", "both"),
        [*results, results.sum(0)],
        strict=True,
    ):
        games = max(1, lost + drawn + won)
        line = f"{name:14} {won} won, {drawn} drawn, {lost} lost: {won / games:.1%} won"
        print(f"{line}, {elo(won + drawn / 2, games)}")


def elo(points: float, games: int) -> str:
    """By how much a player is better: 400 points are 10 to 1."""
    if not 0 < points < games:
        return "Elo unknown"
    return f"Elo {400 * math.log10(points / (games - points)):+.0f}"


if __name__ == "__main__":
    main()
