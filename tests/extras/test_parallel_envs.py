"""Several agents: --env names a parallel environment of PettingZoo."""

import contextlib
import json
import multiprocessing

import numpy as np
import pytest
import runs
import torch
from nets import make_flags, make_weights
from small_envs import env_flags

from torchbeast import monobeast
from torchbeast.base.errors import FlagError, UserError
from torchbeast.base.named import find_object
from torchbeast.core.weights import SharedWeights
from torchbeast.envs.environment import Environment
from torchbeast.envs.seeded_games import game_seed
from torchbeast.extras.play import games as played
from torchbeast.learner import Learner, learn
from torchbeast.local.env_spec import EnvSpec, find_env_spec
from torchbeast.polybeast.serving import try_environment
from torchbeast.tools.agent import Agent

pytest.importorskip("pettingzoo")
agent_games = pytest.importorskip("agent_games")

WHO = "agent_one_hot"


# --- The rows -------------------------------------------------------------------------


def play_by_hand(make, seed, index, actions):
    """Plays one game after the other with the actions [T, N]; yields rows by agent."""
    env, game = make(), 0
    agents = list(env.possible_agents)
    observations, _ = env.reset(seed=game_seed(seed, index, game))
    totals, lengths = np.zeros((2, len(agents)))
    there = [x in env.agents for x in agents]
    yield [{"done": True, "there": x} for x in there], dict(observations)
    for row_actions in actions:
        was = there
        chosen = {
            x: row_actions[i] + getattr(env.action_space(x), "start", 0)
            for i, x in enumerate(agents)
            if was[i]
        }
        observations, rewards, terminated, truncated, _ = env.step(chosen)
        rows = []
        for i, x in enumerate(agents):
            row = {"reward": 0.0, "done": False, "truncated": False, "game_over": False}
            if was[i]:
                totals[i] += rewards[x]
                lengths[i] += 1
                over = bool(terminated[x] or truncated[x])
                cut = bool(truncated[x] and not terminated[x])
                row |= {"reward": rewards[x], "done": over, "game_over": over}
                row |= {"truncated": cut, "last": np.array(observations[x])}
            row |= {"episode_return": totals[i], "episode_step": lengths[i]}
            if row["done"]:
                totals[i] = lengths[i] = 0
            rows.append(row)
        is_new = not env.agents
        if is_new:
            game += 1
            observations, _ = env.reset(seed=game_seed(seed, index, game))
        there = [x in env.agents for x in agents]
        for i, row in enumerate(rows):
            row["there"] = there[i]
            if not was[i] and (is_new or there[i]):
                row["done"] = True  # what did not count ends
        yield rows, dict(observations)


GAMES = [
    ("agent_games:Fading", {}),
    ("agent_games:Fading", {"late": True}),
    ("mpe2.simple_spread_v3:parallel_env", {"max_cycles": 7}),
]


@pytest.mark.parametrize(("env", "arguments"), GAMES)
def test_rows_are_what_the_game_gives_by_hand(env, arguments):
    if not env.startswith("agent_games"):
        pytest.importorskip(env.partition(".")[0])

    def make():
        return find_object("--env", env)(**arguments)

    agents = make().possible_agents
    N, G, first = len(agents), 2, 4
    flags = env_flags(env, env_kwargs=json.dumps(arguments))
    random = np.random.default_rng(1)
    with contextlib.closing(Environment(flags, G * N, first)) as envs:
        n = envs.action_space.n
        actions = random.integers(0, n, (400, G * N))
        games = [
            play_by_hand(make, flags.seed, first + g * N, actions[:, g * N :][:, :N])
            for g in range(G)
        ]
        row, seen = envs.initial(), {"some": 0, "truncated": 0}
        for t in range(len(actions) + 1):
            if t:
                row = envs.step(actions[t - 1])
            for g, game in enumerate(games):
                by_agent, observations = next(game)
                for i, wanted in enumerate(by_agent):
                    check_row(envs, row, g * N + i, i, wanted)
                    if wanted["there"]:
                        seen["some"] += not all(x["there"] for x in by_agent)
                        seen["truncated"] += wanted.get("truncated", False)
                        found = row["observation"]["observation"][g * N + i]
                        expected = np.asarray(observations[agents[i]])
                        np.testing.assert_array_equal(
                            found, expected.astype(found.dtype)
                        )
        assert seen["some"] or "spread" in env
        assert seen["truncated"], "nothing to see"


