"""libtorchbeast.Server and probe: environments, addresses, security."""

import contextlib
import functools
import os
import re
import socket
import stat
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import gym
import numpy as np
import pytest
import servers
import torch
from certificates import Certificates
from gymnasium import spaces
from servers import Run, ServerProcess

from libtorchbeast import (
    ActorPool,
    BatchingQueue,
    RefusedError,
    Security,
    Server,
    TransportError,
    probe,
)

T = 5


@pytest.fixture
def address(tmp_path):
    return f"unix:{tmp_path}/socket"


@contextlib.contextmanager
def serving(env_class, address, **arguments):
    """A server in this process."""
    server = Server(env_class, address, **arguments)
    server.start()
    try:
        yield server
    finally:
        server.stop()


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


# --- Spaces ---------------------------------------------------------------------------

BOX = {"type": "Box", "dtype": "float32", "shape": (2, 3), "low": None, "high": None}


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.Box(-np.inf, np.inf, (2, 3)), BOX),
        (
            spaces.Box(0, 255, (4, 3), np.uint8),
            dict(BOX, dtype="uint8", shape=(4, 3), low=0.0, high=255.0),
        ),
        (gym.spaces.Box(-1.0, 1.0, (2, 3)), dict(BOX, low=-1.0, high=1.0)),
        (spaces.Discrete(6), {"type": "Discrete", "n": 6, "start": 0}),
        (spaces.Discrete(4, start=-2), {"type": "Discrete", "n": 4, "start": -2}),
        (gym.spaces.Discrete(5), {"type": "Discrete", "n": 5, "start": 0}),
        (
            spaces.MultiDiscrete([3, 2], start=[1, 0]),
            {"type": "MultiDiscrete", "n": (3, 2), "start": (1, 0)},
        ),
        (
            gym.spaces.MultiDiscrete([3, 2, 4]),
            {"type": "MultiDiscrete", "n": (3, 2, 4), "start": (0, 0, 0)},
        ),
        (spaces.MultiBinary(4), {"type": "MultiBinary", "shape": (4,)}),
        (spaces.MultiBinary([2, 3]), {"type": "MultiBinary", "shape": (2, 3)}),
        (
            gym.spaces.Dict(
                b=gym.spaces.Discrete(2),
                a=gym.spaces.Tuple([gym.spaces.MultiBinary(2)]),
            ),
            {
                "type": "Dict",
                "spaces": {
                    "a": {
                        "type": "Tuple",
                        "spaces": ({"type": "MultiBinary", "shape": (2,)},),
                    },
                    "b": {"type": "Discrete", "n": 2, "start": 0},
                },
            },
        ),
    ],
    ids=str,
)
def test_spaces_are_told(space, expected, address):
    def make():
        return Env(space, space, lambda: space.sample())

    with serving(make, address, name="some-env-v4"):
        hello = probe(address)
    assert b"some-env-v4" in hello.pop("hello")
    assert hello.pop("step_bytes") > 4 + 1 + 8 + 4
    assert hello == {
        "name": "some-env-v4",
        "num_envs": 1,
        "observation_space": expected,
        "action_space": expected,
        "extra_fields": {},
        "settings": {},
    }


def test_bounds_that_differ_between_elements(address):
    low, high = np.array([-1.0, -0.5]), np.array([1.0, np.inf])
    space = spaces.Box(low, high, dtype=np.float64)
    with serving(lambda: Env(space, space, space.sample), address):
        hello = probe(address)
    found = hello["observation_space"]
    assert found["dtype"] == "float64"
    np.testing.assert_array_equal(found["low"], low)
    np.testing.assert_array_equal(found["high"], high)
    # Policies write float32, whatever the dtype of the space.
    assert hello["action_space"]["dtype"] == "float32"


def test_a_space_that_cannot_be_sent(address):
    space = spaces.Dict({"x": spaces.Tuple([spaces.Text(5)])})
    with (
        serving(lambda: Env(space), address),
        pytest.raises(RuntimeError, match=r'\["x"\]\[0\].*Text.*none of Box'),
    ):
        probe(address)


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


def test_an_action_space_is_needed(address):
    class Without(Env):
        def __init__(self):
            super().__init__()
            self.action_space = None

    class VectorWithout(Vector):
        action_space = None

    for env_class in (Without, VectorWithout):
        with (
            serving(env_class, address),
            pytest.raises(RuntimeError, match=f"{env_class.__name__}.*no action_space"),
        ):
            probe(address)


