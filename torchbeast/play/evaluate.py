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
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

from torchbeast.base import parts
from torchbeast.base.errors import FlagError
from torchbeast.base.hardware import num_cpus
from torchbeast.base.nested import map_nested
from torchbeast.base.seeds import derive_seed
from torchbeast.base.seldom import Seldom
from torchbeast.core.acting import act_step, prepare_to_act, to_tensors
from torchbeast.core.buffers import step_counters
from torchbeast.envs.environment import Environment
from torchbeast.flags import Flags
from torchbeast.local.actors import TorchSettings, actor_context, seed_globals
from torchbeast.local.env_spec import CLOSE_SECONDS, START_SECONDS
from torchbeast.model import Net, make_model
from torchbeast.procs import children
from torchbeast.runs import checkpoint, files, flagset, start, trust

log = logging.getLogger(__name__)

# No actor has these numbers, so training never plays these games.
TEST_STREAM, EVAL_STREAM = 2**31, 2**31 + 1
# The rounding of a forward pass depends on the size of the batch and on the row in it.
# So a batch always has this size, and game n is always played in row n % BATCH.
BATCH = 8
QUIET_SECONDS = 60.0  # between two lines of a log in which no game ends


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
    typed: flagset.Typed, find_player: Callable[[Flags], Play | None] = lambda _: None
) -> None:
    """Tests the checkpoint of --xpid, with the flags saved in it; writes test.json.

    Args:
      typed: see flagset.read.
      find_player: returns what plays the games; None: this machine plays them.
    """
    flags = flagset.merge(typed)
    path = Path(os.path.expanduser(flags.savedir), flags.xpid or "latest")
    path /= flags.checkpoint
    saved = checkpoint.load(path)
    signed = trust.is_signed(saved["flags"], saved.get("flags_signature"))
    flags = flagset.merge(typed, saved["flags"], signed, str(path))
    if flags.suppress_logs:
        start.print_warnings_only()
    play_games = find_player(flags) or play_in_processes
    flags = flagset.resolve(flags).freeze()
    games = test(flags, saved["model_state_dict"], play_games)
    step = saved.get("stats", {}).get("step")
    path = path.resolve()
    parts.call("tested", flags, path.parent, step)
    if video_file(flags) or flags.mode != "test":
        return
    result = {
        "xpid": path.parent.name,  # --xpid, or what "latest" links to
        "checkpoint": path.name,
        "step": step,
        **games,
        "seed": flags.seed,
        "flags": flags.as_dict(),
        "date": files.now(),
        **files.provenance(),
    }
    path = path.with_name(path.name.replace("model", "test", 1)).with_suffix(".json")
    try:
        files.write_json(path, result)
        log.info("Wrote %s", path)
    except OSError as error:  # for example, somebody else's run
        log.warning("Can't write %s: %s. The result is only in this log.", path, error)


def test(
    flags: Flags, model_state: dict[str, torch.Tensor], play_games: Play
) -> dict[str, Any]:
    """Plays flags.num_test_episodes games; returns what test.json has about them."""
    games: list[Game] = []
    is_due = Seldom(QUIET_SECONDS)
    is_due()
    found = play_games(flags, model_state, range(flags.num_test_episodes))
    with contextlib.closing(found):
        for game in found:
            if game:
                games.append(game)
                log.info("Game %d: return %.2f after %d steps", *game)
            elif is_due():
                log.info(
                    "%d of %d games have ended. A game without an end needs a limit, "
                    "such as --wrapper "
                    """'gymnasium.wrappers:TimeLimit{"max_episode_steps": 1000}'""",
                    *(len(games), flags.num_test_episodes),
                )
    _, returns, lengths = zip(*sorted(games), strict=True)  # by number
    result = {
        "num_games": len(games),
        "policy": "greedy" if flags.greedy else "sampled",
        "mean": statistics.fmean(returns),
        "std": statistics.stdev(returns) if len(returns) > 1 else 0.0,
        "returns": returns,
        "lengths": lengths,
    }
    log.info(
        "%(num_games)d games: mean return %(mean).2f, standard deviation %(std).2f "
        "(%(policy)s actions)",
        result,
    )
    return result


# --- Playing --------------------------------------------------------------------------


def video_file(flags: Flags) -> str | None:
    """--video, which is a flag of extras/video.py."""
    return getattr(flags, "video", None)


def most_at_once(flags: Flags) -> int:
    """Environments at once: as many as in training; one if the games are drawn."""
    if video_file(flags) or flags.mode == "test_render":
        return 1
    return (flags.num_actors or 1) * (flags.envs_per_actor or 1)


