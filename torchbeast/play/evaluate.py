"""Plays games with a checkpoint: --mode test and test_render.

Each game has a number. Its environment's seed and its actions' random numbers follow
from --seed and the number, so a game does not depend on the others, nor on how many
processes play, unless its environment draws from global random generators. Read it top
to bottom: evaluate, test, play_in_processes, play.
"""

import collections
import contextlib
import functools
import logging
import math
import os
import pickle
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from torchbeast.base import parts
from torchbeast.base.errors import FlagError
from torchbeast.base.hardware import num_cpus
from torchbeast.base.nested import map_nested
from torchbeast.base.seeds import derive_seed
from torchbeast.core.acting import act_step, to_tensors
from torchbeast.core.rollout import step_counters
from torchbeast.envs.environment import Environment
from torchbeast.extras.video import Video, has_display, picture
from torchbeast.flags import Flags
from torchbeast.local.actors import TorchSettings, actor_context, seed_globals
from torchbeast.local.env_spec import CLOSE_SECONDS, START_SECONDS
from torchbeast.procs import children
from torchbeast.runs import checkpoint, files, start, trust
from torchbeast.tools.agent import load_model

log = logging.getLogger(__name__)

# No actor has these numbers, so training never plays these games.
TEST_STREAM, EVAL_STREAM = 2**31, 2**31 + 1
# Games that a process plays at the same time. The rounding of a forward pass depends on
# the size of the batch and on the row in it. So a batch always has this size, even if
# fewer games are left, and game n is always played in row n % BATCH.
BATCH = 8
QUIET_SECONDS = 60.0  # the log says it if no game ends for so long


class Game(NamedTuple):
    """A finished game: its number from 0 on, return, and number of steps.

    Of several agents: the mean of their returns, and the steps of the last.
    """

    number: int
    game_return: float
    length: int


Games = Generator[Game | None, None, None]  # None: no game has ended for a while
Play = Callable[[Flags, dict[str, torch.Tensor], Sequence[int]], Games]


def evaluate(
    typed: start.Typed, find_player: Callable[[Flags], Play | None] = lambda _: None
) -> None:
    """Tests the checkpoint of --xpid, with the flags saved in it.

    Args:
      typed: see start.read.
      find_player: returns what plays the games; None: this machine plays them.
    """
    flags = start.merge(typed)
    path = Path(os.path.expanduser(flags.savedir), flags.xpid or "latest")
    path /= flags.checkpoint
    saved = checkpoint.load(path)
    signed = trust.is_signed(saved["flags"], saved.get("flags_signature"))
    flags = start.merge(typed, saved["flags"], signed, str(path))
    if flags.suppress_logs:
        start.print_warnings_only()
    play_games = find_player(flags) or play_in_processes
    flags = start.resolve(flags).freeze()
    result = test(flags, saved["model_state_dict"], play_games)
    step = saved.get("stats", {}).get("step")
    parts.call("tested", flags, path.resolve().parent, step)
    if flags.mode == "test" and not flags.video:
        xpid = path.resolve().parent.name  # --xpid, or what "latest" links to
        about = {"xpid": xpid, "checkpoint": path.name, "step": step}
        name = Path(path.name.replace("model", "test", 1)).with_suffix(".json")
        write_result(path.resolve().with_name(str(name)), flags, about | result)


