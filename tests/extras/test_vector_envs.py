"""Native vector environments of others: --env package.module:function, EnvPool."""

import functools
import json

import gymnasium
import numpy as np
import pytest
import runs
import torch
from environments import GridWorld
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from small_envs import env_flags
from watched_runs import processes_of_session, wait_until

from torchbeast.base.errors import UserError
from torchbeast.base.nested import map_nested
from torchbeast.envs import extra_fields
from torchbeast.envs.environment import Environment
from torchbeast.envs.extra_fields import ExtraField
from torchbeast.envs.seeded_games import game_seed

E = 3
FIELDS = {
    "distance": ExtraField((), np.int64, of="step"),
    "now": ExtraField((), np.int64, of="observation"),
    "far": ExtraField((), np.bool_, of="observation"),
}


class Measured(gymnasium.Wrapper):
    """`distance` describes a step, the others the observation."""

    def reset(self, **arguments):
        observation, info = self.env.reset(**arguments)
        return observation, self.look(info)

    def step(self, action):
        *result, info = self.env.step(action)
        return *result, {**info, **self.look(info)}

    @staticmethod
    def look(info):
        # Gymnasium joins the values of np.bool_ to an array of objects.
        return {"now": info["distance"], "far": np.bool_(info["distance"] > 2)}


def grids(num_envs, env_index, mode="SAME_STEP"):
    assert env_index in (0, 4)
    makers = [lambda: Measured(GridWorld())] * num_envs
    if mode == "ASYNC":
        return AsyncVectorEnv(makers)  # NEXT_STEP is its default
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode[mode])


def too_few(num_envs):
    return grids(num_envs - 1, 4)


def in_processes(num_envs):
    return gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="async")


class OneSeed(gymnasium.vector.VectorEnv):
    """Its reset() takes what Gymnasium's base class does: one integer."""

    single_observation_space = gymnasium.spaces.Box(0, 1, (2,))
    single_action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        seen = self.np_random.random((self.num_envs, 2), np.float32)
        return seen[:, ::-1], {}  # a view that is flipped


class NextStep(OneSeed):
    """It can't reset some of its environments alone."""

    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}