# --- Observations ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "observe"),
    [
        (spaces.Box(-9, 9, (2, 3)), lambda: np.arange(6.0).reshape(2, 3)),
        (spaces.Box(-9, 9, (2, 3)), lambda: np.arange(6).reshape(3, 2).T),
        (spaces.Box(0, 9, (2, 3), np.uint8), lambda: [[1, 2, 3], [4, 5, 6]]),
        (spaces.Discrete(5), lambda: 3),
        (spaces.Discrete(5), lambda: np.int32(3)),
        (spaces.MultiBinary(3), lambda: np.array([True, False, True])),
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
        (spaces.Box(0, 9, (3,), np.uint8), np.zeros(3), "float64.*uint8"),
        (spaces.Box(0, 9, (3,), np.uint8), [1, 2, 300], "OverflowError|out of bounds"),
        (spaces.Discrete(3), 1.5, "float64.*int64"),
        (spaces.Box(0, 9, (3,)), np.zeros(4, np.float32), r"\[4\], not float32 \[3\]"),
        (spaces.Tuple([spaces.Discrete(3)] * 2), (1, 2, 0), "tuple of 2.*has 3"),
        (spaces.Tuple([spaces.Discrete(3)]), 2, "not a tuple"),
        (spaces.Dict(x=spaces.Discrete(3)), {"y": 1}, 'with the key "x"'),
        (spaces.Dict(x=spaces.Discrete(3)), {"x": 1, "y": 1}, "dict of 1.*2 keys"),
        (spaces.Dict(x=spaces.Discrete(3)), 1, "not a dict"),
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


def test_a_pair_with_a_dict_can_be_an_observation(address):
    space = spaces.Tuple([spaces.Discrete(3), spaces.Dict(x=spaces.Discrete(2))])

    class Bare(Env):
        def reset(self):  # the old Gym
            return self.observe()

    for env_class in (Env, Bare):
        with serving(
            lambda e=env_class: e(space, None, lambda: (2, {"x": 1})), address
        ):
            (observation, *_), _ = play(address, zero)
        assert observation[0].tolist() == [[2]] * (T + 1)
        assert observation[1]["x"].tolist() == [[1]] * (T + 1)


def test_observations_may_be_written_over_in_place(address):
    class InPlace(Env):
        def __init__(self):
            super().__init__()
            self.picture = np.zeros(3, np.int64)

        def reset(self):
            return self.picture, {}

        def step(self, action):
            self.picture += 1
            return self.picture, 0.0, False, False, {}

    with serving(InPlace, address):
        (observation, *_), _ = play(address, zero)
    assert observation[:, 0, 0].tolist() == list(range(T + 1))


# --- Actions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "sent", "got"),
    [
        (spaces.Discrete(7), torch.tensor(6), 6),
        (spaces.Discrete(7, start=10), torch.tensor(6), 16),
        (spaces.MultiDiscrete([3, 2, 4]), torch.tensor([2, 0, 3]), np.array([2, 0, 3])),
        (
            spaces.MultiDiscrete([3, 2], start=[1, 5]),
            torch.tensor([2, 0]),
            np.array([3, 5]),
        ),
        (
            spaces.MultiBinary(3),
            torch.tensor([1, 0, 1], dtype=torch.int8),
            np.array([1, 0, 1], np.int8),
        ),
        (
            spaces.Box(-1.0, np.array([1.0, 2.0]), dtype=np.float64),
            torch.tensor([-3.0, 1.5]),
            np.array([-1.0, 1.5]),
        ),
        (spaces.Box(-1, 1, ()), torch.tensor(9.0), np.array(1.0, np.float32)),
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


@pytest.mark.parametrize("action", [-1, 7])
def test_actions_out_of_range(action, address):
    with (
        serving(lambda: Env(action_space=spaces.Discrete(7, start=3)), address),
        pytest.raises(RuntimeError, match=f"action {action} is out of range.*0 to 6"),
    ):
        play(address, lambda _: torch.full((1, 1), action))


# --- Single environments --------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "match"),
    [
        ((0, 1.0, False), "4-tuple|tuple of 3"),
        (None, "NoneType"),
        ((np.zeros(3, np.float32), "much", False, {}), "'much' as reward.*one number"),
        ((np.zeros(3, np.float32), None, False, {}), "None as reward.*one number"),
        (
            (np.zeros(3, np.float32), 0.0, np.array([True, False]), {}),
            "array.* as done, which must be one bool",
        ),
        (
            (np.zeros(3, np.float32), 0.0, False, np.zeros(2), {}),
            "array.* as truncated, which must be one bool",
        ),
    ],
)
def test_what_step_must_return(result, match, address):
    class Odd(Env):
        def step(self, action):
            return result

    with serving(Odd, address), pytest.raises(RuntimeError, match=match):
        play(address, zero)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_whatever_an_environment_raises_reaches_the_learner(error, address):
    class Raises(Env):
        def step(self, action):
            raise error("enough")

    with (
        serving(Raises, address),
        pytest.raises(RuntimeError, match=rf"(?s)Traceback.*{error.__name__}: enough"),
    ):
        play(address, zero)


def test_not_an_environment(address):
    with serving(dict, address), pytest.raises(RuntimeError, match=r"no reset\(\)"):
        probe(address)
    with pytest.raises(TypeError, match="env_class"):
        Server(3, address)


def test_the_environment_is_closed_when_its_stream_ends(address):
    closed = threading.Event()
    threads = set()

    class Closes(Env):
        def __init__(self):
            super().__init__()
            threads.add(threading.get_ident())

        def step(self, action):
            threads.add(threading.get_ident())
            return super().step(action)

        def close(self):
            threads.add(threading.get_ident())
            closed.set()

    with serving(Closes, address) as server:
        play(address, zero)
        assert closed.wait(timeout=20)
        assert server.stats()["num_steps"] >= T
        while server.stats()["num_streams"] > 0:
            pass
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


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


def test_close_may_fail(address, monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)

    class Fails(Env):
        def close(self):
            raise ValueError("cannot close")

    with serving(Fails, address):
        probe(address)
    (report,) = reported
    assert str(report.exc_value) == "cannot close"


# --- Vectorised environments ----------------------------------------------------------


class Vector:
    """Two environments; `change` changes its rows from the second on."""

    num_envs = 2
    observation_space = spaces.Box(-9, 9, (3,))
    action_space = spaces.Discrete(4, start=2)
    final_observation = None

    def __init__(self, change=(), extra=()):
        self.change = dict(change)
        self.row = {
            "observation": np.zeros((2, 3), np.float32),
            "reward": np.zeros(2),
            "done": np.ones(2, bool),
            "episode_step": np.zeros(2, np.int32),
            "episode_return": np.zeros(2),
            **dict(extra),
        }

    def initial(self):
        return self.row

    def step(self, actions):
        assert actions.dtype == np.int64
        assert actions.tolist() == [3, 3]  # what the policy wrote
        row = {**self.row, **self.change}
        return {key: value for key, value in row.items() if value is not None}


def threes(_):
    return torch.full((1, 2), 3)


def test_vector_hello(address):
    extra = {"z": np.zeros((2, 5), np.int16), "b": np.zeros(2), "truncated": [0, 0]}
    with serving(lambda: Vector(extra=extra), address):
        hello = probe(address)
        env_outputs, _ = play(address, threes, batch=2)
    assert hello["num_envs"] == 2
    fields = {
        "b": {"dtype": "float64", "shape": ()},
        "truncated": {"dtype": "bool", "shape": ()},
        "z": {"dtype": "int16", "shape": (5,)},
    }
    assert list(hello["extra_fields"].items()) == list(fields.items())
    assert env_outputs[5]["z"].shape == (T + 1, 2, 5)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"reward": None}, 'no "reward"'),
        ({"reward": np.zeros(3)}, r'"reward".*\[3\], not float32 \[2\]'),
        ({"episode_step": np.zeros(2)}, '"episode_step".*float64.*int64'),
        ({"more": np.zeros(2)}, "6 fields.*5"),
        ({"observation": np.zeros((2, 4))}, r'"observation".*\[2, 4\]'),
    ],
)
def test_vector_rows_that_do_not_fit(change, match, address):
    make = functools.partial(Vector, change)
    with serving(make, address), pytest.raises(RuntimeError, match=match):
        play(address, threes, batch=2)


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"num_envs": 0}, "num_envs.*0"),
        ({"num_envs": 3}, r"\[2, 3\], not float32 \[3, 3\]"),
        ({"initial": lambda self: 3}, "dict, not.*int"),
        ({"observation_space": None}, "None is none of Box"),
    ],
)
def test_vector_environments_that_cannot_be_served(attributes, match, address):
    env_class = type("Bad", (Vector,), attributes)
    with serving(env_class, address), pytest.raises(RuntimeError, match=match):
        probe(address)


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"x": np.zeros(3)}, '"x".*num_envs, 2'),
        ({"x": np.array(["a", "b"])}, '"x".*<U1'),
        ({3: np.zeros(2)}, "keys.*3"),
    ],
)
def test_extra_fields_that_cannot_be_served(extra, match, address):
    make = functools.partial(Vector, extra=extra)
    with serving(make, address), pytest.raises(RuntimeError, match=match):
        probe(address)


