"""libtorchbeast.Server and probe: environments, addresses, security."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from gymnasium import spaces
from servers import Run, serving

from libtorchbeast import (
    ActorPool,
    BatchingQueue,
    DynamicBatcher,
    RefusedError,
    TransportError,
    probe,
)

T = 5


def play(address, actions, batch=1):
    """The rows [T+1, E, ...] that lead to `actions`, a function of the observation."""
    with Run(
        [address], lambda inputs: ((actions(inputs[0][0]),), ()), batch=batch
    ) as run:
        try:
            (env_outputs, agent_outputs), _ = next(run.queue)
        except StopIteration:
            raise run.error() from None
    return env_outputs, agent_outputs[0]


def zero(_):
    return torch.zeros(1, 1, dtype=torch.int64)


class Env:
    """Gymnasium's API; notes the actions that it gets."""

    def __init__(self, observation_space=None, action_space=None, observe=None):
        self.observation_space = observation_space
        self.action_space = spaces.Discrete(9) if action_space is None else action_space
        self.observe = observe or (lambda: np.zeros(3, np.float32))
        self.actions = []

    def reset(self):
        return self.observe(), {}

    def step(self, action):
        self.actions.append(action)
        return self.observe(), 1.0, False, False, {}


class VectorWithout:
    num_envs = 2
    observation_space = spaces.Box(-9, 9, (3,))
    action_space = initial = step = None


# --- Spaces ---------------------------------------------------------------------------


def test_an_observation_space_may_come_from_the_first_observation(address):
    def observe():
        return {"b": (1, 2.5), "a": np.zeros((2, 1), np.int16), "c": [True]}

    with serving(lambda: Env(observe=observe), address):
        hello = probe(address)
        (observation, *_), _ = play(address, zero)
    box = {"type": "Box", "shape": (), "low": None, "high": None}
    tuple_ = {"type": "Tuple", "spaces": (dict(box, dtype="bool"),)}
    assert hello["observation_space"]["spaces"] == {
        "a": dict(box, dtype="int16", shape=(2, 1)),
        "b": {
            "type": "Tuple",
            "spaces": (dict(box, dtype="int64"), dict(box, dtype="float64")),
        },
        "c": tuple_,
    }
    assert observation["a"].shape == (T + 1, 1, 2, 1)
    assert observation["b"][0].tolist() == [[1]] * (T + 1)
    assert observation["b"][1].tolist() == [[2.5]] * (T + 1)
    assert observation["c"][0].dtype == torch.bool


class NoSpaces:
    """As the predecessor's users write them: no spaces, old Gym's API."""

    def __init__(self):
        self.actions = []

    def reset(self):
        return {"frame": np.zeros((2, 3), np.uint8), "speed": 0.5}

    def step(self, action):
        self.actions.append(action)
        self.done = len(self.actions) % 3 == 0
        return {**self.reset(), "speed": float(len(self.actions))}, 1.0, self.done, {}


@pytest.mark.parametrize("action", [torch.tensor([[3]]), torch.tensor([[[0.5, -2.0]]])])
def test_without_spaces_arrays_are_sent_as_they_are(address, action):
    env = NoSpaces()
    with serving(lambda: env, address):
        assert probe(address)["action_space"] is None
        (observation, reward, done, *_), actions = play(address, lambda _: action)
    assert observation["frame"].shape == (T + 1, 1, 2, 3)
    assert observation["speed"][:, 0].tolist() == [0.5, 1, 2, 0.5, 4, 5]
    assert reward[:, 0].tolist() == [0, 1, 1, 1, 1, 1]
    assert done[:, 0].tolist() == [True, False, False, True, False, False]
    assert torch.equal(actions, action.expand(T + 1, *action.shape[1:]))
    for given in env.actions:
        assert given.dtype == action.numpy().dtype
        np.testing.assert_array_equal(given, action[0, 0].numpy())


def test_what_cannot_get_better_ends_at_once(address):
    """With one message; and nobody waits for the pool's queue or batcher."""

    made = []
    for env_class, words in (
        (lambda: Env(spaces.Text(5)), "none of Box"),
        (lambda: Env(observe=lambda: np.zeros((1,) * 7)), "7 dimensions"),
        (VectorWithout, "VectorWithout.*no action_space"),
        (object, r"no reset\(\)"),
    ):
        made.clear()

        def make(env_class=env_class):
            made.append(1)
            return env_class()

        with serving(make, address):
            with pytest.raises(RefusedError, match=f"can't be served: .*{words}"):
                probe(address)
            pool_queue = BatchingQueue(maximum_queue_size=1)
            batcher = DynamicBatcher()
            pool = ActorPool(T, pool_queue, batcher, [address], ())
            with ThreadPoolExecutor() as threads:
                waits = [threads.submit(list, x) for x in (pool_queue, batcher)]
                run = threads.submit(pool.run)
                assert [x.result(timeout=30) for x in waits] == [[], []]
                with pytest.raises(RefusedError, match=words):
                    run.result(timeout=30)
        assert pool_queue.is_closed()
        assert batcher.is_closed()
        assert len(made) == 2


