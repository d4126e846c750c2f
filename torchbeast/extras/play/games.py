"""Plays games with the weights of a checkpoint, in processes.

Each game has a number. Its environment's seed and its actions' random numbers follow
from --seed and the number, so a game does not depend on the others, nor on how many
processes play, unless its environment draws from global random generators.
"""

import contextlib
import os
import pickle
import statistics
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchbeast.base.hardware import num_cpus
from torchbeast.base.nested import map_nested
from torchbeast.base.seeds import derive_seed
from torchbeast.core.acting import act_step, prepare_to_act, to_tensors
from torchbeast.core.buffers import step_counters
from torchbeast.envs import make_env
from torchbeast.envs.environment import Environment
from torchbeast.flags import Flags
from torchbeast.local.actors import TorchSettings, actor_context, seed_globals
from torchbeast.local.env_spec import CLOSE_SECONDS, START_SECONDS
from torchbeast.model import make_model
from torchbeast.procs import children
from torchbeast.runs import checkpoint

# No actor has these numbers, so training never plays these games.
TEST_STREAM, EVAL_STREAM = 2**31, 2**31 + 1
# The number of the environment that begins with game 0 (docs/environments.md).
FIRST_ENV = {TEST_STREAM: 10_000, EVAL_STREAM: 20_000}
# The rounding of a forward pass depends on the size of the batch and on the row in it.
# So a batch always has this size, and game n is always played in row n % BATCH.
BATCH = 8


class Game(NamedTuple):
    """A finished game. Of several agents: mean return, and steps of the last one."""

    number: int  # from 0 on
    game_return: float
    length: int
    of_agents: tuple[float | None, ...] = ()  # their returns, if they are several


Games = Generator[Game, None, None]
Weights = dict[str, torch.Tensor]


def mean_of(returns: Sequence[float], agents: Sequence[int], k: int) -> float | None:
    """The mean of agent k's; None if it had none."""
    own = [x for x, agent in zip(returns, agents, strict=True) if agent == k]
    return statistics.fmean(own) if own else None


def draws(flags: Flags) -> bool:
    return bool(flags.mode == "test_render" or getattr(flags, "video", None))


def play_in_processes(flags: Flags, weights: Weights, numbers: Sequence[int]) -> Games:
    """Plays games in processes. Raises UserError if one raised, died or got stuck."""
    batches = [numbers[i : i + BATCH] for i in range(0, len(numbers), BATCH)]
    count = 1 if draws(flags) else min(flags.num_actors or 1, num_cpus(), len(batches))
    # They may first import packages, and make or reset slow environments.
    watch = children.StepWatch(max(flags.actor_timeout, START_SECONDS))
    left: dict[children.Child, int] = {}  # games that have not ended
    who = f"a process that plays games of {flags.env}"
    with contextlib.closing(children.Children(actor_context())) as group:
        for i in range(count):
            own = [n for batch in batches[i::count] for n in batch]
            left[start_player(group, who, flags, own, TEST_STREAM)] = len(own)
        for child in left:
            child.send(pickle.dumps(weights))
        while left:
            ready = children.wait(left, 1.0)
            watch.check(left)
            for child in ready:
                if game := child.receive():
                    yield game
                    left[child] -= 1
                    if not left[child]:
                        del left[child]
        for child in group.alive:
            child.pipe.close()  # no more weights
        group.end(CLOSE_SECONDS)


def start_player(group: Any, who: str, flags: Flags, numbers: Any, stream: int) -> Any:
    """Starts a child that plays these games whenever it gets a pickled state dict.

    Tensors would go through shared memory. It sends each game that ends, or an error.
    """
    (steps,) = step_counters(1)
    child = group.start(who, _play_in_child, flags, numbers, stream, steps)
    child.steps = steps
    return child


def _play_in_child(
    flags: Flags, numbers: Sequence[int], stream: int, steps: torch.Tensor, pipe: Any
) -> None:
    children.begin_child()
    os.nice(19 if stream == EVAL_STREAM else 0)  # the training has priority
    torch.set_num_threads(1)
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
                for game in play(flags, weights, numbers, stream, steps, stack):
                    pipe.send(game)


