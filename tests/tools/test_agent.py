"""load_agent: a checkpoint as an agent."""

import copy
import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from nets import make_flags, make_weights

from torchbeast import load_agent
from torchbeast.base.nested import map_nested
from torchbeast.core import rollout
from torchbeast.core.acting import prepare_to_act, to_tensors
from torchbeast.envs.environment import Environment
from torchbeast.envs.extra_fields import EXTRA_FIELDS, ExtraField
from torchbeast.model import make_model
from torchbeast.runs import checkpoint
from torchbeast.runs.trust import UntrustedError

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
        ("--env", "environments:Steering", "--use_lstm"),
        ("--env", "Pong-v4"),
    ],
)
@pytest.mark.parametrize("greedy", [False, True])
def test_it_acts_as_the_model_over_the_whole_unroll(tmp_path, words, greedy):
    flags = make_flags(*words, "--precision", "fp32", "--atari_backend", "python")
    weights = save(tmp_path, flags)
    agent = load_agent(tmp_path, trust_env=True)
    assert not agent.model.training
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


def test_what_a_checkpoint_of_somebody_else_names(tmp_path):
    save(tmp_path, make_flags("--env", "test_agent:Short", "--env_kwargs", '{"x": 1}'))
    with pytest.raises(UntrustedError, match="names --env test_agent:Short") as error:
        load_agent(tmp_path)
    assert str(tmp_path / "model.tar") in str(error.value)
    assert '--env_kwargs {"x": 1}' in str(error.value)
    assert "load_agent(..., trust_env=True)" in str(error.value)
    assert load_agent(tmp_path, trust_env=True).flags.env == "test_agent:Short"
    # An id of an installed package needs no trust. An agent uses no other files.
    flags = ("--wandb", "theirs", "--init_from", "theirs")
    save(tmp_path, make_flags("--env", "CartPole-v1", *flags))
    found = load_agent(tmp_path).flags
    assert found.init_from is None
    assert getattr(found, "wandb", None) is None


class Mixed(Short):
    """Truncated episodes of 2 games; float64 and a tuple in the observation."""

    observation_space = spaces.Dict(
        {
            "pair": spaces.Tuple([spaces.Discrete(4), spaces.Box(-9, 9, ())]),
            "wide": spaces.Box(-9, 9, (2,), np.float64),
        }
    )

    def __init__(self):
        pass

    def draw(self):
        pair = int(self.np_random.integers(4)), np.float32(self.np_random.normal())
        self.goal = self.np_random.normal(size=2)
        observation = {"pair": pair, "wide": self.np_random.normal(size=2)}
        return observation, {"goal": self.goal, "cost": self.np_random.normal()}

    def reset(self, *, seed=None, options=None):
        gymnasium.Env.reset(self, seed=seed)
        self.steps = 0
        return self.draw()

    def step(self, action):
        self.steps += 1
        over = self.np_random.random() < 0.2
        observation, info = self.draw()
        return observation, 0.1, over, self.steps == 6, info


FIELDS = {
    "goal": ExtraField((2,), np.float64, of="observation"),
    "cost": ExtraField((), np.float32, of="step"),
}


@pytest.mark.parametrize("env", ["test_agent:Mixed", "environments:Lives", "Pong-v4"])
def test_the_model_gets_the_rows_of_training(tmp_path, monkeypatch, env):
    """All fields, in the learner's dtypes; of one environment and of several."""
    if env.endswith("Mixed"):
        monkeypatch.setattr(rollout, "EXTRA_FIELDS", EXTRA_FIELDS)
        for name, field in FIELDS.items():
            monkeypatch.setitem(EXTRA_FIELDS, name, field)
    flags = make_flags("--env", env, "--use_lstm", "--atari_backend", "python")
    save(tmp_path, flags)
    agent = load_agent(tmp_path, trust_env=True)
    forward, seen = agent.model.forward, []

    def recording(rows, state=(), acting=False):
        assert acting
        seen.append(rows)
        return forward(rows, state, acting)

    agent.model.forward = recording
    fields = rollout.env_fields(agent.observation_space, agent.model.distribution)
    envs = Environment(flags, 3)
    row, state, single = envs.initial(), None, None
    for _ in range(STEPS):
        names = ("reward", "done", "truncated") if state else ("reward",)
        given = {name: row[name] for name in names}
        info = {name: row[name] for name in ("game_over", *EXTRA_FIELDS)}
        _, state = agent.act(row["observation"], state, fields=info, **given)
        _, single = agent.act(
            map_nested(lambda x: x[2], row["observation"]),
            single,
            fields={name: x[2] for name, x in info.items()},
            **{name: x[2] for name, x in given.items()},
        )
        single = single._replace(last_action=state.last_action[:, 2:])
        for part, rows in ((slice(None), seen[-2]), (slice(2, 3), seen[-1])):
            assert rows.keys() == fields.keys()

            def check(x, spec, wanted, part=part):
                wanted = torch.from_numpy(wanted[None, part]).to(spec.dtype)
                assert torch.equal(x, wanted), (x, wanted)
                assert x.dtype == spec.dtype

            map_nested(check, rows, fields, row)
        row = envs.step(state.last_action[0].numpy())
    envs.close()


