"""The properties of the environment, found in a child process.

The learner process never runs an environment, because an environment may hang, crash
its process or leave programs behind.
"""

import contextlib
import logging
from multiprocessing import connection
from typing import Any, NamedTuple

from gymnasium import spaces

from torchbeast.flags import Flags
from torchbeast.procs import children

log = logging.getLogger(__name__)

START_SECONDS = 300.0  # time limit for the imports of the child process
CLOSE_SECONDS = 5.0  # time limit for the environment's close()


class EnvSpec(NamedTuple):
    """What a learner needs to know about its environments."""

    observation_space: spaces.Space
    action_space: spaces.Space
    frames_per_step: int  # of the emulator
    exact_resume: bool = False  # whether games in progress can be saved
    num_envs: int = 1  # per stream (PolyBeast)
    hello: bytes = b""  # serialized, of a stream, to compare it with others (PolyBeast)


def find_env_spec(flags: Flags, context: Any, timeout: float) -> EnvSpec:
    """Makes the environment in a child process, reads its properties and closes it.

    Raises UserError if it can't be used, or was not made within `timeout` seconds.
    """
    log.info("Making one environment of %s to read its spaces.", flags.env)
    with contextlib.closing(children.Children(context)) as group:
        who = f"the process that makes an environment of {flags.env}"
        child = group.start(who, _describe, flags)
        for seconds in (START_SECONDS, timeout):  # of the imports, of the environment
            if not children.wait([child], seconds):
                child.fail_stuck(seconds)
            spec = child.receive()
        group.end(CLOSE_SECONDS)
        return spec


def spec_of(env: Any) -> EnvSpec:
    """The properties of an Environment."""
    from torchbeast.envs.values import plain_space

    spaces = env.observation_space, plain_space(env.action_space)
    return EnvSpec(*spaces, env.frames_per_step, env.exact_resume)


def _describe(flags: Flags, pipe: connection.Connection) -> None:
    """The child process. Only here are the environment's modules imported."""
    children.begin_child()
    with children.sending_errors(pipe, f"{flags.env} can't be made"):
        from torchbeast.envs.environment import example_environment

        pipe.send(())  # it has begun
        with contextlib.closing(example_environment(flags)) as env:
            pipe.send(spec_of(env))