def test_truncated_needs_the_final_observation(address):
    make = functools.partial(
        Vector, {"truncated": [False, True]}, {"truncated": np.zeros(2, bool)}
    )
    with (
        serving(make, address),
        pytest.raises(RuntimeError, match="final_observation is None"),
    ):
        play(address, threes, batch=2)


def test_gymnasium_vector_environments_are_refused_with_a_hint(address):
    class VectorEnv(Env):
        pass

    with (
        serving(VectorEnv, address),
        pytest.raises(RuntimeError, match=r"torchbeast\.core\.environment"),
    ):
        probe(address)


def test_the_environment_module_of_torchbeast(address):
    """Atari's Environment is such an object; GridWorld stands in for it here."""
    import argparse
    from functools import partial

    from torchbeast.core.environment import Environment

    flags = argparse.Namespace(
        env="environments:GridWorld", atari_backend="python", seed=1, sync=False
    )
    make = partial(Environment, flags, 3)
    with serving(make, address):
        hello = probe(address)
        env_outputs, action = play(
            address, lambda _: torch.tensor([[1, 2, 3]]), batch=3
        )
    assert hello["num_envs"] == 3
    assert hello["observation_space"]["spaces"]["map"]["shape"] == (8, 9, 2)
    assert {"truncated", "game_return", "last_action"} <= set(hello["extra_fields"])
    twin = make()
    row = twin.initial()
    for t in range(T + 1):
        for key in ("map",):
            np.testing.assert_array_equal(
                env_outputs[0][key][t], row["observation"][key]
            )
        np.testing.assert_array_equal(env_outputs[1][t], row["reward"])
        np.testing.assert_array_equal(
            env_outputs[5]["last_action"][t], row["last_action"]
        )
        row = twin.step(action[t].numpy())


