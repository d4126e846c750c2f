"""load_agent: a checkpoint as an agent."""

import functools

import gymnasium
import numpy as np
import pytest
import runs
import torch
from gymnasium import spaces
from test_evaluate import make_flags, make_weights

from torchbeast import load_agent
from torchbeast.core import checkpoint
from torchbeast.core.acting import prepare_to_act, to_tensors
from torchbeast.core.environment import Environment
from torchbeast.core.nested import map_nested
from torchbeast.core.trust import UntrustedError
from torchbeast.model import make_model

STEPS = 40


class Short(gymnasium.Env):
    """Episodes of 6 steps."""

    observation_space = spaces.Box(0, 1, (3,))
    action_space = spaces.Discrete(3, start=2)

    def __init__(self, x):
        self.x = x

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.full(3, self.x, np.float32), {}

    def step(self, action):
        assert action in self.action_space
        self.steps += 1
        return np.full(3, self.x, np.float32), 1.0, self.steps == 6, False, {}


def save(folder, flags):
    """A checkpoint with random weights."""
    weights = make_weights(flags)
    state = {"flags": flags.as_dict(), "model_state_dict": weights}
    checkpoint.save(folder / "model.tar", state)
    return weights


@pytest.mark.parametrize(
    "words",
    [
        ("--env", "CartPole-v1", "--use_lstm"),
        ("--env", "environments:GridWorld"),
        ("--env", "environments:Steering", "--use_lstm"),
        ("--env", "Pong-v4"),
    ],
)
@pytest.mark.parametrize("greedy", [False, True])
def test_it_acts_as_the_model_over_the_whole_unroll(tmp_path, words, greedy):
    flags = make_flags(*words, "--precision", "fp32", "--atari_backend", "python")
    weights = save(tmp_path, flags)
    agent = load_agent(tmp_path, trust_env=True)
    agent.generator.manual_seed(7)
    envs = Environment(flags, 1)
    rows, actions, states = [envs.initial()], [], None
    for _ in range(STEPS):
        row = rows[-1]
        if row["done"][0]:
            states = None
        observation = map_nested(lambda x: x[0], row["observation"])
        reward = float(row["reward"][0])
        action, states = agent.act(observation, states, reward, greedy=greedy)
        assert agent.action_space.contains(action)
        actions.append(action)
        rows.append(envs.step(states.last_action.squeeze(0).numpy()))
    envs.close()
    spaces_of_env = envs.observation_space, envs.action_space
    model = make_model(flags, *spaces_of_env, torch.device("cpu"))
    model.load_state_dict(weights)
    prepare_to_act(model)
    unroll = map_nested(lambda *x: torch.cat(x), *map(to_tensors, rows[:-1]))
    with torch.inference_mode():
        outputs, _ = model(unroll, model.initial_state(1))
    choose = model.distribution.mode
    if not greedy:
        generator = torch.Generator().manual_seed(7)
        choose = functools.partial(model.distribution.sample, generator=generator)
    expected = torch.stack([choose(logits[0]) for logits in outputs["policy_logits"]])
    expected = expected.numpy()
    space = agent.action_space
    if isinstance(space, spaces.Box):
        np.testing.assert_allclose(
            np.stack(actions), np.clip(expected, space.low, space.high), atol=1e-5
        )
    else:
        np.testing.assert_array_equal(np.stack(actions), expected + space.start)
    assert greedy or len({str(action) for action in actions}) > 1


def test_it_samples_and_plays_what_a_run_has_learned(tmp_path):
    runs.run(
        tmp_path,
        "a",
        **{**runs.SMALL, "env_kwargs": '{"x": 1}', "env": "test_agent:Short"},
    )
    path = tmp_path / "a" / "model.tar"
    saved = torch.load(path)
    training = {"replay_ratio": 1.0, "replay_size": 1000, "num_learner_threads": 2}
    saved["flags"] |= training  # such a run is refused, but an agent does not train
    torch.save(saved, path)
    agent = load_agent(str(path))
    env = agent.make_env()
    observation, _ = env.reset(seed=1)
    found = {int(agent.act(observation)[0]) for _ in range(100)}
    assert found == {2, 3, 4}, "the space starts at 2"
    state, reward, over, steps = None, 0.0, False, 0
    while not over:
        action, state = agent.act(observation, state, reward)
        observation, reward, terminated, truncated, _ = env.step(action)
        over = terminated or truncated
        steps += 1
    assert steps == 6


def test_what_a_checkpoint_of_somebody_else_names(tmp_path):
    save(tmp_path, make_flags("--env", "test_agent:Short", "--env_kwargs", '{"x": 1}'))
    with pytest.raises(UntrustedError, match="names --env test_agent:Short") as error:
        load_agent(tmp_path)
    assert str(tmp_path / "model.tar") in str(error.value)
    words = 'imports the code of test_agent, with the arguments {"x": 1}'
    assert words in str(error.value)
    assert "load_agent(..., trust_env=True)" in str(error.value)
    assert load_agent(tmp_path, trust_env=True).flags.env == "test_agent:Short"
    # An id of an installed package needs no trust. An agent uses no other files.
    flags = ("--wandb", "theirs", "--init_from", "theirs")
    save(tmp_path, make_flags("--env", "CartPole-v1", *flags))
    found = load_agent(tmp_path).flags
    assert (found.wandb, found.init_from) == (None, None)


def test_there_is_no_checkpoint(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match=r"model\.tar"):
        load_agent(tmp_path)
