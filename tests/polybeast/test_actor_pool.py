"""libtorchbeast.ActorPool against real servers in processes of their own."""

import itertools
import re

import pytest
import servers
import torch
from servers import CodedVector, Run, ServerProcess

from libtorchbeast import ActorPool, AsyncError, BatchingQueue, DynamicBatcher, Security

T, E, A = 5, CodedVector.num_envs, servers.NUM_ACTIONS
INITIAL = 5.0


def policy(observation):
    number, episode, step, last = observation
    return (3 * number + 5 * episode + 2 * step + last + 8) % A


def value(observation):
    number, episode, step, _ = observation
    return 100.0 * number + 10 * episode + step


def column(array, c):
    """Column c of [1, n, ...] as Python numbers."""
    return array[0, c].tolist()


def act(inputs):
    """Follow `policy`; the state counts the rows since an episode's first."""
    (observation, reward, done, step, episode_return, *extra), state = inputs
    if isinstance(observation, dict):
        assert torch.equal(observation["again"][0], observation["code"].flip(2))
        observation = observation["code"]
    assert reward.dtype == episode_return.dtype == torch.float32
    assert (done.dtype, step.dtype) == (torch.bool, torch.int64)
    n = done.shape[1]
    rows = [tuple(column(observation, c)) for c in range(n)]
    actions = torch.tensor([[policy(row) for row in rows]])
    values = torch.tensor([[value(row) for row in rows]])
    logits = torch.nn.functional.one_hot(actions, A) * values[..., None]
    counter = state["counter"]
    assert counter.shape == (2, n, 4)
    state = {"counter": torch.where(done[..., None], 0, counter) + 1}
    if not extra:
        return (actions, logits, values), state
    outputs = {"action": actions, "policy_logits": logits, "baseline": values}
    return {**outputs, "truncation_value": torch.full_like(values, -1.0)}, state


def initial_state(n=1):
    return {"counter": torch.full((2, n, 4), INITIAL)}


class Follower:
    """Checks the rollouts of one environment against what they must be."""

    def __init__(self, number):
        self.rows = servers.rows(number, policy)
        self.state = INITIAL
        self.next_row = next(self.rows)

    def check(self, rollout, c):
        (env_outputs, agent_outputs), state = rollout
        observation, reward, done, step, episode_return, *extra = env_outputs
        if extra:
            observation = observation["code"]
            outputs = agent_outputs
            agent_outputs = [
                outputs[k] for k in ("action", "policy_logits", "baseline")
            ]
        action, logits, baseline = agent_outputs
        assert state["counter"][:, c].unique().tolist() == [self.state]
        for t in range(T + 1):
            row = self.next_row
            assert tuple(observation[t, c].tolist()) == row[0]
            found = (reward[t, c], done[t, c], step[t, c], episode_return[t, c])
            assert tuple(x.item() for x in found) == row[1:]
            assert action[t, c] == policy(row[0])
            assert baseline[t, c] == value(row[0])
            assert logits[t, c, action[t, c]] == baseline[t, c]
            if extra:
                self.check_extra(extra[0], outputs["truncation_value"], row, t, c)
            if t < T:  # row T is row 0 of the next rollout
                self.state = (0 if row[2] else self.state) + 1
                self.last, self.next_row = row[0], next(self.rows)

    def check_extra(self, extra, truncation_value, row, t, c):
        number, episode, _, _ = row[0]
        truncated = row[2] and episode > 0 and (episode - 1) % 2 == 1
        assert extra["truncated"][t, c].item() == truncated
        assert extra["noise"][t, c].tolist() == [
            [c % E + E * k for k in range(p, 10, 2)] for p in range(2)
        ]
        # The step that ended the episode was asked about with its real observation.
        final = value((number, episode - 1, row[3], 0)) if truncated else None
        if truncated:
            assert truncation_value[t, c] == final
        else:
            assert truncation_value[t, c] in (0, -1)


def check(rollouts, followers):
    """Check rollouts [T+1, n, ...] of environments that may come in any order."""
    for rollout in rollouts:
        ((observation, *_), _), _ = rollout
        if isinstance(observation, dict):
            observation = observation["code"]
        assert observation.shape[0] == T + 1
        for c in range(observation.shape[1]):
            number = observation[0, c, 0].item()
            if number not in followers:
                followers[number] = Follower(number)
            followers[number].check(rollout, c)


@pytest.mark.parametrize("env", ["Coded", "OldGym"])
def test_every_row_of_single_environments(env):
    followers = {}
    with (
        ServerProcess(env, "localhost:0") as server,
        Run([server.address] * 3, act, initial_state()) as run,
    ):
        check(itertools.islice(run.queue, 60), followers)
        assert run.pool.count() >= 60 * T
        assert run.pool.stats()["num_connected"] == 3
    assert sorted(followers) == [0, 1, 2]
    assert run.result.result() is None


