"""MonoBeast: IMPALA on one machine, in one script.

    actor processes                          learner process (this one)
    step E environments, one batched    ->   the main thread gives free slots to actors
    forward on the CPU, write rows 0..T      and full ones to the learner threads;
    of E slots of shared memory              they gather a batch, free its slots, learn,
    load the newest weights             <-   and publish the weights

A slot holds one rollout. Read this file top to bottom: act, get_batch, train, flags,
main. One update is in learner.py, the model in model.py, the fields of a row in
core/rollout.py.

    python -m torchbeast.monobeast --env PongNoFrameskip-v4
    python -m torchbeast.monobeast --mode test --xpid NAME
"""

if __name__ == "__main__":
    from torchbeast.procs import processes

    processes.exit_on_stop_signals()  # the imports below take seconds

import collections
import contextlib
import functools
import logging
import pickle
import queue
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

import numpy as np
import torch

from torchbeast import flags as declared_flags
from torchbeast.base.errors import FlagError
from torchbeast.base.flag import FlagParser
from torchbeast.base.hardware import keep_freed_memory
from torchbeast.base.nested import Nested, map_nested
from torchbeast.base.seeds import derive_seed
from torchbeast.core import rollout
from torchbeast.core.acting import (
    SharedWeights,
    act_step,
    prepare_to_act,
    to_tensors,
)
from torchbeast.core.rollout import State
from torchbeast.envs.environment import Environment
from torchbeast.learner import Learner, learn
from torchbeast.local.actors import Actors, actor_context
from torchbeast.local.env_spec import find_env_spec
from torchbeast.model import TORSOS, make_model
from torchbeast.play.evaluate import evaluate
from torchbeast.play.evaluator import Evaluator
from torchbeast.procs import processes
from torchbeast.runs import checkpoint, flagset, launcher, resume, script
from torchbeast.runs.flagset import Flags
from torchbeast.runs.prof import Timings, format_shares
from torchbeast.runs.run import Run

log = logging.getLogger("torchbeast.monobeast")


# --- Acting ---------------------------------------------------------------------------


def act(
    flags: Flags,
    index: int,
    env: Environment,
    pipe: connection.Connection,
    buffers: dict[str, Nested],
    weights_memory: torch.Tensor,
    steps: torch.Tensor,
    saved: bytes | None,
) -> None:
    """The loop of actor number `index`: fills slots until the learner closes the pipe.

    E environments fill E slots at a time, each with one rollout of rows 0..T.

    Args:
      pipe: commands of the learner, see local/actors.py.
      buffers: the slots, see make_buffers.
      weights_memory: [banks, bytes] uint8, see SharedWeights.
      steps: [num_actors] int64 in shared memory; each actor counts its steps here.
      saved: the actor's state to resume from (only with --sync).
    """
    E, T = env.num_envs, flags.unroll_length
    model = make_model(
        flags, env.observation_space, env.action_space, torch.device("cpu")
    )
    weights = SharedWeights(model, weights_memory)  # before casts change the layout
    prepare_to_act(model)
    generator = torch.Generator().manual_seed(derive_seed(flags.seed, index))
    sample = functools.partial(model.distribution.sample, generator=generator)
    timings = Timings()

    # NumPy writes to several slots at once, much faster than torch.
    slot_rows = map_nested(torch.Tensor.numpy, buffers["rows"])
    policy_version = 0  # number of updates of the weights
    row: dict[str, Nested] | None = None  # the newest row [E, ...]
    state_before: State = ()  # recurrent state before the newest row
    state: State = ()  # recurrent state after it

    def decide(
        env_row: dict[str, Nested], state: State
    ) -> tuple[dict[str, Nested], State]:
        """Returns the row (environment and agent outputs) and the state after it."""
        final = env.final_observation  # of truncated episodes
        outputs, next_state = act_step(
            model,
            to_tensors(env_row),
            state,
            sample,
            policy_version,
            None if final is None else to_tensors(final),
        )
        agent_row = map_nested(lambda x: x.squeeze(0).numpy(), outputs)  # [E, ...]
        return env_row | agent_row, next_state

    def write(slots: list[int], t: int, row: dict[str, Nested]) -> None:
        def copy(buffer: np.ndarray, x: np.ndarray) -> None:
            buffer[slots, t] = x  # one slot per environment

        map_nested(copy, slot_rows, row)

    if saved is not None:
        old = pickle.loads(saved)
        env.load_state_dict(old["env"])
        generator.set_state(old["generator"])
        checkpoint.set_rng_state(old["globals"])
        row = map_nested(torch.Tensor.numpy, old["row"])
        policy_version = old["policy_version"]
        state_before, state = old["state_before"], old["state"]

    while True:
        timings.reset()
        command, *arguments = pipe.recv()  # EOFError at the end, see act_until_closed
        timings.time("wait")
        if command == "save":
            current = {
                "env": env.state_dict(),
                "generator": generator.get_state(),
                "globals": checkpoint.rng_state(),
                "row": map_nested(torch.from_numpy, row),
                "policy_version": policy_version,
                "state_before": state_before,
                "state": state,
            }
            # As bytes: pipes send tensors through shared memory, which may be full.
            pipe.send(("saved", pickle.dumps(current)))
            continue
        slots, bank, policy_version = arguments
        weights.load_into(model, bank)
        pipe.send(("loaded", bank))
        timings.time("load")
        if row is None:
            state_before = state = model.initial_state(E)
            row, state = decide(env.initial(), state)
            timings.reset()  # don't count the first calls, which are slow

        write(slots, 0, row)  # the last row of the previous rollout
        for buffer, x in zip(buffers["initial_state"], state_before, strict=True):
            buffer[slots] = x.movedim(1, 0)  # [layers, E, ...] -> [E, layers, ...]
        timings.time("write")
        for t in range(1, T + 1):
            env_row = env.step(row["action"])
            timings.time("env")
            state_before = state
            row, state = decide(env_row, state)
            timings.time("act")
            write(slots, t, row)
            timings.time("write")
            steps[index] += 1
        pipe.send(("done", slots, timings.shares()))


