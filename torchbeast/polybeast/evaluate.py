"""Plays test games on PolyBeast's environment servers: --mode test.

The learner's machine needs no environment. The games that begin first count, and each
is played to its end. So long games count as often as short ones.
"""

import collections
import contextlib
import functools
import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from torchbeast.base.errors import FlagError
from torchbeast.base.seeds import derive_seed
from torchbeast.core import rollout
from torchbeast.core.acting import act_step
from torchbeast.flags import Flags
from torchbeast.local.env_spec import EnvSpec
from torchbeast.model import Net
from torchbeast.play.evaluate import TEST_STREAM, Game, Games, Play, draws, load_model
from torchbeast.polybeast.remote_envs import RemoteEnvs, server_addresses
from torchbeast.polybeast.security import choose_side
from torchbeast.polybeast.streams import StreamGroup, as_stored

log = logging.getLogger(__name__)


class Scorer:
    """Which environment plays which game.

    The number of an environment is part of its recurrent state, and 0 if it is new. If
    a stream is lost, its environments come back as new ones.

    Args:
      numbers: of the games that count. An environment that gets none plays games that
        don't count.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self.waiting = collections.deque(numbers)
        self.playing: dict[int, int] = {}  # environment: game
        self.seen: dict[int, float] = {}  # environment: time of its last step
        self.num_envs = 0

    def add(self, row: dict[str, Any], envs: torch.Tensor) -> list[Game]:
        """Takes a row [1, E] of one stream, and puts numbers into `envs` [E].

        Returns:
          The games that the row ends.
        """
        if (row["truncated"] & ~row["done"]).any():
            return []  # the pool only asks for the values of final observations
        ended = []
        for i, env in enumerate(envs.tolist()):
            over, step = row["game_over"][0, i], row["game_step"][0, i]
            if env == 0:
                self.num_envs += 1
                envs[i] = env = self.num_envs
            elif over and env in self.playing:
                game_return = row["game_return"][0, i].item()
                ended.append(Game(self.playing.pop(env), game_return, step.item()))
            is_free = env not in self.playing and row["present"][0, i]
            # Not if it is in the middle of a game that another policy began.
            if is_free and (over or step == 0) and self.waiting:
                self.playing[env] = self.waiting.popleft()
            self.seen[env] = time.monotonic()
        return ended

    def replace_lost(self, seconds: float) -> None:
        """Games of environments that took no step for so long begin anew."""
        for env, number in list(self.playing.items()):
            if time.monotonic() - self.seen[env] > seconds:
                log.warning("Game %d was lost with its server; it begins anew.", number)
                self.waiting.append(number)
                del self.playing[env]


def find_player(flags: Flags) -> Play | None:
    """play_on_servers if the command line has --server_addresses or --listen."""
    if not flags.typed & {"server_addresses", "listen"}:
        return None
    choose_side(flags)
    return play_on_servers


def play_on_servers(
    flags: Flags, model_state: dict[str, torch.Tensor], numbers: Sequence[int]
) -> Games:
    """Plays games on the servers of --server_addresses or --listen.

    Yields each game when it ends. Which environment plays which game depends
    on the speed of the servers, so a repeated test may give other returns.

    Raises:
      FlagError, TransportError, RuntimeError: no server can be used, or the last one
        was lost for --connect_timeout seconds.
    """
    if draws(flags):
        raise FlagError("servers can't show their games: leave out --server_addresses")
    # Batches of one fit all streams; nothing learns from them.
    layout: dict[str, Any]
    layout = {"batch_size": 1, "max_learner_queue_size": 1, "sync": False}
    if "envs_per_actor" not in flags.typed:
        layout["envs_per_actor"] = None  # the servers' number
    if "num_actors" not in flags.typed:
        layout["num_actors"] = len(server_addresses(flags)) if not flags.listen else 1
    flags = flags.replace(**layout)
    results: queue.SimpleQueue[Game] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        envs = RemoteEnvs(flags, derive_seed(flags.seed, TEST_STREAM))
        stack.callback(envs.close)
        spec = envs.find_env_spec(lambda: None, fits(flags, model_state))
        if envs.listener:
            envs.listener.settle(spec.hello)
        cpu = torch.device("cpu")
        model = load_model(flags, spec, model_state)
        new_env = torch.zeros(1, 1, 1, dtype=torch.int64)
        streams = StreamGroup(
            flags,
            envs.addresses,
            envs,
            spec,
            initial_state=(*model.initial_state(1), new_env),
            acting_device=cpu,
            learning_device=cpu,
        )
        threads = stack.enter_context(ThreadPoolExecutor(3))
        stack.callback(streams.close)  # before the threads are joined
        answered = model, streams, spec.num_envs, numbers, results.put
        tasks = [
            threads.submit(_answer, flags, *answered),
            threads.submit(streams.pool.run),
            threads.submit(collections.deque, streams.queue, 0),  # drops rollouts
        ]
        left = len(numbers)
        while left:
            envs.report([streams])
            for task in tasks:
                if task.done():
                    task.result()  # raises what has ended it
            with contextlib.suppress(queue.Empty):
                yield results.get(timeout=1.0)
                left -= 1


def fits(
    flags: Flags, model_state: dict[str, torch.Tensor]
) -> Callable[[EnvSpec], Any]:
    """A check for RemoteEnvs.find_env_spec: the spaces must be the checkpoint's.

    It raises CheckpointError if the weights do not fit a model for the environments.
    """
    return lambda spec: load_model(flags, spec, model_state)


def _answer(
    flags: Flags,
    model: Net,
    streams: StreamGroup,
    E: int,
    numbers: Sequence[int],
    report: Callable[[Game], None],
) -> None:
    """The inference thread: answers rows [1, n, ...] until the batcher is closed.

    Args:
      E: environments per stream; n is a multiple of it.
    """
    scorer = Scorer(numbers)
    env_fields = rollout.env_fields(model.observation_space, model.distribution)
    generator = torch.Generator()
    generator.manual_seed(derive_seed(flags.seed, TEST_STREAM))
    sample = functools.partial(model.distribution.sample, generator=generator)
    choose = model.distribution.mode if flags.greedy else sample
    for batch in streams.batcher:
        row, (*state, envs) = batch.get_inputs()
        row, envs = as_stored(row, env_fields), envs.clone()
        present = rollout.valid_steps(row)
        for begin in range(0, envs.shape[1], E):  # one stream after the other
            part = slice(begin, begin + E)
            names = ("truncated", "done", "game_over", "game_return", "game_step")
            of_stream = {name: row[name][:, part] for name in names}
            of_stream["present"] = present[:, part]
            for game in scorer.add(of_stream, envs[0, part, 0]):
                report(game)
        # A step may take --actor_timeout, and a lost stream the other to come back.
        scorer.replace_lost(flags.actor_timeout + flags.connect_timeout)
        outputs, new_state = act_step(model, row, tuple(state), choose)
        batch.set_outputs((outputs, (*new_state, envs)))