@pytest.mark.parametrize("n", [1, E])
def test_every_row_of_vectorised_environments(n, address):
    followers = {}
    with (
        ServerProcess("CodedVector", address) as server,
        Run([server.address] * 2, act, initial_state(n), batch=2 * E) as run,
    ):
        batches = list(itertools.islice(run.queue, 40))
        check(batches, followers)
        assert run.pool.count() % E == 0
    assert sorted(followers) == list(range(2 * E))
    ((_, outputs), state) = batches[0]
    assert outputs["policy_logits"].shape == (T + 1, 2 * E, A)
    assert state["counter"].shape == (2, 2 * E, 4)


STANDARD = ("observation", "reward", "done", "episode_step", "episode_return")
EXTRA = ("truncated", "noise")
AGENT = ("action", "policy_logits", "baseline", "truncation_value")


def positional(row):
    return (*(row[name] for name in STANDARD), {name: row[name] for name in EXTRA})


def test_every_row_by_name(address):
    def act_by_name(inputs):
        row, state = inputs
        assert {*row} == {*STANDARD, *EXTRA, "game_over", "game_step", "game_return"}
        assert torch.equal(row["game_over"], row["done"])
        assert torch.equal(row["game_step"], row["episode_step"])
        assert torch.equal(row["game_return"], row["episode_return"])
        return act((positional(row), state))

    followers = {}
    with (
        ServerProcess("CodedVector", address) as server,
        Run(
            [server.address], act_by_name, initial_state(), batch=E, named_rows=True
        ) as run,
    ):
        for rows, state in itertools.islice(run.queue, 20):
            assert torch.equal(rows["game_over"], rows["done"])
            agent_outputs = {name: rows[name] for name in AGENT}
            check([((positional(rows), agent_outputs), state)], followers)
    assert sorted(followers) == list(range(E))


# --- Faults ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    path = tmp_path_factory.mktemp("shared") / "socket"
    with ServerProcess("CodedVector", f"unix:{path}") as server:
        yield server.address


def test_inference_that_raises_ends_the_run(shared_server):
    def fail(inputs):
        raise ZeroDivisionError

    with Run([shared_server], fail, initial_state(), batch=E) as run:
        error = run.error()
        assert type(error) is AsyncError
        assert "ZeroDivisionError" in str(error)
        assert type(run.inference.exception(timeout=10)) is ZeroDivisionError


def state_of(inputs):
    return inputs[1]


def of(action, state_from=state_of):
    return lambda inputs: ((action,), state_from(inputs))


ACTION = torch.zeros(1, E, dtype=torch.int64)


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (of(ACTION.int()), r"int32 \[3\].*want int64 \[3\]"),
        (of(ACTION, lambda i: {"counter": i[1]["counter"].long()}), "state must keep"),
        (lambda inputs: ({"actions": ACTION}, inputs[1]), 'dict with "action"'),
    ],
)
def test_outputs_that_do_not_fit(shared_server, answer, match):
    with Run([shared_server], answer, initial_state(), batch=E) as run:
        error = run.error()
    assert type(error) is ValueError, error
    assert re.search(match, str(error))


# --- Endings --------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["pool", "queue", "batcher"])
def test_closing_ends_run(shared_server, what):
    with Run([shared_server] * 2, act, initial_state(), batch=E) as run:
        next(run.queue)
        getattr(run, what).close()
        assert run.result.result(timeout=20) is None
        count = run.pool.count()
        run.pool.close()
        run.pool.close()
        assert run.pool.count() == count
        assert run.pool.stats()["num_connected"] == 0
        with pytest.raises(RuntimeError, match="once"):
            run.pool.run()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"unroll_length": 0}, ValueError, "unroll_length.*0"),
        ({"env_server_addresses": "unix:/x"}, TypeError, "env_server_addresses"),
        ({"initial_agent_state": torch.zeros(3)}, ValueError, r"\[layers.*\[3\]"),
        ({"inference_batcher": BatchingQueue()}, TypeError, "inference_batcher"),
        ({"security": Security(token="a\nb")}, ValueError, "printable"),
    ],
)
def test_bad_arguments(change, error, match):
    arguments = {
        "unroll_length": T,
        "learner_queue": BatchingQueue(),
        "inference_batcher": DynamicBatcher(),
        "env_server_addresses": ["unix:/tmp/polybeast"],
        "initial_agent_state": (),
    }
    with pytest.raises(error, match=match):
        ActorPool(**{**arguments, **change})
