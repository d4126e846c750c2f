"""A checkpoint as an agent, for example in a notebook.

This plays two steps:

    from torchbeast import load_agent

    agent = load_agent("~/logs/torchbeast/latest")
    env = agent.make_env()
    observation, _ = env.reset()
    action, state = agent.act(observation)
    observation, reward, terminated, truncated, _ = env.step(action)
    action, state = agent.act(observation, state, reward)

Without a state, an episode begins.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import concatenate, create_empty_array

from torchbeast.core import checkpoint, declared_flags
from torchbeast.core import flags as flags_lib
from torchbeast.core.acting import prepare_to_act, to_tensors
from torchbeast.core.atari_wrappers import atari_game
from torchbeast.core.env_checks import InvalidEnvironmentError
from torchbeast.core.environment import example_environment, to_env_actions
from torchbeast.core.extra_fields import EXTRA_FIELDS
from torchbeast.core.flags import Flags
from torchbeast.core.make_env import create_env
from torchbeast.core.rollout import State
from torchbeast.core.vector_envs import find_vector_env
from torchbeast.model import TORSOS, Net, make_model


class AgentState(NamedTuple):
    """What an agent remembers between two steps of an episode."""

    core: State
    last_action: torch.Tensor  # [1, 1, ...], as the policy counts it


class Agent:
    """A model with its flags, for one environment at a time.

    Attributes:
      flags: of the run.
      model: see model.py.
      observation_space, action_space: of the environment.
    """

    def __init__(
        self,
        flags: Flags,
        model: Net,
        observation_space: gymnasium.Space,
        action_space: gymnasium.Space,
    ) -> None:
        self.flags, self.model = flags, model
        self.observation_space, self.action_space = observation_space, action_space
        self.generator = torch.Generator()
        self.generator.seed()

    def make_env(self, render_mode: str | None = None) -> gymnasium.Env:
        """The environment of the run, with its wrappers.

        Raises:
          InvalidEnvironmentError: --env makes several environments at once.
          UserError: the environment can't be made.
        """
        name = self.flags.env
        if not atari_game(name) and find_vector_env(self.flags):
            raise InvalidEnvironmentError(
                f"--env {name} makes several environments at once, and this agent acts "
                "in one: make and step one of them in your own code"
            )
        return create_env(self.flags, render_mode)

    @torch.inference_mode()
    def act(
        self,
        observation: Any,
        state: AgentState | None = None,
        reward: float = 0.0,
        greedy: bool = False,
        fields: Mapping[str, Any] | None = None,
    ) -> tuple[Any, AgentState]:
        """Chooses an action.

        Args:
          observation: of the environment; nested as its space.
          state: what the last call in this episode has returned; None: it begins.
          reward: of the last step.
          greedy: take the most likely action; otherwise sample.
          fields: values of core/extra_fields.py's EXTRA_FIELDS, as the info has them.

        Returns:
          The action for env.step, and the state for the next call.
        """
        distribution = self.model.distribution
        space = self.observation_space
        is_first = state is None
        if state is None:
            shape = (1, 1, *distribution.action_shape)
            none = torch.zeros(shape, dtype=distribution.action_dtype)
            state = AgentState(self.model.initial_state(1), none)
        out: Any = create_empty_array(space, 1)
        row: dict[str, Any] = {
            "observation": concatenate(space, [observation], out),
            "reward": np.array([reward], np.float32),
            "done": np.array([is_first]),
            "truncated": np.array([False]),
        }
        for name, field in EXTRA_FIELDS.items():
            value = (fields or {}).get(name, np.zeros(field.shape))
            row[name] = np.asarray(value, field.dtype)[None]
        tensors = {**to_tensors(row), "last_action": state.last_action}
        outputs, core = self.model(tensors, state.core)
        logits = outputs["policy_logits"]
        if greedy:
            action = distribution.mode(logits)
        else:
            action = distribution.sample(logits, generator=self.generator)
        (chosen,) = to_env_actions(self.action_space, 1, action.squeeze(0).numpy())
        return chosen, AgentState(core, action)


def load_agent(path: str | os.PathLike[str]) -> Agent:
    """Loads a checkpoint for acting on the CPU.

    Makes one environment, to read its spaces. If --env or --wrapper name a module, it
    is imported.

    Args:
      path: a model.tar, or the folder of a run.

    Raises:
      CheckpointError: the file can't be read, or does not fit the model.
      UserError: the environment can't be made.
    """
    file = checkpoint.find(path)
    saved = checkpoint.load(file)
    checkpoint.check(saved, file, for_test=True)
    parser = declared_flags.make_parser("", TORSOS)
    flags = flags_lib.parse(parser, ["--mode=test"], saved["flags"])
    flags = flags_lib.resolve(flags).freeze()
    with contextlib.closing(example_environment(flags)) as env:
        spaces = env.observation_space, env.action_space
    model = make_model(flags, *spaces, torch.device("cpu"))
    checkpoint.check_fit(saved["model_state_dict"], model)
    model.load_state_dict(saved["model_state_dict"])
    actions = env.envs.single_action_space
    return Agent(flags, prepare_to_act(model), env.observation_space, actions)