def check_row(envs, row, e, i, wanted):
    where = f"environment {e}, {wanted}"
    for name in wanted.keys() - {"there", "last"}:
        assert row[name][e] == pytest.approx(wanted[name]), f"{name} of {where}"
    number = np.zeros(row["observation"][WHO].shape[1])
    number[i] = wanted["there"]
    assert row["observation"][WHO][e].tolist() == number.tolist(), where
    if wanted.get("truncated"):
        last = envs.final_observation
        np.testing.assert_array_equal(last["observation"][e], wanted["last"])
        assert last[WHO][e].argmax() == i
        assert last[WHO][e].sum() == 1


@pytest.mark.parametrize("masked", ["observation", "info"])
def test_action_masks(masked):
    env_kwargs = json.dumps({"masked": masked})
    flags = env_flags(
        "agent_games:Fading", env_kwargs=env_kwargs, mask_actions=masked == "info"
    )
    envs = Environment(flags, 3)
    row = envs.initial()
    for _ in range(30):
        parts = row["observation"]
        rest = "numbers" if masked == "observation" else "observation"
        assert parts.keys() == {rest, "action_mask", WHO}
        steps = parts[rest][:, 0].astype(int)
        assert (parts["action_mask"].argmin(1) == steps % 4).all()
        assert parts["action_mask"].sum() == 9
        row = envs.step(np.zeros(3, int))


# --- What is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "fault", "words"),
    [
        ("Uneven", None, "observation_space must be one for all, or padded"),
        ("UnevenActions", None, "action_space must be one for all, or padded"),
        ("Faulty", "nobody", "no ParallelEnv with possible_agents"),
        ("Faulty", "twice", r"has a name twice: \['left', 'left'\]"),
        ("Faulty", "no space", "the space None is not supported"),
        ("Faulty", "empty", r"after reset\(\) the list `agents` has none"),
        ("Faulty", "missing", "no value for 'right'"),
        ("Faulty", "shape", r"returned float32 \[4\] as an observation"),
        ("Faulty", "stays", "ended the game of 'left', but `agents` still has it"),
        ("Faulty", "leaves", "no value for 'right', who is .* or has acted"),
        ("not_annotated", None, "is not a gymnasium.Env with one agent"),
        ("lying", None, "no ParallelEnv with possible_agents"),
    ],
)
def test_what_is_refused(env, fault, words):
    arguments = json.dumps({"fault": fault} if fault else {})
    flags = env_flags(f"agent_games:{env}", env_kwargs=arguments)

    def play():
        envs = Environment(flags, None)
        envs.initial()
        envs.step(np.zeros(2, int))

    with pytest.raises(UserError, match=words):
        play()


def test_a_number_of_environments_that_is_no_multiple():
    flags = env_flags("agent_games:Fading", envs_per_actor=8)
    words = "--envs_per_actor 8 must be a multiple of 3"
    with pytest.raises(FlagError, match=words):
        find_env_spec(flags, multiprocessing.get_context("spawn"), 60)
    with pytest.raises(FlagError, match=words):
        try_environment(flags)


@pytest.mark.parametrize("env", ["annotated", "Split"])
def test_what_names_a_parallel_environment(env):
    wrapper = 'agent_games:identity{"scale": 3}'
    flags = env_flags(f"agent_games:{env}", wrapper=wrapper)
    assert Agent(flags, None, None, None).make_env().scale == 3
    envs = Environment(flags, 4, 6)
    assert [x.env.scale for x in envs.games] == [3, 3]
    assert [x.env.number for x in envs.games] == [6, 8]


# --- The loss -------------------------------------------------------------------------


