"""Plays games with a checkpoint: --mode test and test_render."""

import argparse
import contextlib
import functools
import logging
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from torchbeast.core import checkpoint, resume
from torchbeast.core import flags as flags_lib
from torchbeast.core.acting import act_step, prepare_to_act, to_tensors
from torchbeast.core.environment import Environment
from torchbeast.core.flags import FlagError, Flags
from torchbeast.core.seeds import derive_seed
from torchbeast.core.video import Video, has_display
from torchbeast.model import make_model

log = logging.getLogger(__name__)

TEST_STREAM = 2**31  # no actor has this number, so training never plays these games


def evaluate(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> None:
    """Tests the checkpoint of --xpid, with the flags saved in it."""
    flags = flags_lib.parse(parser, argv)
    path = Path(os.path.expanduser(flags.savedir), flags.xpid or "latest", "model.tar")
    saved = checkpoint.load(path)
    checkpoint.check(saved, path, for_test=True)
    flags = flags_lib.parse(parser, argv, saved["flags"])
    flags.xpid = None  # a test writes nothing
    resume.announce_environment(flags, saved)
    test(flags_lib.resolve(flags).freeze(), saved["model_state_dict"])


@torch.inference_mode()
def test(flags: Flags, model_state: dict[str, torch.Tensor]) -> list[float]:
    """Plays flags.num_test_episodes games and returns their returns.

    Each environment plays a fixed share of the games. Otherwise short games would be
    counted more often than long ones.

    Args:
      model_state: state dict of the model.
    """
    wants_window = flags.mode == "test_render" and not flags.video
    if wants_window and not has_display():
        raise FlagError(
            "--mode test_render needs a display, and neither DISPLAY nor "
            "WAYLAND_DISPLAY is set; record a video instead: --video FILE.mp4"
        )
    render_mode = "human" if wants_window else "rgb_array" if flags.video else None
    num_envs = 1 if render_mode else min(flags.num_test_episodes, 16)
    flags = flags.replace(seed=derive_seed(flags.seed, TEST_STREAM))
    env = Environment(flags, num_envs, render_mode=render_mode)
    model = make_model(
        flags, env.observation_space, env.action_space, torch.device("cpu")
    )
    checkpoint.check_fit(model_state, model)
    model.load_state_dict(model_state)
    prepare_to_act(model)
    generator = torch.Generator().manual_seed(derive_seed(flags.seed))
    distribution = model.distribution
    sample = functools.partial(distribution.sample, generator=generator)
    choose = distribution.mode if flags.greedy else sample
    quota = [len(range(i, flags.num_test_episodes, num_envs)) for i in range(num_envs)]
    returns: list[float] = []
    state = model.initial_state(num_envs)
    row = env.initial()
    with contextlib.ExitStack() as stack:
        stack.callback(env.close)
        video = stack.enter_context(Video(flags.video)) if flags.video else None
        while any(quota):
            if video:
                video.add(np.asarray(env.render()))
            outputs, state = act_step(model, to_tensors(row), state, choose)
            row = env.step(outputs["action"].squeeze(0).numpy())
            for i in np.flatnonzero(row["game_over"]):
                if quota[i]:
                    quota[i] -= 1
                    returns.append(float(row["game_return"][i]))
                    log.info(
                        "Game %d: return %.2f after %d steps",
                        *(len(returns), returns[-1], row["game_step"][i]),
                    )
    deviation = statistics.stdev(returns) if len(returns) > 1 else 0.0
    log.info(
        "%d games: mean return %.2f, standard deviation %.2f, min %.2f, max %.2f",
        *(len(returns), statistics.fmean(returns), deviation),
        *(min(returns), max(returns)),
    )
    if flags.video:
        log.info("Video in %s", flags.video)
    return returns
