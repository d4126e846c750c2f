"""The properties of the environment, found in a child process.

The learner process never runs an environment, because an environment may hang, crash
its process or leave programs behind.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from multiprocessing import connection
from typing import Any, NamedTuple

from gymnasium import spaces

from torchbeast.base.errors import UserError
from torchbeast.envs.environment import example_environment
from torchbeast.envs.space_checks import plain_space
from torchbeast.procs import processes
from torchbeast.procs.step_watch import print_stack
from torchbeast.runs.flagset import Flags

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
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_describe, args=(flags, writer), daemon=True)
    with contextlib.closing(processes.Guardian(CLOSE_SECONDS)) as guardian:
        guardian.start(process)
        try:
            writer.close()
            _receive(process, reader, flags, START_SECONDS, begun=False)
            spec = EnvSpec(*_receive(process, reader, flags, timeout, begun=True))
            process.join(CLOSE_SECONDS)
            if process.is_alive():
                log.warning(
                    "close() of %s did not return within %g s: its process is killed.",
                    *(flags.env, CLOSE_SECONDS),
                )
            return spec
        finally:
            guardian.end([process], 0)


def _receive(
    process: Any, reader: Any, flags: Flags, timeout: float, begun: bool
) -> tuple:
    ready = connection.wait([reader, process.sentinel], timeout)
    if not ready:
        text = f"{flags.env} was not made within {timeout:g} s. "
        if not begun:
            raise processes.ProcessError(text + "Its process still imports packages")
        print_stack(process.pid)
        raise processes.ProcessError(
            text + "If its process could print its stack, it is above. If it needs "
            "that long, raise --actor_timeout"
        )
    who = f"the process that made an environment of {flags.env}"
    kind, *rest = processes.receive(process, reader, who)
    if kind == "error":
        (error,) = rest
        raise error
    return tuple(rest)


def _describe(flags: Flags, pipe: connection.Connection) -> None:
    """The child process."""
    processes.begin_child()
    try:
        pipe.send(("begun",))
        with contextlib.closing(example_environment(flags)) as env:
            env.on_warning = lambda key, message: None  # the actors send it later
            spec = (env.observation_space, plain_space(env.action_space))
            pipe.send(("spec", *spec, env.frames_per_step, env.exact_resume))
    except UserError as error:
        pipe.send(("error", error))
    except BaseException:
        text = f"{flags.env} can't be made:\n{traceback.format_exc()}"
        with contextlib.suppress(OSError):  # the learner has exited
            pipe.send(("error", processes.ProcessError(text)))
