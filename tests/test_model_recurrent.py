import pytest
import runs
import torch
from nets import (
    ACTION_SPACES,
    DONE,
    MINATAR,
    A,
    B,
    T,
    assert_same,
    make_rows,
    map_leaves,
    random_state,
    small_net,
)
from torch import nn

from torchbeast.base.errors import UserError
from torchbeast.flags import DECLARED
from torchbeast.runs import trust


def test_lstm_against_a_plain_loop_over_cells():
    net = small_net(use_lstm=True)
    rows = make_rows(MINATAR, ACTION_SPACES["discrete"], done=DONE)
    state = random_state(net)
    inputs = []
    net.core.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    outputs, new_state = net(rows, state)

    x = torch.cat(inputs)
    assert len(x) == T
    cell = nn.LSTMCell(x.shape[-1], 256)
    cell.load_state_dict(
        {name.removesuffix("_l0"): p for name, p in net.core.named_parameters()}
    )
    h, c = state[0][0], state[1][0]
    for t in range(T):
        for b in range(B):
            if (t, b) in DONE:
                h, c = h.clone(), c.clone()
                h[b] = c[b] = 0
        h, c = cell(x[t], (h, c))
        torch.testing.assert_close(outputs["policy_logits"][t], net.policy(h))
        torch.testing.assert_close(outputs["baseline"][t], net.baseline(h)[:, 0])
    torch.testing.assert_close(new_state, (h[None], c[None]))


CORES = [{"use_lstm": False}] + [
    {"use_lstm": True, "core": core, "core_size": 10, "core_layers": layers}
    for core, layers in (("lstm", 1), ("lstm", 2), ("gru", 1), ("gru", 3))
]


@pytest.mark.parametrize("options", CORES)
@pytest.mark.parametrize("done", [(), DONE])
def test_an_unroll_equals_single_steps(options, done):
    net = small_net(**options)
    rows = make_rows(MINATAR, ACTION_SPACES["discrete"], done=done)
    state = single_state = random_state(net)
    outputs, state = net(rows, state)
    steps = []
    for t in range(T):
        row = map_leaves(lambda x, t=t: x[t : t + 1], rows)
        step, single_state = net(row, single_state)
        steps.append(step)
    joined = {name: torch.cat([step[name] for step in steps]) for name in outputs}
    assert_same(outputs, joined)
    torch.testing.assert_close(state, single_state)


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_a_forget_bias_keeps_the_state(core):
    """Of new weights; all other weights are those without it."""

    def make(forget_bias):
        torch.manual_seed(1)
        options = {"core": core, "core_layers": 2, "forget_bias": forget_bias}
        return small_net(use_lstm=True, **options)

    plain, biased = make(0.0), make(20.0)
    old, new = plain.state_dict(), biased.state_dict()
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {"core.bias_ih_l0", "core.bias_ih_l1"}
    rows, first = make_rows(MINATAR, ACTION_SPACES["discrete"]), random_state(plain)
    kept = biased(rows, first)[1][-1] - first[-1]  # of the LSTM its cell
    lost = plain(rows, first)[1][-1] - first[-1]
    assert kept.norm() < (1e-3 if core == "gru" else 1) * lost.norm()


@pytest.mark.parametrize("use_lstm", [False, True])
def test_nothing_leaks_over_the_beginning_of_an_episode(use_lstm):
    """The reward and last action of a first row belong to the previous episode."""
    net = small_net(use_lstm)
    rows = make_rows(MINATAR, ACTION_SPACES["discrete"], done=[(2, 0)])
    other = make_rows(MINATAR, ACTION_SPACES["discrete"], seed=2)
    changed = map_leaves(torch.clone, rows)
    changed["observation"][:2, 0] = other["observation"][:2, 0]
    changed["reward"][:3, 0] = other["reward"][:3, 0]
    changed["last_action"][:3, 0] = (rows["last_action"][:3, 0] + 1) % A
    state, changed_state = random_state(net, 1), random_state(net, 2)
    for x, y in zip(state, changed_state, strict=True):
        y[:, 1:] = x[:, 1:]

    outputs, changed_outputs = net(rows, state)[0], net(changed, changed_state)[0]
    for name, x in outputs.items():
        y = changed_outputs[name]
        torch.testing.assert_close(y[2:, 0], x[2:, 0], rtol=0, atol=0)
        torch.testing.assert_close(y[:, 1:], x[:, 1:], rtol=0, atol=0)
        assert (x[:2, 0] != y[:2, 0]).any(dim=-1).all()


def test_the_reward_is_clipped():
    net = small_net(use_lstm=False)
    rows = make_rows(MINATAR, ACTION_SPACES["discrete"])
    rows["reward"][:] = 1.0
    much = {**rows, "reward": torch.full((T, B), 50.0)}
    assert_same(net(much)[0], net(rows)[0], rtol=0, atol=0)
    none = {**rows, "reward": torch.zeros(T, B)}
    assert not torch.equal(net(none)[0]["baseline"], net(rows)[0]["baseline"])


class Fading(nn.Module):
    """A core outside of the package: a mean of the features that fades."""

    def __init__(self, size, core_size, core_layers, share=0.1):
        super().__init__()
        self.hidden_size, self.share = core_size, share
        self.linear = nn.Linear(size, core_size)

    def state_sizes(self, batch_size):
        return [(1, batch_size, self.hidden_size)]

    def unroll(self, x, done, state):
        (mean,) = state[0]
        rows = []
        for features, begins in zip(self.linear(x), done, strict=True):
            mean = mean * ~begins.unsqueeze(1)
            mean = mean + self.share * (features.relu() - mean)
            rows.append(mean)
        return torch.stack(rows), (mean.unsqueeze(0),)


CORE = 'test_model_recurrent:Fading{"share": 0.5}'


def test_a_core_of_ones_own_trains_and_resumes(tmp_path):
    flags = {**runs.SMALL, "sync": True, "use_lstm": True, "core": CORE}
    flags |= {"num_actors": 1, "envs_per_actor": 2, "batch_size": 2, "core_size": 9}
    runs.run(tmp_path, "whole", **{**flags, "total_steps": 200})
    runs.run(tmp_path, "parts", **{**flags, "total_steps": 100})
    runs.run(tmp_path, "parts", total_steps=200)  # the run is one's own
    rows = [runs.read_logs(tmp_path, name) for name in ("whole", "parts")]
    rate = "learning_rate"  # of a shorter run
    assert len(rows[0]) == len(rows[1]) > 2
    assert rows[0][-1]["step"] == rows[1][-1]["step"]
    saved = torch.load(tmp_path / "parts" / "model.tar", weights_only=True)
    assert saved["model_state_dict"]["core.linear.weight"].shape[0] == 9
    assert float(rows[1][-1][rate]) < float(rows[1][0][rate])


def test_a_core_that_is_named_by_a_file_is_not_imported():
    assert not trust.is_harmless(DECLARED["core"], CORE)
    assert trust.is_harmless(DECLARED["core"], "gru")


@pytest.mark.parametrize("core", ["lstn", "nets:Nothing"])
def test_a_core_that_can_not_be_made(core):
    with pytest.raises(UserError, match=r"^--core \(besides lstm, gru\)"):
        small_net(use_lstm=True, core=core)