# --- The process ----------------------------------------------------------------------


@pytest.mark.skipif(
    not os.path.exists("/proc/self/maps"), reason="reads /proc, which is Linux's"
)
def test_a_server_process_never_loads_torch(address):
    with ServerProcess("Loaded", address):
        (observation, *_), _ = play(address, zero)
    # "torch" in sys.modules, files of torch in /proc/self/maps
    assert observation.unique().tolist() == [0]


# --- Addresses ------------------------------------------------------------------------


def path_of(address):
    return address.removeprefix("unix:")


def test_the_socket_is_private_and_removed(address):
    with serving(Env, address) as server:
        assert server.address == address
        status = os.stat(path_of(address))
        assert stat.S_ISSOCK(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o600
    assert not os.path.exists(path_of(address))


def test_a_stale_socket_is_replaced(address):
    with ServerProcess("Counting", address) as server:
        server.kill()
        assert os.path.exists(path_of(address))
        with serving(Env, address):
            assert probe(address)["num_envs"] == 1
    assert not os.path.exists(path_of(address))


def test_a_socket_in_use_is_refused(address):
    with serving(Env, address):
        with pytest.raises(RuntimeError, match=f"{address}.*another server"):
            Server(Env, address).start()
        assert probe(address)["num_envs"] == 1
    assert not os.path.exists(path_of(address))


def test_a_file_is_not_replaced(address):
    with open(path_of(address), "w") as file:
        file.write("precious")
    with pytest.raises(RuntimeError, match="not a socket"):
        Server(Env, address).run()
    with open(path_of(address)) as file:
        assert file.read() == "precious"


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ("unix:/tmp/" + "x" * 200, "205 bytes.*107|205 bytes.*allows"),
        ("unix:", "empty"),
        ("nonsense", "host:port"),
        ("localhost:99999", "65535"),
    ],
)
def test_bad_addresses(bad, match):
    with pytest.raises(ValueError, match=match):
        Server(Env, bad)
    with pytest.raises(ValueError, match=match):
        probe(bad)