# --- Learning -------------------------------------------------------------------------


def make_buffers(flags: Flags, learner: Learner) -> dict[str, Nested]:
    """Makes slots: rows [slots, T + 1, ...], state [slots, layers, ...]."""
    states = [
        rollout.Spec((x.shape[0], *x.shape[2:]), x.dtype)
        for x in learner.model.initial_state(1)
    ]
    N, T = flags.num_buffers, flags.unroll_length
    return {
        "rows": rollout.create_buffers(learner.row_spec, (N, T + 1)),
        "initial_state": rollout.create_buffers(tuple(states), (N,)),
    }


def get_batch(
    buffers: dict[str, Nested], slots: list[int], device: torch.device
) -> tuple[dict[str, Nested], State]:
    """Copies slots into a batch: rows [T + 1, B, ...], state [layers, B, ...]."""

    def gather(buffer: torch.Tensor) -> torch.Tensor:
        # [slots, n, ...] -> [n, B, ...], where n is T + 1, or layers for the state
        return torch.stack([buffer[i] for i in slots], dim=1).to(device)

    batch = map_nested(gather, buffers["rows"])
    return batch, map_nested(gather, buffers["initial_state"])


def train(start: resume.Start) -> int:
    """Trains until flags.total_steps or a stop signal. Returns the exit status."""
    flags = start.flags
    env_spec = find_env_spec(flags, actor_context(), flags.actor_timeout)
    if flags.sync and not flags.disable_checkpoint and not env_spec.exact_resume:
        raise FlagError(
            "--sync saves the games in progress, but native vector environments can't "
            "do that: add --disable_checkpoint, or for Atari --atari_backend python"
        )
    B, E = flags.batch_size, flags.envs_per_actor
    learner = Learner(flags, env_spec)
    keep_freed_memory(learner.device)
    run = Run(start, learner)
    weights = SharedWeights(learner.model)
    weights.publish(learner.model, learner.num_updates)
    buffers = make_buffers(flags, learner)

    # The cycle of a slot: free -> an actor fills it -> filled -> in a batch -> free.
    free = collections.deque(range(flags.num_buffers))
    filled: collections.deque[int] = collections.deque()
    batches: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()  # None: stop
    sync_round: dict[int, list[int]] = {}  # the slots that each actor has filled

    def give_back(slots: list[int]) -> None:
        free.extend(slots)
        run.wake()

    def learn_from_batches() -> None:
        """A learner thread. Several may gather batches, but one at a time learns."""
        while (slots := batches.get()) is not None:
            batch, initial_state = get_batch(buffers, slots, learner.device)
            if not flags.sync:  # the actors may fill them while this thread learns
                give_back(slots)
            with run.updating() as wanted:
                if not wanted:
                    break
                columns = learn(learner, batch, initial_state)
                weights.publish(learner.model, learner.num_updates)
                run.log(columns)
            if flags.sync:  # the actors' next weights have this update
                give_back(slots)

    def stop_learning() -> None:
        with contextlib.suppress(queue.Empty):
            while True:  # drop waiting batches
                batches.get_nowait()
        for _ in range(flags.num_learner_threads):
            batches.put(None)

    with run:
        actor_flags = flags
        if start.saved and not flags.sync:  # don't repeat the games before the resume
            actor_flags = flags.replace(seed=derive_seed(flags.seed, learner.step))
        saved = start.saved["actors"] if start.saved and flags.sync else None
        actors = actors_class(flags)(act, actor_flags, buffers, weights, saved)
        run.stack.callback(log_timings, run, actors)  # at the end, after close
        run.stack.callback(actors.close)
        run.on_stop(stop_learning)
        for i in range(1 if flags.sync else flags.num_learner_threads):
            run.start_thread(f"learner-{i}", learn_from_batches)

        def more_to_save() -> dict[str, Any]:
            return {"actors": actors.save()} if flags.sync else {}

        evaluator = Evaluator(run)
        # --sync works in rounds: each actor fills its slots, then the learner uses all
        # of them, and all slots are free again. Only between rounds can a run be saved
        # or end, and new unrolls start.
        while True:
            between_rounds = not flags.sync or len(free) == flags.num_buffers
            if not run.going(may_stop=between_rounds):
                break
            evaluator.poll()
            if between_rounds:
                if run.save_is_due():
                    run.save(more_to_save)
                for index in actors.idle[:]:
                    if len(free) >= E:
                        actors.start_unroll(index, [free.popleft() for _ in range(E)])
            for index, slots in actors.finished(1.0, run.wake_reader):
                if flags.sync:  # wait for the other actors
                    sync_round[index] = slots
                else:
                    filled.extend(slots)
            if len(sync_round) == flags.num_actors:
                for _, slots in sorted(sync_round.items()):  # in the order of actors
                    filled.extend(slots)
                sync_round.clear()
            while len(filled) >= B:
                batches.put([filled.popleft() for _ in range(B)])
            run.show(len(filled) + batches.qsize() * B, actors.num_steps())
        if flags.sync:  # the actors still run: the checkpoint needs their state
            run.save(more_to_save)
        evaluator.finish()
    return run.exit_status


