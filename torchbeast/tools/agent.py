"""A checkpoint as an agent, for example in a notebook.

This plays two steps. Without a state, an episode begins:

    from torchbeast import load_agent

    agent = load_agent("~/logs/torchbeast/latest")
    env = agent.make_env()
    observation, _ = env.reset()
    action, state = agent.act(observation)
    observation, reward, terminated, truncated, _ = env.step(action)
    action, state = agent.act(observation, state, reward)
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

from torchbeast.base import devices, parts
from torchbeast.base.flag import FlagParser
from torchbeast.base.nested import flatten, map_nested
from torchbeast.core.acting import Choose, act_step, prepare_to_act, to_tensors
from torchbeast.core.finite import find_cause
from torchbeast.core.rollout import State
from torchbeast.envs import environment, values
from torchbeast.envs.environment import example_environment, to_env_actions
from torchbeast.envs.extra_fields import EXTRA_FIELDS, as_declared
from torchbeast.envs.make_env import create_env
from torchbeast.flags import TRAINING, Flags
from torchbeast.local.actors import TorchSettings
from torchbeast.model import CHOICES, Net, make_model
from torchbeast.runs import checkpoint, flagset, trust


class AgentState(NamedTuple):
    """What an agent remembers between two steps of n environments."""

    core: State
    last_action: torch.Tensor  # [1, n, ...], as the policy counts it
    totals: np.ndarray  # see environment.TOTALS


@dataclasses.dataclass(eq=False)
class Agent:
    """A model with its flags, for one environment or several."""

    flags: Flags  # of the run
    model: Net
    observation_space: gymnasium.Space
    action_space: gymnasium.Space

    def __post_init__(self) -> None:
        self.generator = torch.Generator()
        self.generator.seed()

    def make_env(self, render_mode: str | None = None) -> Any:
        """The environment of the run, with its wrappers. Raises UserError.

        Of a game of several agents, PettingZoo's; `act` also needs "agent_one_hot".
        """
        several = parts.optional("envs.several_agents")
        if several and several.vector_maker(self.flags, render_mode, 0):
            return several.make_parallel(self.flags, render_mode, 0)
        return create_env(self.flags, render_mode)

    def act(
        self,
        observation: Any,
        state: AgentState | None = None,
        reward: Any = 0.0,
        greedy: bool = False,
        fields: Mapping[str, Any] | None = None,
        done: Any = False,
        truncated: Any = False,
        outputs: bool = False,
    ) -> Any:
        """Chooses an action. The model gets the same row as in training.

        Observations of n environments are leaves [n, ...]. All results then have this
        dimension, too, and the other arguments are [n, ...] or one value for all.

        Args:
          observation: of the environment; nested as its space.
          state: what the last call has returned; None: the first episode begins.
          reward: of the last step.
          greedy: take the most likely action; otherwise sample.
          fields: values of envs/extra_fields.py's EXTRA_FIELDS, as the info has them;
            and `game_over`, if not each episode that ends ends a game.
          done: the last step ended an episode, and `observation` begins the next one.
            Needed only with a state: for environments that reset themselves.
          truncated: that episode was truncated, not terminated.
          outputs: return what the model computes, too.

        Returns:
          The action for env.step, and the state for the next call. With `outputs`, also
          the agent's fields of the row as arrays: policy_logits [P] and baseline [],
          float32, and the others, see act_step.

        Raises:
          ValueError: an argument does not fit the spaces or the state, or the model's
            logits are NaN.
        """
        observation, n, is_one = _stack(self.observation_space, observation)
        rewards = _fill("reward", reward, n, np.float64)
        ended, given = _fill("done", done, n, np.bool_), fields or {}
        row = {
            "observation": observation,
            "reward": rewards.astype(np.float32),
            "done": ended | (state is None),
            "truncated": ended & _fill("truncated", truncated, n, np.bool_),
            "game_over": _fill("game_over", given.get("game_over", ended), n, np.bool_),
        }
        for name, field in EXTRA_FIELDS.items():
            value = given.get(name, np.zeros(field.shape, field.dtype))
            value = as_declared(name, value, np.shape(value))
            row[name] = _fill(name, value, n, field.dtype, field.shape)
        kind = self.model.distribution
        if state is None:
            none = torch.zeros(1, n, *kind.action_shape, dtype=kind.action_dtype)
            state = AgentState(self.model.initial_state(n), none, np.zeros((4, n)))
        elif state.last_action.shape[1] != n:
            raise ValueError(f"state is not of {n} environments, as observation is")
        else:
            state = state._replace(totals=environment.add_step(state.totals, rewards))
        row |= environment.total_fields(state.totals)
        row["last_action"] = state.last_action[0].numpy()
        sample = functools.partial(kind.sample, generator=self.generator)
        choose: Choose = kind.mode if greedy else sample
        tensors = to_tensors(row)
        results, core = act_step(self.model, tensors, state.core, choose)
        if results["policy_logits"].isnan().any():
            cause = find_cause(tensors)
            raise ValueError(f"--env {self.flags.env}: the logits are NaN. {cause}")
        totals = environment.restart(state.totals, ended, row["game_over"])
        new_state = AgentState(core, results["action"], totals)
        actions = results["action"][0].numpy()
        which: Any = 0 if is_one else slice(None)
        action = to_env_actions(self.action_space, n, actions)[which]
        if not outputs:
            return action, new_state
        return action, new_state, map_nested(lambda x: x[0, which].numpy(), results)


def _stack(space: gymnasium.Space, observation: Any) -> tuple[Any, int, bool]:
    """One or several observations: nested [n, ...], n, whether it was only one."""
    try:
        one = values.read(space, observation)
        return map_nested(lambda x: np.array(x[np.newaxis]), one), 1, True
    except values.InvalidEnvironmentError as error:
        with contextlib.suppress(LookupError, TypeError, ValueError):
            subspaces = values.parts_of(space)
            leaves = map_nested(lambda _, x: np.asarray(x), subspaces, observation)
            if n := len(flatten(leaves)[0]):
                several = values.read(space, observation, (n,))
                return map_nested(np.array, several), n, False
        raise ValueError(f"{error}. A batch of such is possible, too") from None


def _fill(
    name: str, value: Any, n: int, dtype: Any, shape: tuple[int, ...] = ()
) -> np.ndarray:
    """An argument of `act`, one value or [n, *shape], as a new array [n, *shape]."""
    array = np.asarray(value, dtype)
    if array.shape not in (shape, (n, *shape)):
        found = values.describe(array)
        raise ValueError(f"{name} is {found}, not {list(shape)} or {[n, *shape]}")
    return np.broadcast_to(array, (n, *shape)).copy()


def load_agent(path: str | os.PathLike[str], trust_env: bool = False) -> Agent:
    """Loads a checkpoint for acting on the CPU.

    Makes one environment, to read its spaces. If --env or --wrapper name a module, it
    is imported.

    Args:
      path: a model.tar, or the folder of a run.
      trust_env: import also what a checkpoint of somebody else names, with its
        arguments.

    Raises:
      CheckpointError: the file can't be read, or does not fit the model.
      UntrustedError: it names code, and is not a checkpoint of your own runs.
      UserError: the environment can't be made.
    """
    devices.check_defaults()
    file = Path(path).expanduser()
    file = file / "model.tar" if file.is_dir() else file
    saved = checkpoint.load(file)
    parser = FlagParser("", (*TRAINING, *parts.groups()), CHOICES)
    words = ["--mode=test", *(["--trust_checkpoint_env"] if trust_env else [])]
    signed = trust.is_signed(saved["flags"], saved.get("flags_signature"))
    typed = flagset.read(parser, words)
    flags = flagset.merge(typed, saved, str(file))
    flags = flagset.resolve(flags)
    for name, value in saved["flags"].items():  # those of one script, or of a fork
        is_name = str(name).isidentifier() and not str(name).startswith("_")
        is_known = signed or trust_env or isinstance(value, int | float | None)
        if is_name and is_known and not hasattr(flags, name):
            setattr(flags, name, value)
    flags.freeze()
    with TorchSettings(), contextlib.closing(example_environment(flags)) as env:
        spaces = env.observation_space, env.action_space
        model = make_model(flags, *spaces, torch.device("cpu"))
        checkpoint.check_fit(saved["model_state_dict"], model)
        prepare_to_act(model)
    actions = values.plain_space(env.envs.single_action_space)
    return Agent(flags, model, env.observation_space, actions)