def test_no_such_directory(tmp_path):
    with pytest.raises(RuntimeError, match="No such file or directory"):
        Server(Env, f"unix:{tmp_path}/no/socket").start()


def test_tcp_finds_a_free_port():
    with serving(Env, "127.0.0.1:0") as server:
        assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d+", server.address)
        assert probe(server.address)["num_envs"] == 1
        with pytest.raises(RuntimeError, match="in use"):
            Server(Env, server.address).start()


def test_plain_tcp_beyond_this_machine_is_refused():
    with pytest.raises(ValueError, match="insecure"):
        Server(Env, "0.0.0.0:0")
    with pytest.raises(ValueError, match="insecure"):
        probe("192.0.2.1:5000")
    with pytest.raises(ValueError, match="insecure"):
        ActorPool(T, BatchingQueue(), servers.DynamicBatcher(), ["192.0.2.1:1"], ())
    with serving(Env, "0.0.0.0:0", security=Security(insecure=True)) as server:
        port = server.address.rpartition(":")[2]
        assert probe(f"127.0.0.1:{port}")["num_envs"] == 1


def test_run_and_stop_from_another_thread(address):
    server = Server(Env, address)
    thread = threading.Thread(target=server.run)
    thread.start()
    assert probe_until_there(address)["num_envs"] == 1
    server.stop()
    thread.join(timeout=20)
    assert not thread.is_alive()
    server.run()  # a stopped server's run() returns at once
    with pytest.raises(RuntimeError, match="stopped"):
        server.start()


def probe_until_there(address):
    while True:
        with contextlib.suppress(TransportError):
            return probe(address)


def test_more_streams_than_allowed(address):
    with (
        serving(Env, address, max_streams=1) as server,
        Run([address], lambda _: ((zero(0),), ())) as run,
    ):
        next(run.queue)
        with pytest.raises(TransportError, match="1 streams already"):
            probe(address)
        assert server.stats()["num_refused"] == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_streams": 0}, "max_streams.*0"),
        ({"security": Security(token="a b")}, "printable"),
    ],
)
def test_bad_arguments(arguments, match, address):
    with pytest.raises(ValueError, match=match):
        Server(Env, address, **arguments)


def test_probe_has_a_deadline(tmp_path):
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(f"{tmp_path}/silent")
    silent.listen()
    start = time.monotonic()
    with pytest.raises(TransportError, match="in time"):
        probe(f"unix:{tmp_path}/silent", timeout_s=0.2)
    assert time.monotonic() - start < 10
    silent.close()
    with pytest.raises(ValueError, match="timeout_s must be above 0"):
        probe(f"unix:{tmp_path}/silent", 0)


def test_a_text_that_is_not_utf8_reaches_python(address):
    grpc = pytest.importorskip("grpc")

    def refuse(requests, context):
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, b"caf\xe9 \xff")

    method = grpc.stream_stream_rpc_method_handler(refuse)
    service = ("torchbeast.wire.EnvServer", {"Stream": method})
    peer = grpc.server(ThreadPoolExecutor(2))
    peer.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(*service)])
    peer.add_insecure_port(address)
    peer.start()
    match = r"refuses: caf\\xe9 \\xff$"
    with pytest.raises(RefusedError, match=match):
        probe(address)
    with Run([address], zero) as run:
        assert re.search(match, str(run.error()))
        assert re.search(match, run.pool.stats()["last_error"])
    peer.stop(None).wait()
    with pytest.raises(ValueError, match=r"tls_ca: '/no/\\xff' cannot be read"):
        Security(tls_ca=b"/no/\xff")