def test(
    flags: Flags, model_state: dict[str, torch.Tensor], play_games: Play
) -> dict[str, Any]:
    """Plays flags.num_test_episodes games; returns what test.json has about them.

    Args:
      model_state: state dict of the model.
      play_games: plays the games.
    """
    started = told = time.monotonic()
    games: list[Game] = []
    found = play_games(flags, model_state, range(flags.num_test_episodes))
    with contextlib.closing(found):
        for game in found:
            if game:
                games.append(game)
                log.info("Game %d: return %.2f after %d steps", *game)
            elif time.monotonic() - told < QUIET_SECONDS:
                continue
            else:
                log.info(
                    "%d of %d games have ended, the others go on. A game without an "
                    "end needs a limit, such as --wrapper "
                    """'gymnasium.wrappers:TimeLimit{"max_episode_steps": 1000}'""",
                    *(len(games), flags.num_test_episodes),
                )
            told = time.monotonic()
    games.sort()  # by number
    returns = [game.game_return for game in games]
    lengths = [game.length for game in games]
    result = {
        "num_games": len(games),
        "policy": "greedy" if flags.greedy else "sampled",
        "mean": statistics.fmean(returns),
        "std": statistics.stdev(returns) if len(returns) > 1 else 0.0,
        "min": min(returns),
        "max": max(returns),
        "median": statistics.median(returns),
        "mean_length": statistics.fmean(lengths),
        "seconds": round(time.monotonic() - started, 1),
        "returns": returns,
        "lengths": lengths,
    }
    log.info(
        "%(num_games)d games: mean return %(mean).2f, standard deviation %(std).2f, "
        "min %(min).2f, max %(max).2f, median %(median).2f (%(policy)s actions, "
        "%(steps)d steps, %(seconds).0f s)",
        result | {"steps": sum(lengths)},
    )
    if flags.video:
        log.info("Video in %s", flags.video)
    return result


def write_result(path: Path, flags: Flags, result: dict[str, Any]) -> None:
    """Writes test.json. If it can't be written, logs a warning."""
    content = {
        **result,
        "seed": flags.seed,
        "flags": flags.as_dict(),
        "date": files.now(),
        **files.provenance(),
    }
    try:
        files.write_json(path, content)
        log.info("Wrote %s", path)
    except OSError as error:  # for example, somebody else's run
        log.warning("Can't write %s: %s. The result is only in this log.", path, error)


# --- Playing --------------------------------------------------------------------------


def _view(flags: Flags) -> contextlib.AbstractContextManager[Video | None]:
    """The video; or None, if there is none."""
    if flags.video:
        return contextlib.closing(Video(flags.video))
    if flags.mode == "test_render" and not has_display():
        raise FlagError(
            "--mode test_render needs a display, and neither DISPLAY nor "
            "WAYLAND_DISPLAY is set; record a video instead: --video FILE.mp4"
        )
    return contextlib.nullcontext()


