"""monobeast.Actor in this process, without a pipe: as in a notebook."""

import contextlib
import pickle

import numpy as np
import pytest
import torch

from torchbeast import model, monobeast
from torchbeast.core.weights import SharedWeights
from torchbeast.envs.environment import Environment
from torchbeast.learner import Learner
from torchbeast.local.actors import make_envs
from torchbeast.local.env_spec import EnvSpec
from torchbeast.model import Net
from torchbeast.runs import flagset

T, E, SLOTS = 7, 3, 8


@pytest.fixture
def parts():
    """Flags, a learner, published weights, and empty slots."""
    argv = (
        f"--env CartPole-v1 --disable_cuda --precision fp32 --use_lstm --sync --seed 5 \
        --unroll_length {T} --envs_per_actor {E} --num_buffers {SLOTS} --num_actors 1"
    )
    flags = flagset.parse(monobeast.make_parser(), argv.split())
    flags = flagset.resolve(flags)
    with contextlib.closing(Environment(flags, 1)) as env:
        spec = EnvSpec(env.observation_space, env.action_space, 1)
    learner = Learner(flags, spec)
    weights = SharedWeights(learner.model)
    weights.publish(learner.model.state_dict(), 4)
    return flags, learner, weights, monobeast.make_buffers(flags, learner)


def make_actor(parts, index=2):
    flags, _, weights, buffers = parts
    actor = monobeast.Actor(
        flags, make_envs(flags, index), buffers, weights.memory, index
    )
    actor.load_weights(*weights.acquire())
    return actor


def test_unrolls_are_what_the_model_and_the_environments_give(parts):
    """Steps the same games by hand, and runs the learner's model on the rows."""
    flags, learner, _, buffers = parts
    actor = make_actor(parts)
    slots = [6, 1, 3]
    actor.unroll([0, 2, 4])
    before = [x.clone() for x in actor.state_before]
    actor.unroll(slots)
    assert int(actor.num_steps) == 2 * T

    rows, initial_state = monobeast.get_batch(buffers, slots, torch.device("cpu"))
    assert rows["observation"].shape == (T + 1, E, 4)
    for given, wanted in zip(initial_state, before, strict=True):
        assert torch.equal(given, wanted)
    first, _ = monobeast.get_batch(buffers, [0, 2, 4], torch.device("cpu"))
    for name in ("observation", "action", "policy_logits"):  # row 0 repeats the last
        assert torch.equal(rows[name][0], first[name][T])
    assert set(rows["policy_version"].flatten().tolist()) == {4}

    outputs, _ = learner.model(rows, initial_state)
    torch.testing.assert_close(outputs["policy_logits"], rows["policy_logits"])
    torch.testing.assert_close(outputs["baseline"], rows["baseline"])

    env = make_envs(flags, 2)
    env_row = env.initial()
    for batch in (first, rows):
        for t in range(T):
            np.testing.assert_array_equal(
                env_row["observation"], batch["observation"][t]
            )
            env_row = env.step(batch["action"][t].numpy())
    np.testing.assert_array_equal(env_row["reward"], rows["reward"][T])
    np.testing.assert_array_equal(env_row["done"], rows["done"][T])


class Noisy(Net):
    """Draws from PyTorch's global generator, as docs/your_network.md allows."""

    def forward(self, *args, **more):
        outputs, state = super().forward(*args, **more)
        logits = outputs["policy_logits"]
        return {**outputs, "policy_logits": logits + torch.randn_like(logits)}, state


@pytest.mark.parametrize("net", [Net, Noisy])
def test_a_loaded_state_goes_on_with_the_same_games(parts, monkeypatch, net):
    monkeypatch.setattr(model, "Net", net)
    buffers = parts[-1]
    actor = make_actor(parts)
    actor.unroll([0, 1, 2])
    saved = pickle.loads(pickle.dumps(actor.state_dict()))
    actor.unroll([0, 1, 2])
    other = make_actor(parts)
    other.load_state_dict(saved)
    other.unroll([3, 4, 5])
    for name, x in buffers["rows"].items():
        assert torch.equal(x[[0, 1, 2]], x[[3, 4, 5]]), name


def test_actors_of_other_numbers_act_differently(parts):
    buffers = parts[-1]
    make_actor(parts, 0).unroll([0, 1, 2])
    make_actor(parts, 1).unroll([3, 4, 5])
    for name in ("observation", "action"):
        x = buffers["rows"][name]
        assert not torch.equal(x[[0, 1, 2]], x[[3, 4, 5]])