# --- Observations ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "observe"),
    [
        (spaces.Box(-9, 9, (2, 3)), lambda: np.arange(6).reshape(3, 2).T),
        (spaces.Box(0, 9, (2, 3), np.uint8), lambda: [[1, 2, 3], [4, 5, 6]]),
        (spaces.Discrete(5), lambda: np.int32(3)),
        (spaces.MultiDiscrete([3, 2]), lambda: np.array([2, 1], np.int32)),
        (spaces.Box(0, 9, (2, 3)), lambda: torch.ones(2, 3)),
    ],
    ids=lambda x: str(x) if isinstance(x, spaces.Space) else "",
)
def test_observations_become_what_the_space_says(space, observe, address):
    with serving(lambda: Env(space, observe=observe), address):
        (observation, *_), _ = play(address, zero)
    expected = np.asarray(observe()).astype(space.dtype)
    assert observation.numpy().dtype == space.dtype
    for row in observation[:, 0]:
        np.testing.assert_array_equal(row, expected)


@pytest.mark.parametrize(
    ("space", "observation", "match"),
    [
        (spaces.Box(0, 9, (1,), np.uint8), np.array([300], "u2"), "outside of uint8"),
        (spaces.Box(0, 9, (3,)), np.zeros(4, np.float32), r"\[4\], not float32 \[3\]"),
        (spaces.Tuple([spaces.Discrete(3)] * 2), (1, 2, 0), "tuple of 2.*has 3"),
        (spaces.Dict(x=spaces.Discrete(3)), {"y": 1}, 'with the key "x"'),
    ],
    ids=str,
)
def test_observations_that_do_not_fit(space, observation, match, address):
    with (
        serving(lambda: Env(space, observe=lambda: observation), address),
        pytest.raises(RuntimeError, match=f"({match})|Error.*({match})") as info,
    ):
        probe(address)
    assert "observation" in str(info.value) or "Overflow" in str(info.value)


# --- Actions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "sent", "got"),
    [
        (spaces.Discrete(7, start=10), torch.tensor(6), 16),
        (
            spaces.MultiDiscrete([3, 2], start=[1, 5]),
            torch.tensor([2, 0]),
            np.array([3, 5]),
        ),
        (
            spaces.Box(-1.0, np.array([1.0, 2.0]), dtype=np.float64),
            torch.tensor([-3.0, 1.5]),
            np.array([-1.0, 1.5]),
        ),
        (
            spaces.Box(0, 9, (2,), np.int32),
            torch.tensor([3, 4], dtype=torch.int32),
            np.array([3, 4], np.int32),
        ),
        (
            spaces.Dict(
                b=spaces.Discrete(2, start=1), a=spaces.Tuple([spaces.Discrete(3)])
            ),
            {"b": torch.tensor(1), "a": [torch.tensor(2)]},
            {"a": (2,), "b": 2},
        ),
    ],
    ids=str,
)
def test_actions(space, sent, got, address):
    envs = []

    def make():
        envs.append(Env(action_space=space))
        return envs[0]

    def lead(x):
        if isinstance(x, torch.Tensor):
            return x[None, None]
        if isinstance(x, dict):
            return {key: lead(child) for key, child in x.items()}
        return [lead(child) for child in x]

    with serving(make, address):
        play(address, lambda _: lead(sent))
    for action in envs[0].actions:
        if isinstance(got, np.ndarray):
            assert type(action) is np.ndarray
            assert action.dtype == got.dtype
            np.testing.assert_array_equal(action, got)
            action += 1  # it is the environment's own
        else:
            assert action == got
            assert type(action) is type(got)
    assert len(envs[0].actions) >= T


def test_actions_out_of_range(address):
    with (
        serving(lambda: Env(action_space=spaces.Discrete(7, start=3)), address),
        pytest.raises(RuntimeError, match=r"action 7 is out of range.*0 to 6"),
    ):
        play(address, lambda _: torch.full((1, 1), 7))


# --- Single environments --------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "match"),
    [
        ((0, 1.0, False), "4-tuple|tuple of 3"),
        ((np.zeros(3, np.float32), "much", False, {}), "'much' as reward.*one number"),
        (
            (np.zeros(3, np.float32), 0.0, np.array([True, False]), {}),
            "array.* as done, which must be one bool",
        ),
    ],
)
def test_what_step_must_return(result, match, address):
    class Odd(Env):
        def step(self, action):
            return result

    with serving(Odd, address), pytest.raises(RuntimeError, match=match):
        play(address, zero)


@pytest.mark.parametrize("error", [SystemExit, ValueError])
def test_whatever_an_environment_raises_reaches_the_learner(error, address):
    class Raises(Env):
        def step(self, action):
            raise error("\udcff\0 enough")  # no UTF-8, and C's end of a text

    text = rf"(?s)Traceback.*{error.__name__}: \\udcff\\0 enough"
    with serving(Raises, address), pytest.raises(RuntimeError, match=text):
        play(address, zero)


def test_environments_are_closed_by_stop(address):
    closed = []

    class Closes(Env):
        def close(self):
            closed.append(self)

    with (
        serving(Closes, address) as server,
        Run([address], lambda _: ((zero(0),), ()), maximum_downtime_s=0) as run,
    ):
        next(run.queue)
        server.stop()
        assert len(closed) == 1
        assert type(run.error()) is TransportError
        server.stop()