@pytest.mark.parametrize("rollouts", ["fixed", "episode"])
@pytest.mark.parametrize("core", [(), ("--use_lstm",)])
def test_nothing_is_learned_from_rows_of_absent_agents(rollouts, core):
    """Other numbers in these rows change neither the weights nor what is counted."""
    words = ("--env", "agent_games:Fading", "--envs_per_actor", "6", "--unroll_length")
    words += ("13", "--batch_size", "6", "--num_actors", "1", "--precision", "fp32")
    words += ("--rollouts", rollouts, "--normalize_advantages", "--disable_cuda", *core)
    words += ("--normalize_rewards", "--normalize_observations")
    flags = make_flags(*words)
    weights = []
    for changed in (False, True):
        with contextlib.closing(Environment(flags, 6)) as env:
            spec = EnvSpec(env.observation_space, env.action_space, 1)
            learner = Learner(flags, spec)
            shared = SharedWeights(learner.model)
            shared.publish(learner.model.state_dict(), 0)
            buffers = monobeast.make_buffers(flags, learner)
            actor = monobeast.Actor(flags, env, buffers, shared.memory)
            actor.load_weights(*shared.acquire())
            actor.unroll(list(range(6)))
        batch, state = monobeast.get_batch(buffers, range(6), torch.device("cpu"))
        absent = ~batch["observation"][WHO].any(-1)
        assert 5 < absent[:-1].sum() < absent[:-1].numel() / 2
        if changed:
            batch["action"][absent] = (batch["action"][absent] + 1) % 4
            batch["policy_logits"][absent] = torch.tensor([3.0, 1, 4, 1])
            batch["baseline"][absent] = 7.0
            # The reward and last action in a row are of the step before it.
            after = torch.zeros_like(absent)
            after[1:] = absent[:-1]
            batch["reward"][after] = 9.0
        columns = learn(learner, batch, state).finish()
        weights.append([x.clone() for x in learner.model.state_dict().values()])
        ends = batch["done"][1:] & ~absent[:-1]
        assert learner.counters.episodes == learner.counters.games == ends.sum()
        lengths = batch["episode_step"][1:][ends]
        assert columns["mean_episode_step"] == pytest.approx(lengths.float().mean())
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# --- Runs -----------------------------------------------------------------------------

LEARNING = {
    "env": "agent_games:Split",
    "num_actors": 2,
    "envs_per_actor": 4,
    "batch_size": 8,
    "unroll_length": 8,
    "optimizer": "adam",
    "learning_rate": 0.003,
    "epsilon": 0.00001,
    "precision": "fp32",
    "torch_threads": 1,
    "reward_clipping": "none",
}


@pytest.mark.parametrize("variant", ["monobeast", "polybeast"])
def test_two_agents_learn_to_take_different_actions(tmp_path, variant):
    """A policy that can't tell them apart gets 2 of 8."""
    flags = {**LEARNING, "module": f"torchbeast.{variant}", "total_steps": 12_000}
    if variant == "polybeast":
        flags |= {"num_servers": 2, "pipes_basename": f"unix:{tmp_path}/pipe"}
    runs.run(tmp_path, "a", **flags)
    rows = runs.read_logs(tmp_path, "a")
    assert float(rows[-1]["mean_game_return_100"]) > 7
    assert float(rows[-1]["mean_episode_step"] or 8) == 8
    runs.run(tmp_path, "a", mode="test", num_test_episodes=20)
    result = json.loads((tmp_path / "a" / "test.json").read_text())
    assert result["num_games"] == 20
    assert result["mean"] > 7
    assert set(result["lengths"]) == {8}


def test_sync_resumes_exactly(tmp_path):
    flags = {**LEARNING, "env": "agent_games:Fading", "sync": True, "use_lstm": True}
    flags |= {"envs_per_actor": 6, "batch_size": 12, "env_kwargs": '{"late": true}'}
    flags |= {"learning_rate_schedule": "constant"}
    runs.run(tmp_path, "whole", **flags, total_steps=960)
    runs.run(tmp_path, "parts", **flags, total_steps=480)
    output = runs.run(tmp_path, "parts", **flags, total_steps=960)
    assert "not deterministic" not in output  # the replay gives the same observation
    whole, parts = (runs.read_logs(tmp_path, x) for x in ("whole", "parts"))
    names = ("step", "total_loss", "mean_episode_return", "episodes", "grad_norm")
    assert len(whole) == 10
    for one, other in zip(whole, parts, strict=True):
        assert [one[x] for x in names] == [other[x] for x in names]


def test_a_test_game_by_hand():
    """Its return is the mean of the agents', its length that of the longest."""
    words = ("--env", "agent_games:Fading", "--envs_per_actor", "3", "--use_lstm")
    flags = make_flags(*words, "--precision", "fp32")
    weights = make_weights(flags)
    games = sorted(played.play(flags, weights, range(11)))
    assert [game.number for game in games] == list(range(11))
    assert games[9:] == sorted(played.play(flags, weights, [9, 10]))
    stream = played.derive_seed(flags.seed, played.TEST_STREAM)
    for game in games:
        env = agent_games.Fading()
        env.reset(seed=game_seed(stream, game.number, 0))
        assert game.length == max(env.lives.values())
        least = sum(env.lives[x] * 3 * (ord(x) - 96) for x in "abc") / 3
        assert least <= game.game_return <= 2 * least
        assert game.game_return == pytest.approx(np.mean(game.of_agents))
        for x, of_agent in zip("abc", game.of_agents, strict=True):
            least = env.lives[x] * 3 * (ord(x) - 96)
            assert least <= of_agent <= 2 * least