def log_timings(run: Run, actors: Any) -> None:
    learner = format_shares(run.timings.shares())
    log.info("Learner: %s. Actors: %s.", learner, actors.timing_summary())


# --- Command line ---------------------------------------------------------------------


def make_parser() -> FlagParser:
    groups = (*declared_flags.TRAINING, declared_flags.MonoBeast)
    return declared_flags.make_parser(
        "MonoBeast: IMPALA on one machine.",
        TORSOS,
        (*groups, declared_flags.Launcher),
    )


def actors_class(flags: Flags) -> Any:
    """Actors, or with --launcher ray RayActors."""
    if flags.launcher == "ray":
        from torchbeast.on_ray.actors import RayActors  # optional

        return RayActors
    return Actors


def resolve_layout(flags: Flags) -> Flags:
    """Fills in the layout flags that depend on each other, and checks them.

    Raises:
      FlagError: with these flags, actors and learner would wait for each other forever.
    """
    A, B = flags.num_actors, flags.batch_size
    if flags.envs_per_actor is None:
        flags.envs_per_actor = 8
        if flags.num_buffers is not None:  # no more than there are slots
            flags.envs_per_actor = max(1, min(8, flags.num_buffers // A, B))
    E = flags.envs_per_actor
    if flags.num_buffers is None:
        flags.num_buffers = A * E if flags.sync else A * E + max(B, E)
    # B - 1 rollouts may wait for a batch while each actor waits for E free slots.
    least = max(A * E, E + B - 1)
    if flags.num_buffers < least and not flags.sync:
        raise FlagError(
            f"--num_buffers {flags.num_buffers} is too small: {A} actors with {E} "
            f"environments each and a batch of {B} rollouts need at least {least}"
        )
    launcher.check(flags)
    if flags.sync and (A * E % B or flags.num_buffers != A * E):
        raise FlagError(
            f"--sync learns from all {A * E} environments in turn (--num_actors {A} "
            f"times --envs_per_actor {E}): --batch_size must divide this number, got "
            f"{B}, and --num_buffers must equal it, got {flags.num_buffers}"
        )
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 finished, 1 failed, 128 + n ended by signal n."""
    parser = make_parser()
    with script.reported() as outcome:
        typed = flagset.read(parser, argv)
        if flagset.merge(typed).mode == "train":
            with resume.begin(typed, resolve_layout) as start:
                outcome.status = 0 if start.is_finished() else train(start)
        else:
            evaluate(typed)
    return outcome.status


if __name__ == "__main__":
    processes.run_script(main)
