"""Plays test games on PolyBeast's environment servers: --mode test.

The games that begin first count, so long games count as often as short ones.
"""

import collections
import contextlib
import functools
import logging
import queue
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from torchbeast.base.errors import FlagError
from torchbeast.base.seeds import derive_seed
from torchbeast.core import rollout
from torchbeast.core.acting import act_step
from torchbeast.extras.play.games import TEST_STREAM, Game, Games, draws
from torchbeast.flags import Flags
from torchbeast.polybeast.acting import fits
from torchbeast.polybeast.env_connection import server_addresses
from torchbeast.polybeast.remote_envs import RemoteEnvs
from torchbeast.polybeast.streams import StreamGroup, as_stored

log = logging.getLogger(__name__)


class Scorer:
    """Which environment plays which game.

    The number of an environment is part of its recurrent state, and 0 if it is new.
    """

    def __init__(self, numbers: Sequence[int], E: int) -> None:
        self.waiting, self.E = collections.deque(numbers), E
        self.playing: dict[int, int] = {}  # environment: game
        self.seen: dict[int, float] = {}  # environment: time of its last step
        self.num_envs = 0

    def add(self, row: dict[str, Any], envs: torch.Tensor) -> list[Game]:
        """Takes a row [1, n] of whole streams, and puts numbers into `envs` [n].

        Returns the games that the row ends.
        """
        present = rollout.valid_steps(row)
        # Of these streams the pool only asks for the values of final observations.
        asked = (row["truncated"] & ~row["done"]).view(-1, self.E).any(1)
        ended = []
        for i, env in enumerate(envs.tolist()):
            if asked[i // self.E]:
                continue
            over, step = row["game_over"][0, i], row["game_step"][0, i]
            if env == 0:
                self.num_envs += 1
                envs[i] = env = self.num_envs
            elif over and env in self.playing:
                game_return = row["game_return"][0, i].item()
                ended.append(Game(self.playing.pop(env), game_return, step.item()))
            is_free = env not in self.playing and present[0, i]
            # Not if it is in the middle of a game that another policy began.
            if is_free and (over or step == 0) and self.waiting:
                self.playing[env] = self.waiting.popleft()
            self.seen[env] = time.monotonic()
        return ended

    def replace_lost(self, seconds: float) -> None:
        """Games of environments that took no step for so long begin anew."""
        since = time.monotonic() - seconds
        for env in [x for x in self.playing if self.seen[x] < since]:
            self.waiting.append(self.playing.pop(env))
            log.warning("Game %d was lost: it begins anew.", self.waiting[-1])


def play_on_servers(
    flags: Flags, model_state: dict[str, torch.Tensor], numbers: Sequence[int]
) -> Games:
    """Plays games on the servers of --server_addresses or --listen.

    Yields each game when it ends. Which environment plays which game depends
    on the speed of the servers, so a repeated test may give other returns. Raises
    UserError if no server can be used, or the last one was lost.
    """
    if draws(flags):
        raise FlagError("servers can't show their games: leave out --server_addresses")
    # Batches of one fit all streams; nothing learns from them.
    layout: Any = {"batch_size": 1, "max_learner_queue_size": 1, "sync": False}
    if "envs_per_actor" not in flags.typed:
        layout["envs_per_actor"] = None  # the servers' number
    if "num_actors" not in flags.typed:
        layout["num_actors"] = 1 if flags.listen else len(server_addresses(flags))
    flags = flags.replace(**layout)
    results: queue.SimpleQueue[Game] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        envs = RemoteEnvs(flags, derive_seed(flags.seed, TEST_STREAM))
        stack.callback(envs.close)
        make_model = fits(flags, model_state)
        spec = envs.find_env_spec(lambda: None, make_model)
        model = make_model(spec)
        env_number = torch.zeros(1, 1, 1, dtype=torch.int64)
        state, cpu = (*model.initial_state(1), env_number), torch.device("cpu")
        streams = StreamGroup(flags, envs.addresses, envs, spec, state, (cpu, cpu))
        if envs.listener:
            streams.pool.settle()
        scorer = Scorer(numbers, spec.num_envs)

        def answer() -> None:
            """The inference thread: answers rows [1, n, ...] until the end."""
            generator = torch.Generator()
            generator.manual_seed(derive_seed(flags.seed, TEST_STREAM))
            sample = functools.partial(model.distribution.sample, generator=generator)
            choose = model.distribution.mode if flags.greedy else sample
            fields = rollout.env_fields(model.observation_space, model.distribution)
            for batch in streams.batcher:
                row, (*state, env_numbers) = batch.get_inputs()
                row, env_numbers = as_stored(row, fields), env_numbers.clone()
                for game in scorer.add(row, env_numbers[0, :, 0]):
                    results.put(game)
                # A step may take --actor_timeout, and a lost stream the other.
                scorer.replace_lost(flags.actor_timeout + flags.connect_timeout)
                outputs, new_state = act_step(model, row, tuple(state), choose)
                batch.set_outputs((outputs, (*new_state, env_numbers)))

        threads = stack.enter_context(ThreadPoolExecutor(3))
        stack.callback(streams.close)  # before the threads are joined
        drop: Any = functools.partial(collections.deque, streams.queue, 0)
        tasks = [threads.submit(work) for work in (answer, streams.pool.run, drop)]
        left = len(numbers)
        while left:
            envs.report([streams])
            for task in tasks:
                if task.done():
                    task.result()  # raises what has ended it
            with contextlib.suppress(queue.Empty):
                yield results.get(timeout=1.0)
                left -= 1
