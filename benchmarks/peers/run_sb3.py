"""Trains with Stable-Baselines3's PPO until it is stopped."""

from typing import Any

import torch
from runlog import RunLog, register_atari
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecFrameStack
from torch import nn

# Rollouts, rows per gradient step and passes are TorchBeast's in compare_peers.py.
CASES: dict[str, dict[str, Any]] = {
    "cartpole": {"n_steps": 32, "batch_size": 256, "n_epochs": 4},
    "minatar": {"n_steps": 20, "batch_size": 320, "n_epochs": 4},
    "pong": {"n_steps": 80, "batch_size": 640, "n_epochs": 1},
    "pong_processes": {"n_steps": 80, "batch_size": 640, "n_epochs": 1},
}


class SmallImages(BaseFeaturesExtractor):
    """TorchBeast's torso for images below 36 pixels."""

    def __init__(self, space: Any) -> None:
        super().__init__(space, 256)
        height, width, channels = space.shape
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(32 * (height - 4) * (width - 4), 256), nn.ReLU()),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.permute(0, 3, 1, 2))


class LoggedPPO(PPO):
    runlog: RunLog

    def train(self) -> None:
        super().train()
        self.runlog.write(self.num_timesteps)


def make_games(case: str) -> tuple[str, VecEnv, dict[str, Any]]:
    """The kind of policy, its environments and its network."""
    if case == "cartpole":  # an MLP each for the policy and the values
        network = {"net_arch": [128, 128], "activation_fn": nn.ReLU}
        return "MlpPolicy", make_vec_env("CartPole-v1", n_envs=16), network
    if case == "minatar":
        from minatar.gym import register_envs

        register_envs()
        network = {"features_extractor_class": SmallImages, "net_arch": []}
        return "MlpPolicy", make_vec_env("MinAtar/Breakout-v1", n_envs=32), network
    register_atari()
    how: dict[str, Any] = {}
    if case == "pong_processes":  # forked, so that they have the registered games
        how |= {
            "vec_env_cls": SubprocVecEnv,
            "vec_env_kwargs": {"start_method": "fork"},
        }
    games = make_atari_env("PongNoFrameskip-v4", n_envs=16, **how)
    return "CnnPolicy", VecFrameStack(games, 4), {}


def main() -> None:
    packages = "stable_baselines3 torch gymnasium ale-py minatar numpy"
    runlog = RunLog(__doc__, CASES, packages)
    if not runlog.case.startswith("pong"):
        torch.set_num_threads(1)  # faster with small networks
    policy, games, network = make_games(runlog.case)
    settings = CASES[runlog.case]
    ppo = LoggedPPO(policy, games, policy_kwargs=network, device="cpu", **settings)
    ppo.runlog = runlog
    ppo.learn(10**12)


if __name__ == "__main__":
    main()
