"""MonoBeast: IMPALA on one machine, in one script.

    actor processes                          learner process (this one)
    step E environments, one batched    ->   the main thread gives free slots to actors
    forward on the CPU, write rows 0..T      and full ones to the learner threads;
    of E slots of shared memory              they gather a batch, free its slots, learn,
    load the newest weights             <-   and publish the weights

A slot holds one rollout. Read this file top to bottom: Actor, get_batch, the two loops
at_once and in_rounds, train, main. One update is in learner.py, the model in model.py,
the fields of a row in core/rollout.py; processes and threads are in local/.

    python -m torchbeast.monobeast --env PongNoFrameskip-v4
    python -m torchbeast.monobeast --mode test --xpid NAME
"""

if __name__ == "__main__":
    import sys

    from torchbeast.procs import processes

    processes.exit_on_stop_signals()  # the imports take seconds
    # By its own name, so that child processes find Actor, also under pdb and cProfile.
    from torchbeast import monobeast

    sys.exit(monobeast.main())

import collections
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchbeast.base import devices, parts, ranks
from torchbeast.base.flag import FlagParser
from torchbeast.base.hardware import keep_freed_memory
from torchbeast.base.nested import Nested, map_nested
from torchbeast.base.seeds import derive_seed
from torchbeast.core import rollout
from torchbeast.core.acting import act_step, prepare_to_act, to_tensors
from torchbeast.core.buffers import create_buffers
from torchbeast.core.rollout import State
from torchbeast.core.timings import Timings, format_shares
from torchbeast.core.weights import SharedWeights
from torchbeast.flags import GROUPS, Flags
from torchbeast.learner import Learner, Update, learn
from torchbeast.local.layout import actors_class, resolve_layout
from torchbeast.model import CHOICES, make_model
from torchbeast.procs.threads import LearnerThreads
from torchbeast.runs import checkpoint
from torchbeast.runs.flagset import parse, resolve
from torchbeast.runs.run import Run
from torchbeast.runs.start import Start, check_games_can_be_saved, run_script

if TYPE_CHECKING:
    from torchbeast.envs.environment import Environment

log = logging.getLogger("torchbeast.monobeast")


# --- Acting ---------------------------------------------------------------------------