def play_in_processes(
    flags: Flags, model_state: dict[str, torch.Tensor], numbers: Sequence[int]
) -> Games:
    """Plays games in at most one process per core; yields them as they end.

    Raises:
      UserError: what `play` raises, in a process.
      ProcessError: a process raised something else, died, or took no step for
        --actor_timeout or START_SECONDS seconds, whichever is longer.
    """
    names = ("DISPLAY", "WAYLAND_DISPLAY")
    has_display = sys.platform != "linux" or any(map(os.environ.get, names))
    if flags.mode == "test_render" and not (video_file(flags) or has_display):
        raise FlagError(
            "--mode test_render needs a display, and neither DISPLAY nor "
            "WAYLAND_DISPLAY is set; record a video instead: --video FILE.mp4"
        )
    most = max(1, most_at_once(flags) // BATCH)
    count = min(most, num_cpus(), math.ceil(len(numbers) / BATCH))
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
    with contextlib.suppress(EOFError, OSError):  # there are no more weights
        while True:
            weights = pickle.loads(pipe.recv())
            seed_globals(flags.seed, stream, numbers[0])  # always the same games
            # Errors are sent before environments are closed, which may hang.
            with (
                contextlib.ExitStack() as stack,
                children.sending_errors(pipe, problem),
            ):
                for game in play(flags, weights, numbers, stream, on_step, stack):
                    pipe.send(game)


def play(
    flags: Flags,
    model_state: dict[str, torch.Tensor],
    numbers: Sequence[int],
    stream: int = TEST_STREAM,
    on_step: Callable[[], Any] = lambda: None,
    stack: contextlib.ExitStack | None = None,
) -> Generator[Game, None, None]:
    """Plays the games with these numbers; yields them as they end.

    Args:
      stream: games of another stream have other seeds.
      on_step: called whenever an environment was made, reset or stepped.
      stack: closes the environments and the video, also after an error.
    """
    stack = stack or contextlib.ExitStack()
    most, video = most_at_once(flags), None
    draws = flags.mode == "test_render"
    if path := video_file(flags):
        from torchbeast.extras.video import Video  # optional

        draws, video = True, Video(path, flags.env)
        stack.callback(lambda: video.close())
    flags = flags.replace(seed=derive_seed(flags.seed, stream))
    rows: dict[int, list[int]] = {}  # the games of each row of the batch
    for number in numbers:
        rows.setdefault(0 if draws else number % BATCH, []).append(number)
    for i in range(0, len(rows), most):
        part = {row: rows[row] for row in list(rows)[i : i + most]}
        yield from _play_rows(flags, model_state, part, video, stack, on_step)
        stack.close()


def _play_rows(
    flags: Flags,
    model_state: dict[str, torch.Tensor],
    numbers: Mapping[int, Sequence[int]],
    video: Any,
    stack: contextlib.ExitStack,
    on_step: Callable[[], Any],
) -> Generator[Game, None, None]:
    """Plays the games of some rows of the batch, each in an environment of its own."""
    render = "rgb_array" if video else "human" if flags.mode == "test_render" else None
    waiting = {i: collections.deque(x) for i, x in numbers.items()}
    envs: dict[int, Environment] = {}
    settings = TorchSettings()
    for i in waiting:
        envs[i] = Environment(flags, None, i, render_mode=render, around=settings)
        stack.callback(envs[i].close)
        filler = envs[i].initial()  # a first reset may differ from all later ones
        on_step()
    first = next(iter(envs.values()))
    N = first.num_envs  # agents of a game: rows of the batch for each
    spaces = first.observation_space, first.action_space
    model = load_model(flags, *spaces, model_state)
    generators = [torch.Generator() for _ in range(BATCH)]
    playing: dict[int, int] = {}  # row: number of the game
    ended: dict[int, list[tuple[float, int]]] = {}  # of its agents so far

    def choose(logits: torch.Tensor) -> torch.Tensor:  # [1, BATCH * N, P]
        if flags.greedy:
            return model.distribution.mode(logits)
        each = zip(logits.split(N, dim=1), generators, strict=True)
        sample = model.distribution.sample
        return torch.cat([sample(x, generator=g) for x, g in each], dim=1)

    def begin(i: int) -> dict[str, Any]:
        """Starts the next game of row i; returns its first environment row."""
        playing[i], ended[i] = waiting[i].popleft(), []
        generators[i].manual_seed(derive_seed(flags.seed, playing[i]))
        envs[i].set_seed(flags.seed, playing[i])
        on_step()
        return envs[i].initial()

    rows: list[dict[str, Any]] = [filler] * BATCH  # to fill the batch
    for i in envs:
        rows[i] = begin(i)
    state = model.initial_state(BATCH * N)
    while playing:
        if video:
            video.add(first.render())
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
                    rows[i] = begin(i)
                else:
                    del playing[i]


def load_model(
    flags: Flags,
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    weights: dict[str, torch.Tensor],
) -> Net:
    """A model with the weights of a checkpoint, ready to act on the CPU.

    Raises:
      CheckpointError: the weights don't fit.
    """
    model = make_model(flags, observation_space, action_space, torch.device("cpu"))
    checkpoint.check_fit(weights, model)
    model.load_state_dict(weights)
    return prepare_to_act(model)