def play(
    flags: Flags,
    weights: Weights,
    numbers: Sequence[int],
    stream: int = TEST_STREAM,
    steps: torch.Tensor | None = None,
    stack: contextlib.ExitStack | None = None,
) -> Games:
    """Plays the games with these numbers; yields them as they end.

    Games of another stream have other seeds. `steps` counts; `stack` closes all.
    """
    steps = torch.zeros((), dtype=torch.int64) if steps is None else steps
    stack = stack or contextlib.ExitStack()
    flags = flags.replace(seed=derive_seed(flags.seed, stream))
    most, batch = flags.envs_per_actor or 1, 1 if draws(flags) else BATCH
    for i in range(0, batch, most):
        rows = {j: [n for n in numbers if n % batch == j] for j in range(i, i + most)}
        rows = {j: games for j, games in rows.items() if games}
        if rows:
            first = FIRST_ENV[stream]
            yield from _play_rows(flags, weights, rows, first, steps, stack)
            stack.close()


def _play_rows(
    flags: Flags,
    weights: Weights,
    waiting: dict[int, list[int]],
    first_env: int,
    steps: torch.Tensor,
    stack: contextlib.ExitStack,
) -> Games:
    """Plays the games of some rows of the batch, each in an environment of its own."""
    render, video = "human" if flags.mode == "test_render" else None, None
    if getattr(flags, "video", None):
        from torchbeast.extras.video import Video

        render, video = "rgb_array", Video(flags.video, flags.env)
        stack.callback(lambda: video.close())
    envs: dict[int, Environment] = {}
    for i, (number, *_) in waiting.items():
        settings = first_env + number, render, TorchSettings()
        envs[i] = Environment(flags, None, *settings)
        stack.callback(envs[i].close)
        if flags.wrapper:  # a first reset may differ from all later ones, see Staggered
            envs[i].initial()
            steps += 1
        make_env.first("examine", envs[i])
    first = next(iter(envs.values()))
    N = first.num_envs  # agents of a game: rows of the batch for each
    spaces = first.observation_space, first.action_space
    model = make_model(flags, *spaces, torch.device("cpu"))
    checkpoint.check_fit(weights, model)
    prepare_to_act(model)
    generators = [torch.Generator() for _ in range(BATCH)]
    playing: dict[int, int] = {}  # row: number of the game
    ended: dict[int, list[tuple[int, float, int]]] = {}  # of its agents so far

    def choose(logits: torch.Tensor) -> torch.Tensor:  # [1, BATCH * N, P]
        if flags.greedy:
            return model.distribution.mode(logits)
        each = zip(logits.split(N, dim=1), generators, strict=True)
        sample = model.distribution.sample
        return torch.cat([sample(x, generator=g) for x, g in each], dim=1)

    def begin(i: int) -> dict[str, Any]:
        """Starts the next game of row i; returns its first environment row."""
        playing[i], ended[i] = waiting[i].pop(0), []
        generators[i].manual_seed(derive_seed(flags.seed, playing[i]))
        envs[i].set_seed(flags.seed, playing[i])
        steps.add_(1)
        return envs[i].initial()

    begun = {i: begin(i) for i in envs}
    rows = [begun.get(i, begun[min(begun)]) for i in range(BATCH)]
    state = model.initial_state(BATCH * N)
    while playing:
        steps += 1
        if video:
            video.add(first.render())
        batch = map_nested(lambda *x: np.concatenate(x), *rows)  # [BATCH * N, ...]
        outputs, state = act_step(model, to_tensors(batch), state, choose)
        actions = outputs["action"].squeeze(0).numpy()
        for i, number in list(playing.items()):
            game = N > 1 and envs[i].envs.envs[0].game  # of several agents
            rows[i] = row = envs[i].step(actions[i * N : (i + 1) * N])
            over = row["game_over"]
            results = np.flatnonzero(over), row["game_return"][over]
            ended[i] += zip(*results, row["game_step"][over], strict=True)
            if over.any() and (N == 1 or envs[i].envs.envs[0].game != game):
                agents, returns, lengths = zip(*ended[i], strict=True)
                each = tuple(mean_of(returns, agents, k) for k in range(N) if N > 1)
                if video and not waiting[i]:
                    video.close()  # the environments may take long to close
                mean = statistics.fmean(returns)
                yield Game(number, mean, int(max(lengths)), each)
                del playing[i]
                if waiting[i]:
                    rows[i] = begin(i)
