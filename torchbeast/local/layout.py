"""MonoBeast's layout: what starts actors, and the flags that depend on each other."""

from typing import Any

from torchbeast.base import parts
from torchbeast.base.errors import FlagError
from torchbeast.flags import Flags
from torchbeast.local.actors import Actors


def actors_class(flags: Flags) -> Any:
    """Actors, or what a part has in their place. Raises FlagError if it can't be."""
    return [Actors, *filter(None, parts.call("actors_class", flags))][-1]


def resolve_layout(flags: Flags) -> Flags:
    """Fills in the layout flags that depend on each other, and checks them.

    Raises FlagError if actors and learner could wait for each other forever, or --sync
    or a part does not allow these flags.
    """
    A, B = flags.num_actors, flags.batch_size
    if flags.envs_per_actor is None:
        flags.envs_per_actor = 8
        if (N := flags.num_buffers) is not None:  # as many as these slots allow
            most = N // A if flags.sync else min(8, N // A, B, N - B + 1)
            flags.envs_per_actor = max(1, most)
    E = flags.envs_per_actor
    if flags.num_buffers is None:
        more = max(B, E) if A > 1 else B  # one goes on when the learner has a batch
        flags.num_buffers = A * E if flags.sync else A * E + more
    # B - 1 rollouts may wait for a batch while each actor waits for E free slots.
    least = max(A * E, E + B - 1)
    if flags.num_buffers < least and not flags.sync:
        raise FlagError(
            f"--num_buffers {flags.num_buffers} is too small: {A} actors with {E} "
            f"environments each and a batch of {B} rollouts need at least {least}"
        )
    actors_class(flags)  # raises if they can't be used
    if flags.sync and (A * E % B or flags.num_buffers != A * E):
        raise FlagError(
            f"--sync learns from all {A * E} environments in turn (--num_actors {A} "
            f"times --envs_per_actor {E}): --batch_size must divide this number, got "
            f"{B}, and --num_buffers must equal it, got {flags.num_buffers}"
        )
    return flags