def test_it_gives_values_and_logits_and_acts_in_several_environments(tmp_path):
    save(tmp_path, make_flags("--env", "test_agent:Mixed", "--use_lstm"))
    agent = load_agent(tmp_path, trust_env=True)
    n = 4
    batch = [agent.observation_space.sample() for _ in range(n)]
    agent.observation_space.seed(1)
    out = gymnasium.vector.utils.create_empty_array(agent.observation_space, n)
    stacked = gymnasium.vector.utils.concatenate(agent.observation_space, batch, out)
    states, state = [None] * n, None
    for _ in range(3):
        actions, state, found = agent.act(stacked, state, greedy=True, outputs=True)
        assert actions.shape == (n,)
        assert found["policy_logits"].shape == (n, 3)
        for i in range(n):
            action, states[i], one = agent.act(
                batch[i], states[i], greedy=True, outputs=True
            )
            assert action in agent.action_space
            assert action == actions[i] == one["policy_logits"].argmax() + 2
            assert one["baseline"].shape == ()
            for name in ("policy_logits", "baseline"):
                np.testing.assert_allclose(one[name], found[name][i], atol=1e-6)


NAN = np.array([0.1, np.nan, 0])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"observation": NAN}, "Short: the logits are NaN.*observation is nan"),
        ({"observation": np.zeros((2, 3)), "reward": [0, np.nan]}, "reward is nan"),
        ({"observation": np.zeros(4)}, r"float64 \[4\] as .*batch"),
        ({"observation": [0, None, 0]}, r"None, 0\] of type list"),
        ({"observation": np.zeros((0, 3))}, "batch"),
        ({"observation": np.zeros(3), "reward": [0, 0]}, r"reward is .*\[2\]"),
        (
            {"observation": np.zeros((2, 3)), "done": [1, 0, 0]},
            r"done is bool \[3\].*\[2\]",
        ),
    ],
)
def test_what_it_can_not_act_on(tmp_path, arguments, match):
    flags = make_flags("--env", "test_agent:Short", "--env_kwargs", '{"x": 1}')
    save(tmp_path, flags)
    agent = load_agent(tmp_path, trust_env=True)
    with pytest.raises(ValueError, match=match):
        agent.act(**arguments)
    _, state = agent.act(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="state is not of 1 environments"):
        agent.act(np.zeros(3), state)


@pytest.mark.parametrize("name", ["__dict__", "__deepcopy__", "freeze"])
def test_names_of_a_checkpoint_that_are_no_flags(tmp_path, name):
    """They would replace the flags that were checked."""
    made = make_flags("--env", "CartPole-v1")
    mine = {"env": "test_agent:Short", "env_kwargs": '{"x": 1}'}
    values = {**made.as_dict(), "width": "some.module:Class"}
    state = {"flags": {**values, name: {**values, **mine}}}
    state["model_state_dict"] = make_weights(made)
    checkpoint.save(tmp_path / "model.tar", state)
    for trusts in (False, True):
        flags = load_agent(tmp_path, trust_env=trusts).flags
        assert copy.deepcopy(flags).env == flags.env == "CartPole-v1"
        assert hasattr(flags, "width") == trusts
        with pytest.raises(AttributeError, match="frozen"):
            flags.env = "x"
