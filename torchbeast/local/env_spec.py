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
    """What a learner needs to know about its environments.

    Attributes:
      frames_per_step: emulator frames per step.
      exact_resume: whether games in progress can be saved.
      num_envs: environments per stream (PolyBeast).
      hello: the serialized hello of a stream, for comparison with others (PolyBeast).
    """

    observation_space: spaces.Space
    action_space: spaces.Space
    frames_per_step: int
    exact_resume: bool = False
    num_envs: int = 1
    hello: bytes = b""


def find_env_spec(flags: Flags, context: Any, timeout: float) -> EnvSpec:
    """Makes the environment in a child process, reads its properties and closes it.

    Args:
      context: of multiprocessing, starts the child.
      timeout: seconds for making the environment.

    Raises:
      ProcessError: the environment raised, took too long, or its process died.
      UserError: the flags do not name a usable environment.
    """
    log.info("Making one environment of %s to read its spaces.", flags.env)
    with contextlib.closing(children.Children(context)) as group:
        who = f"the process that made an environment of {flags.env}"
        child = group.start(who, _describe, flags)
        for seconds, advice in (
            (START_SECONDS, "Its process still imports packages"),
            (timeout, "If it needs that long, raise --actor_timeout"),
        ):
            if not children.wait([child], seconds):
                children.print_stack(child)
                raise children.ProcessError(
                    f"{flags.env} was not made within {seconds:g} s. If its process "
                    f"could print its stack, it is above. {advice}"
                )
            spec = child.receive()
        child.process.join(CLOSE_SECONDS)
        if child.process.is_alive():
            log.warning(
                "close() of %s did not return within %g s: its process is killed.",
                *(flags.env, CLOSE_SECONDS),
            )
        return spec


def spec_of(env: Any) -> EnvSpec:
    """The properties of an Environment."""
    from torchbeast.envs.values import plain_space

    both = env.observation_space, plain_space(env.action_space)
    return EnvSpec(*both, env.frames_per_step, env.exact_resume)


def _describe(flags: Flags, pipe: connection.Connection) -> None:
    """The child process. Only here are the environment's modules imported."""
    children.begin_child()
    with children.sending_errors(pipe, f"{flags.env} can't be made"):
        from torchbeast.envs.environment import example_environment

        pipe.send(())  # it has begun
        with (
            contextlib.closing(example_environment(flags)) as env,
            children.sending_errors(pipe, f"{flags.env} can't be made"),
        ):
            pipe.send(spec_of(env))