# --- Token and TLS --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"token": ""}, ValueError, "token is empty"),
        ({"token": ["sesame"]}, TypeError, "token must be a str, not list"),
        ({"tls": "sesame"}, TypeError, "tls must be a bool, not str"),
        ({"secret": "sesame"}, TypeError, "no argument secret.*tls_server_name"),
        ({"tls_ca": 3}, TypeError, "tls_ca must be a path, not int"),
        ({"tls_ca": "/no/such/file"}, ValueError, "tls_ca: '/no/such/file'.*No such"),
        ({"tls_key": "/"}, ValueError, "tls_key: '/' cannot be read"),
        ({"tls_cert": __file__}, ValueError, "tls_cert.*not a PEM"),
    ],
)
def test_bad_security(arguments, error, match):
    with pytest.raises(error, match=match) as caught:
        Security(**arguments)
    assert "sesame" not in str(caught.value)


def test_security_shows_no_secret_and_cannot_be_changed(tls):
    assert repr(Security()) == "Security()"
    security = Security(token="sesame", insecure=True, **identity(tls, "ours-server"))
    expected = "Security(tls_cert=..., tls_key=..., token=..., insecure=True)"
    assert repr(security) == expected
    assert repr(Security(tls=True, **NAME)) == (
        "Security(tls=True, tls_server_name='beast.example')"
    )
    with pytest.raises(AttributeError):
        security.token = "another"
    with pytest.raises(TypeError) as caught:  # its message has all arguments
        Server(Env, 3, security=security)
    assert "sesame" not in str(caught.value)


def test_token(address):
    right = Security(token="open-sesame")
    with serving(Env, address, security=right) as server:
        assert probe(address, security=right)["num_envs"] == 1
        for wrong in ({}, {"token": "open-sesam"}, {"token": "open-sesame!"}):
            with pytest.raises(TransportError, match="token"):
                probe(address, security=Security(**wrong))
        assert server.stats()["num_refused"] == 3
        # Refused for good: the pool does not dial on.
        with Run([address], zero, security=Security(token="wrong")) as run:
            assert "token" in str(run.error())


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """A directory with certificates of our own and of a foreign authority."""
    certificates = Certificates(tmp_path_factory.mktemp("tls"))
    for authority in ("ours", "foreign"):
        certificates.make(f"{authority}-server", "DNS:beast.example", authority)
        certificates.make(f"{authority}-client", "DNS:me", authority)
    return certificates.folder


NAME = {"tls_server_name": "beast.example"}


def identity(tls, name):
    return {"tls_cert": tls / f"{name}.pem", "tls_key": str(tls / f"{name}.key")}


def test_tls(tls):
    ours = Security(**identity(tls, "ours-server"))
    right = Security(tls_ca=tls / "ours.pem", **NAME)
    with serving(Env, "127.0.0.1:0", security=ours) as server:
        assert probe(server.address, security=right)["num_envs"] == 1
        for wrong in (
            Security(tls_ca=tls / "foreign.pem", **NAME),  # another authority
            Security(
                tls_ca=tls / "ours.pem"
            ),  # the certificate's name is not the host's
            Security(),  # no TLS
        ):
            with pytest.raises(TransportError):
                probe(server.address, security=wrong)
        with Run([server.address], zeros, security=right) as run:
            assert next(run.queue)[0][0][0].shape == (T + 1, 1, 3)


def zeros(_):
    return (zero(0),), ()


def test_client_certificates(tls):
    trust = {"tls_ca": tls / "ours.pem"}
    server_security = Security(**trust, **identity(tls, "ours-server"))
    with serving(Env, "127.0.0.1:0", security=server_security) as server:

        def ask(certificate):
            return probe(
                server.address, security=Security(**trust, **NAME, **certificate)
            )

        assert ask(identity(tls, "ours-client"))["num_envs"] == 1
        for wrong in ({}, identity(tls, "foreign-client")):
            with pytest.raises(TransportError):
                ask(wrong)


def test_incomplete_tls(tls):
    with pytest.raises(ValueError, match="key is missing"):
        Server(Env, "127.0.0.1:0", security=Security(tls_cert=tls / "ours-server.pem"))
    with pytest.raises(ValueError, match="certificate and its key"):
        Server(Env, "127.0.0.1:0", security=Security(tls_ca=tls / "ours.pem"))
    with pytest.raises(ValueError, match="TLS is for host:port"):
        Server(Env, "unix:/tmp/x", security=Security(**identity(tls, "ours-server")))