class Reuses(gymnasium.Env):
    """Counts its steps in the same array each time; 5 steps per game."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(0, 9, (1,))

    def __init__(self, number=5.0):
        self.array = np.zeros(1, np.float32)
        self.number = number

    def reset(self, *, seed=None, options=None):
        self.array[:] = self.steps = 0
        return self.array, {}

    def step(self, action):
        self.steps += 1
        self.array[:] = self.steps * self.number / 5
        return self.array, 1.0, False, self.steps == 5, {}


def reusing(num_envs, kind="Async", mode="SAME_STEP", own=None, **arguments):
    make_one = functools.partial(Reuses, **arguments)
    vector = {"Async": AsyncVectorEnv, "Sync": SyncVectorEnv}[kind]
    mode = AutoresetMode[mode]
    return vector([make_one] * num_envs, autoreset_mode=mode, **(own or {}))


@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        ({"mode": "DISABLED"}, 5),
        ({"mode": "DISABLED", "own": {"shared_memory": False}}, 5),
        ({"mode": "NEXT_STEP"}, 5),
        ({"kind": "Sync"}, 5),
        ({"kind": "Sync", "number": 0}, 0),  # always the same observation
    ],
)
def test_last_observations_that_are_right(arguments, last):
    env = make("reusing", env_kwargs=json.dumps(arguments))
    env.initial()
    for t in range(1, 21):
        row = env.step(np.zeros(E, int))
        assert row["done"].tolist() == [t % 5 == 0] * E
        if t % 5 == 0:
            assert env.final_observation.tolist() == [[last]] * E
            assert row["observation"].tolist() == [[0]] * E
    env.close()


def test_one_seed_for_all():
    first, again, other = (
        make("OneSeed", seed=seed).initial()["observation"] for seed in (3, 3, 4)
    )
    assert torch.from_numpy(first).tolist() == again.tolist()
    assert (first != other).any()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("module", ["torchbeast.monobeast", "torchbeast.polybeast"])
def test_environments_with_processes_of_their_own(tmp_path, module):
    env = f"{__name__}:in_processes"
    flags = {**runs.SMALL, "batch_size": 3, "env": env, "module": module}
    process = runs.start(tmp_path, "a", **flags)
    output = runs.finish(process, 300)
    assert process.returncode == 0, output
    assert int(runs.read_logs(tmp_path, "a")[-1]["games"]) > 5
    wait_until(lambda: not processes_of_session(process.pid), "all ended", 60)


def single(num_envs):
    return GridWorld()


def make(name, **flags):
    return Environment(env_flags(f"{__name__}:{name}", **flags), E, first_index=4)


@pytest.mark.parametrize("mode", ["SAME_STEP", "DISABLED", "NEXT_STEP", "ASYNC"])
def test_rows_are_those_of_single_environments(mode, monkeypatch):
    """Each is stepped by hand, too: reset once with its seed, then without."""
    for name, field in FIELDS.items():
        monkeypatch.setitem(extra_fields.EXTRA_FIELDS, name, field)
    envs = make("grids", seed=7, env_kwargs=f'{{"mode": "{mode}"}}')
    assert not envs.exact_resume
    rng = np.random.default_rng(1)
    twins = [Measured(GridWorld()) for _ in range(E)]
    row = envs.initial()
    seen = []
    for e, twin in enumerate(twins):
        observation, info = twin.reset(seed=game_seed(7, 4 + e, 0))
        seen.append((observation, info["now"]))
    returns, steps = np.zeros(E), np.zeros(E, int)
    counts = {"terminated": 0, "truncated": 0}
    for _ in range(200):
        for e, (observation, now) in enumerate(seen):
            parts = map_nested(lambda x, e=e: x[e], row["observation"])
            np.testing.assert_equal(parts, observation)
            assert row["now"][e] == now
            assert row["far"][e] == (now > 2)
        actions = rng.integers(4, size=E)
        row = envs.step(actions)
        for e, twin in enumerate(twins):
            observation, reward, terminated, truncated, info = twin.step(actions[e])
            returns[e] += reward
            steps[e] += 1
            assert row["reward"][e] == np.float32(reward)
            assert row["done"][e] == row["game_over"][e] == (terminated or truncated)
            assert row["truncated"][e] == (truncated and not terminated)
            assert row["game_return"][e] == pytest.approx(returns[e])
            assert row["episode_step"][e] == steps[e]
            assert row["distance"][e] == info["distance"]
            now = info["now"]
            if terminated or truncated:
                returns[e] = steps[e] = 0
                counts["terminated" if terminated else "truncated"] += 1
                if row["truncated"][e]:
                    final = envs.final_observation
                    np.testing.assert_array_equal(final["map"][e], observation["map"])
                    assert row["final_now"][e] == now
                observation, info = twin.reset()
                now = info["now"]
            seen[e] = observation, now
    assert min(counts.values()) > 3
    envs.close()


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("too_few", {}, r"num_envs=3 gave .*SyncVectorEnv"),
        ("single", {}, r"num_envs=3 gave .*GridWorld"),
        ("NextStep", {}, r"autoreset mode is NextStep.*DISABLED"),
        ("reusing", {}, r"SameStep.*Mode.DISABLED"),
        # Gymnasium's worker would reset once more.
        (
            "reusing",
            {"env_kwargs": '{"mode": "NEXT_STEP", "own": {"shared_memory": false}}'},
            r"NextStep.*Mode.DISABLED",
        ),
        ("grids", {"wrapper": "a:b"}, r"--wrapper,.*: leave them out"),
        ("grids", {"mask_actions": True}, "several environments at once"),
    ],
)
def test_what_can_not_be_used_is_refused(name, flags, words):
    with pytest.raises(UserError, match=words):
        make(name, **flags)


@pytest.mark.parametrize("task", ["CartPole-v1", "Acrobot-v1"])
def test_envpool(task):
    """Against EnvPool stepped by hand, whose own autoreset takes a step."""
    envpool = pytest.importorskip("envpool")
    flags = env_flags(f"envpool:{task}", seed=3)
    envs = Environment(flags, E)
    row = envs.initial()
    seed = game_seed(3, 0, 0)
    make_one = functools.partial(envpool.make, task, env_type="gymnasium", num_envs=E)
    twin = make_one(seed=seed, num_threads=1)
    observation, _ = twin.reset()
    rng = np.random.default_rng(1)
    ends = 0
    for _ in range(600):
        np.testing.assert_array_equal(row["observation"], observation)
        actions = rng.integers(2, size=E)
        row = envs.step(actions)
        observation, reward, terminated, truncated, _ = twin.step(actions)
        done = terminated | truncated
        np.testing.assert_array_equal(row["reward"], reward)
        np.testing.assert_array_equal(row["done"], done)
        if done.any():
            ends += done.sum()
            if (truncated & ~terminated).any():
                np.testing.assert_array_equal(envs.final_observation, observation)
            observation = observation.copy()
            observation[done] = twin.reset(np.flatnonzero(done))[0]
    assert ends > 2


class Buffers(OneSeed):
    """It returns the same arrays each time, and integers as ends."""

    single_observation_space = gymnasium.spaces.Box(0, 9, (1,))

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.seen, self.reward = np.zeros((E, 1), np.float32), np.zeros(E)
        self.cost = np.zeros(E, np.int64)

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(E, bool))
        self.seen[mask] = self.reward[mask] = self.cost[mask] = 0
        return self.seen, {"cost": self.cost}

    def step(self, actions):
        self.seen += 1
        self.reward[:] = self.cost[:] = 1
        ends = (self.seen[:, 0] == 3).astype(int)
        return self.seen, self.reward, ends * 0, ends, {"cost": self.cost}


def test_arrays_that_a_reset_changes(monkeypatch):
    field = ExtraField((), np.int64, of="step")
    monkeypatch.setitem(extra_fields.EXTRA_FIELDS, "cost", field)
    env = make("Buffers")
    env.initial()
    for _ in range(3):
        row = env.step(np.zeros(E, int))
    assert row["observation"].tolist() == [[0]] * E
    assert env.final_observation.tolist() == [[3]] * E
    assert row["truncated"].all()
    assert row["reward"].tolist() == row["cost"].tolist() == [1] * E
    assert row["episode_return"].tolist() == [3] * E


class Rooms(OneSeed):
    """Environment 1 truncates each game after two steps, in room 4."""

    single_observation_space = gymnasium.spaces.Discrete(5, start=1)

    def __init__(self, num_envs, form):
        super().__init__(num_envs)
        self.form, self.steps = form, 0

    def reset(self, *, seed=None, options=None):
        return np.ones(self.num_envs, np.int64), {}

    def step(self, actions):
        self.steps += 1
        truncated = np.array([False, self.steps % 2 == 0, False])
        filler, dtype = {"array": (0, np.int64), "objects": (None, object)}[self.form]
        final = np.array([filler, 4, filler], dtype)
        none = np.zeros(E, bool)
        return self.reset()[0], np.ones(E), none, truncated, {"final_obs": final}


@pytest.mark.parametrize("form", ["array", "objects"])
def test_only_last_observations_of_truncated_games_count(form):
    env = make("Rooms", env_kwargs=json.dumps({"form": form}))
    env.initial()
    for _ in range(2):
        row = env.step(np.zeros(E, int))
    assert row["truncated"].tolist() == [False, True, False]
    assert env.final_observation.tolist() == [1, 4, 1]