class Actor:
    """Acts in E environments and fills slots with rollouts of rows 0..T.

    It knows neither processes nor pipes, so it also works in a notebook:

        actor = Actor(flags, env, make_buffers(flags, learner), weights.memory)
        actor.load_weights(bank, policy_version)
        actor.unroll(list(range(env.num_envs)))

    Args:
      env: E = env.num_envs environments.
      buffers: the slots, see make_buffers.
      weights_memory: [banks, bytes] uint8, see SharedWeights.
      index: the actor's number; actors with different numbers act differently.
      num_steps: int64 scalar, for example in shared memory; counts the steps.
    """

    def __init__(
        self,
        flags: Flags,
        env: "Environment",
        buffers: dict[str, Nested],
        weights_memory: torch.Tensor,
        index: int = 0,
        num_steps: torch.Tensor | None = None,
    ) -> None:
        self.env, self.unroll_length = env, flags.unroll_length
        spaces = env.observation_space, env.action_space
        self.model = make_model(flags, *spaces, torch.device("cpu"))
        # Before prepare_to_act, whose casts change the layout.
        self.weights = SharedWeights(self.model, weights_memory)
        prepare_to_act(self.model, flags.compile)
        self.policy_version = 0  # number of updates of the weights
        self.generator = torch.Generator().manual_seed(derive_seed(flags.seed, index))
        self.sample = functools.partial(
            self.model.distribution.sample, generator=self.generator
        )
        # NumPy writes to several slots at once, much faster than torch.
        self.slot_rows = map_nested(torch.Tensor.numpy, buffers["rows"])
        self.slot_states = buffers["initial_state"]
        self.num_steps = torch.tensor(0) if num_steps is None else num_steps
        self.row: dict[str, Nested] | None = None  # the newest, [E, ...] in NumPy
        self.state_before: State = ()  # recurrent state before the newest row
        self.state: State = ()  # recurrent state after it
        self.timings = Timings()  # "load", "env", "act", "write"; a process adds "wait"

    def load_weights(self, bank: int, policy_version: int) -> None:
        """From now on acts with a bank's weights, which have had so many updates."""
        self.model.load_state_dict(self.weights.banks[bank])  # casts to its dtypes
        self.policy_version = policy_version
        self.timings.time("load")

    def unroll(self, slots: list[int]) -> None:
        """Fills a slot per environment: rows 0..T, and the state before row 0."""
        if self.row is None:
            self.state = self.model.initial_state(self.env.num_envs)
            self.decide(self.env.initial())
            self.timings.reset()  # don't count the first calls, which are slow
        assert self.row is not None
        self.write(slots, 0)
        for buffer, x in zip(self.slot_states, self.state_before, strict=True):
            buffer[slots] = x.movedim(1, 0)  # [layers, E, ...] -> [E, layers, ...]
        self.timings.time("write")
        for t in range(1, self.unroll_length + 1):
            env_row = self.env.step(self.row["action"])
            self.timings.time("env")
            self.decide(env_row)
            self.timings.time("act")
            self.write(slots, t)
            self.timings.time("write")
            self.num_steps += 1

    def decide(self, env_row: dict[str, Nested]) -> None:
        """Chooses actions: sets the row, and the states before and after it."""
        self.state_before = self.state
        row, final = to_tensors(env_row), self.env.final_observation
        if final is not None:  # of truncated episodes
            final = to_tensors(final)
        about = row, self.state, self.sample, self.policy_version, final
        outputs, self.state = act_step(self.model, *about)
        self.row = env_row | map_nested(lambda x: x.squeeze(0).numpy(), outputs)

    def write(self, slots: list[int], t: int) -> None:
        """Writes the row as row t of the slots."""
        index = np.array(slots)  # fast; buffer[slots, t] takes up to 7 times as long

        def copy(buffer: np.ndarray, x: np.ndarray) -> None:
            buffer[:, t][index] = x  # one slot per environment

        map_nested(copy, self.slot_rows, self.row)

    def state_dict(self) -> dict[str, Any]:
        """What an exact resume needs, between two unrolls."""
        return {
            "env": self.env.state_dict(),
            "generator": self.generator.get_state(),
            "globals": checkpoint.rng_state(),
            "row": map_nested(torch.from_numpy, self.row),
            "policy_version": self.policy_version,
            "state_before": self.state_before,
            "state": self.state,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.env.load_state_dict(saved["env"])
        self.generator.set_state(saved["generator"])
        checkpoint.set_rng_state(saved["globals"])
        self.row = map_nested(torch.Tensor.numpy, saved["row"])
        self.policy_version = saved["policy_version"]
        self.state_before, self.state = saved["state_before"], saved["state"]


# --- Learning -------------------------------------------------------------------------


def make_buffers(flags: Flags, learner: Learner) -> dict[str, Nested]:
    """Makes slots: rows [slots, T + 1, ...], state [slots, layers, ...]."""
    state = learner.model.initial_state(1)
    states = tuple(rollout.Spec(x[:, 0].shape, x.dtype) for x in state)
    N, T = flags.num_buffers, flags.unroll_length
    return {
        "rows": create_buffers(learner.row_spec, (N, T + 1)),
        "initial_state": create_buffers(states, (N,)),
    }


def get_batch(
    buffers: dict[str, Nested], slots: list[int], device: torch.device
) -> tuple[dict[str, Nested], State]:
    """Copies slots into a batch: rows [T + 1, B, ...], state [layers, B, ...]."""

    def gather(buffer: torch.Tensor) -> torch.Tensor:
        # [slots, n, ...] -> [n, B, ...], where n is T + 1, or layers for the state
        return devices.stack([buffer[i] for i in slots], 1, device)

    return map_nested(gather, (buffers["rows"], buffers["initial_state"]))


def at_once(run: Run, actors: Any, learn_from: Callable[..., None]) -> None:
    """Actors act while the learner learns: a batch has the slots that are filled first.

    The cycle of a slot: free -> an actor fills it, with the newest weights -> filled
    -> in a batch -> free. For learn_from see `train`.
    """
    flags = run.flags
    B, E = flags.batch_size, flags.envs_per_actor
    free = collections.deque(range(flags.num_buffers))
    filled: collections.deque[int] = collections.deque()

    def give_back(slots: list[int]) -> None:
        free.extend(slots)
        run.wake()

    count = actors.num_learner_threads
    learning = LearnerThreads(run, count, lambda *x: learn_from(*x, give_back))
    while run.going():
        if run.save_is_due():
            run.save()
        while actors.idle and len(free) >= E:
            actors.start_unroll(actors.idle[0], [free.popleft() for _ in range(E)])
        for _, slots in actors.finished(1.0, run.wake_reader):
            filled.extend(slots)
        while len(filled) >= B:
            learning.put([filled.popleft() for _ in range(B)])
        run.show(len(filled) + learning.waiting.qsize() * B, actors.num_steps())


def in_rounds(run: Run, actors: Any, learn_from: Callable[..., None]) -> None:
    """--sync: each actor fills its own slots, then the learner learns from all of them.

    The run can be saved, and end, only between two rounds.
    """
    flags = run.flags
    A, B, E = flags.num_actors, flags.batch_size, flags.envs_per_actor
    learned: list[list[int]] = []  # the batches of this round

    def learn_from_batch(slots: list[int], wait_for_turn: Callable[[], Any]) -> None:
        learn_from(slots, wait_for_turn, lambda slots: None)
        if learning.waiting.empty():  # the actors go on next
            run.finish_updates()
        learned.append(slots)
        run.wake()

    def wait_until(reached: Callable[[], bool]) -> None:
        while not reached():
            list(actors.finished(1.0, run.wake_reader))  # raises if one has died
            run.stop_requested()  # raises if a thread has failed
            run.show(0, actors.num_steps())

    def save() -> None:
        if ranks.of_first(run.has_news):
            games = ranks.joined_list(actors.save())
            run.save(lambda: {"actors": games})

    learning = LearnerThreads(run, actors.num_learner_threads, learn_from_batch)
    while run.going():
        if ranks.of_first(run.save_is_due):
            save()
        for i in range(A):
            actors.start_unroll(i, list(range(i * E, (i + 1) * E)))
        wait_until(lambda: len(actors.idle) == A)
        learned.clear()
        for first in range(0, A * E, B):
            learning.put(list(range(first, first + B)))
        wait_until(lambda: len(learned) == A * E // B)
    save()  # while the actors still run: the checkpoint needs their state


def train(start: Start, *attach: Callable[[Run], Any], until: int | None = None) -> int:
    """Trains until --total_steps or a stop signal, see Run. Returns the exit status."""
    flags = start.flags
    env_spec = actors_class(flags).find_env_spec(flags)
    check_games_can_be_saved(flags, env_spec.exact_resume)
    learner = Learner(flags, env_spec)
    keep_freed_memory(learner.device)
    run = Run(start, learner, attach, until)
    weights = SharedWeights(learner.model)
    weights.publish(learner.model.state_dict(), learner.num_updates)
    buffers = make_buffers(flags, learner)

    def learn_from(slots: list[int], wait_for_turn: Any, copied: Any) -> None:
        """Several threads may copy batches, but one at a time learns, in order.

        It calls copied(slots) when actors may fill the slots again.
        """
        with devices.copying(learner.device):
            batch, initial_state = get_batch(buffers, slots, learner.device)
        copied(slots)
        wait_for_turn()
        with run.updating() as wanted:
            if wanted:
                run.add(learn(learner, batch, initial_state))

    def finish(update: Update) -> None:
        """Run calls it when `updating` ends or, with a GPU, when the update is made."""
        columns = update.finish()
        actors.publish(update.weights, update.policy_version)
        run.log(columns)

    run.on_update = finish
    with run:
        acting_flags = flags.replace(seed=start.env_seed())
        actors = actors_class(flags)(
            Actor, acting_flags, env_spec, buffers, weights, start.games()
        )
        run.stack.callback(log_timings, run, actors)  # at the end, after close
        run.stack.callback(actors.close)
        rows = map_nested(torch.Tensor.numpy, buffers["rows"])
        for guest in run.guests:
            if hasattr(guest, "actors"):  # it records their order, or repeats one
                actors = guest.actors(actors, rows)
        loop = in_rounds if flags.sync else at_once
        loop(run, actors, learn_from)
    return run.exit_status


def log_timings(run: Run, actors: Any) -> None:
    shares = {"learner": run.timings.shares(), "actors": actors.timing_shares()}
    run.shares |= shares
    log.info("Learner: %s. Actors: %s.", *map(format_shares, shares.values()))


# --- Command line ---------------------------------------------------------------------


def make_parser() -> FlagParser:
    groups = (*GROUPS, *parts.groups())
    return FlagParser("MonoBeast: IMPALA on one machine.", groups, CHOICES)


def make_flags(argv: Sequence[str] = ()) -> Flags:
    """The flags of a command line, resolved and frozen: for notebooks and tests."""
    return resolve_layout(resolve(parse(make_parser(), argv))).freeze()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 finished, 1 failed, 128 + n ended by signal n."""
    return run_script(make_parser(), argv, resolve_layout, train)
