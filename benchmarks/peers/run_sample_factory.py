"""Trains with Sample Factory's APPO until it is stopped."""

import sys
from typing import Any

import gymnasium
from runlog import RunLog, register_atari
from sample_factory.algo.learning.learner import Learner
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner
from sf_examples.atari.atari_params import atari_override_defaults
from sf_examples.atari.atari_utils import make_atari_env

# Two workers with 8 games each; steps are counted once, and not as frames.
COMMON = """
    --train_dir={folder} --experiment=sf --device=cpu
    --train_for_env_steps=1000000000000 --num_workers=2 --num_envs_per_worker=8
    --worker_num_splits=2 --use_rnn=False --num_batches_per_epoch=1 --async_rl=True
    --normalize_input=False --normalize_returns=False --summaries_use_frameskip=False
"""
CASES = {
    "cartpole": """
        --env=CartPole-v1 --rollout=32 --batch_size=256 --num_epochs=4 --recurrence=1
        --encoder_mlp_layers 128 128 --nonlinearity=relu
        --actor_critic_share_weights=False --reward_scale=0.1
    """,
    "pong": """
        --env=atari_pong --rollout=80 --batch_size=640 --num_epochs=1 --with_vtrace=True
        --recurrence=80
    """,
}

# Version 2.1.1 fails if it summarizes V-trace. The learner's process runs this, too.
Learner._should_save_summaries = lambda self: False


class Observer(AlgoObserver):
    def __init__(self, runlog: RunLog) -> None:
        self.runlog = runlog

    def on_training_step(self, runner: Runner, iteration: int) -> None:
        self.runlog.write(sum(runner.env_steps.values()))


def make_cartpole(name: str, *_: Any, render_mode: str | None = None) -> gymnasium.Env:
    return gymnasium.make(name, render_mode=render_mode)


def make_pong(*args: Any, **kwargs: Any) -> gymnasium.Env:
    register_atari()  # in each worker
    return make_atari_env(*args, **kwargs)


def main() -> int:
    runlog = RunLog(__doc__, CASES, "sample_factory torch gymnasium ale-py numpy")
    argv = (COMMON.format(folder=runlog.folder) + CASES[runlog.case]).split()
    register_env("CartPole-v1", make_cartpole)
    register_env("atari_pong", make_pong)
    parser, config = parse_sf_args(argv)
    if runlog.case == "pong":
        atari_override_defaults(config.env, parser)
    _, runner = make_runner(parse_full_cfg(parser, argv))
    runner.register_observer(Observer(runlog))
    runner.init()
    return runner.run()


if __name__ == "__main__":
    sys.exit(main())