def play_in_processes(
    flags: Flags, model_state: dict[str, torch.Tensor], numbers: Sequence[int]
) -> Games:
    """Plays games in one process per core; yields them as they end.

    With --video or --mode test_render, in one process.

    Raises:
      UserError: what `play` raises, in a process.
      ProcessError: a process raised something else, died, or took no step for
        --actor_timeout or START_SECONDS seconds, whichever is longer.
    """
    draws = flags.video or flags.mode == "test_render"
    count = min(1 if draws else num_cpus(), math.ceil(len(numbers) / BATCH))
    # They may first import packages, and make or reset slow environments.
    watch = children.StepWatch(max(flags.actor_timeout, START_SECONDS))
    weights = pickle.dumps(model_state)  # bytes: tensors would go through shared memory
    left: dict[children.Child, int] = {}  # games that have not ended
    who = f"a process that plays games of {flags.env}"
    with contextlib.closing(children.Children(actor_context())) as group:
        for i in range(count):
            own = [n for n in numbers if n // BATCH % count == i]  # whole batches
            left[start_player(group, who, flags, own, TEST_STREAM)] = len(own)
        for child in left:
            child.send(weights)
        while left:
            ready = children.wait(left, 1.0)
            watch.check(left)
            if not ready:
                yield None
            for child in ready:
                if game := child.receive():
                    yield game
                    left[child] -= 1
                    if not left[child]:
                        del left[child]
        for child in group.alive:
            child.pipe.close()  # no more weights
        group.end(CLOSE_SECONDS)


def start_player(
    group: children.Children,
    who: str,
    flags: Flags,
    numbers: Sequence[int],
    stream: int,
) -> children.Child:
    """Starts a child that plays these games whenever it is sent weights.

    Weights are a pickled state dict. It sends each game when it ends, or an error.
    """
    (steps,) = step_counters(1)
    child = group.start(who, _play_in_child, flags, numbers, stream, steps)
    child.steps = steps
    return child


def _play_in_child(
    flags: Flags,
    numbers: Sequence[int],
    stream: int,
    steps: torch.Tensor,
    pipe: connection.Connection,
) -> None:
    children.begin_child()
    os.nice(19 if stream == EVAL_STREAM else 0)  # the training has priority
    torch.set_num_threads(1)
    on_step = functools.partial(steps.add_, 1)
    problem = f"a game of {flags.env} failed"
    errors = functools.partial(children.sending_errors, pipe, problem)
    with contextlib.suppress(EOFError, OSError):  # there are no more weights
        while True:
            weights = pickle.loads(pipe.recv())
            seed_globals(flags.seed, stream, numbers[0])  # always the same games
            with errors(), _view(flags) as video:
                about = video, stream, on_step, errors
                for game in play(flags, weights, numbers, *about):
                    pipe.send(game)


def play(
    flags: Flags,
    model_state: dict[str, torch.Tensor],
    numbers: Iterable[int],
    video: Video | None = None,
    stream: int = TEST_STREAM,
    on_step: Callable[[], Any] = lambda: None,
    errors: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Generator[Game, None, None]:
    """Plays the games with these numbers; yields them as they end.

    With --mode test_render or --video, it plays one after the other and draws them.

    Args:
      stream: games of another stream have other seeds.
      on_step: called whenever an environment was made, reset or stepped.
      errors: takes an error before the environments are closed, which may hang.
    """
    render = "rgb_array" if video else "human" if flags.mode == "test_render" else None
    waiting: dict[int, collections.deque[int]] = collections.defaultdict(
        collections.deque
    )
    for number in numbers:  # by the place in the batch in which the game is played
        waiting[0 if render else number % BATCH].append(number)
    flags = flags.replace(seed=derive_seed(flags.seed, stream))
    with contextlib.ExitStack() as stack:
        envs: dict[int, Environment] = {}
        settings = TorchSettings()
        for i in waiting:
            envs[i] = Environment(flags, None, i, render_mode=render, around=settings)
            stack.callback(envs[i].close)
            stack.enter_context(errors())
            filler = envs[i].initial()  # a first reset may differ from all later ones
            on_step()
        first = next(iter(envs.values()))
        N = first.num_envs  # agents of a game: rows of the batch for each
        spaces = first.observation_space, first.action_space
        model = load_model(flags, *spaces, model_state)
        generators = [torch.Generator() for _ in range(BATCH)]
        playing: dict[int, int] = {}  # place in the batch: number of the game
        ended: dict[int, list[tuple[float, int]]] = {}  # of its agents so far

        def choose(logits: torch.Tensor) -> torch.Tensor:  # [1, BATCH * N, P]
            if flags.greedy:
                return model.distribution.mode(logits)
            each = zip(logits.split(N, dim=1), generators, strict=True)
            sample = model.distribution.sample
            return torch.cat([sample(x, generator=g) for x, g in each], dim=1)

        def start(i: int) -> dict[str, Any]:
            """Starts the next game of place i; returns its first environment row."""
            playing[i], ended[i] = waiting[i].popleft(), []
            generators[i].manual_seed(derive_seed(flags.seed, playing[i]))
            envs[i].set_seed(flags.seed, playing[i])
            on_step()
            return envs[i].initial()

        rows: list[dict[str, Any]] = [filler] * BATCH  # to fill the batch
        for i in envs:
            rows[i] = start(i)
        state = model.initial_state(BATCH * N)
        while playing:
            if video:
                video.add(picture(first.render(), flags.env))
            batch = map_nested(lambda *x: np.concatenate(x), *rows)  # [BATCH * N, ...]
            outputs, state = act_step(model, to_tensors(batch), state, choose)
            actions = outputs["action"].squeeze(0).numpy()
            for i, number in list(playing.items()):
                game = N > 1 and envs[i].envs.envs[0].game  # of several agents
                rows[i] = row = envs[i].step(actions[i * N : (i + 1) * N])
                on_step()
                over = row["game_over"]
                results = row["game_return"][over], row["game_step"][over]
                ended[i] += zip(*(x.tolist() for x in results), strict=True)
                if over.any() and (N == 1 or envs[i].envs.envs[0].game != game):
                    returns, lengths = zip(*ended[i], strict=True)
                    if video and not waiting[i]:
                        video.close()  # the environments may take long to close
                    yield Game(number, statistics.fmean(returns), max(lengths))
                    if waiting[i]:
                        rows[i] = start(i)
                    else:
                        del playing[i]
