"""examples/self_play: opponents, scores, and runs of both variants."""

import collections
import json
import os
import sys

import numpy as np
import pytest
import runs
import torch
from gymnasium.utils.env_checker import check_env
from test_evaluate import make_flags, make_weights

from examples.self_play import players
from examples.self_play.columns import NumpyPolicy
from examples.self_play.games import SelfPlay, kept
from torchbeast import load_agent
from torchbeast.runs import checkpoint

connect_four = pytest.importorskip("pettingzoo.classic.connect_four_v3")

NAME = "examples.self_play.games:SelfPlay"
BOARD = "examples.self_play.columns:Columns"
SCORES = "examples.self_play.scores:Scores"
COLUMNS = 7


def save(path, *words, edit=lambda weights: None):
    """Writes a checkpoint with random weights."""
    arguments = json.dumps({"folder": str(path.parent)})
    flags = make_flags(
        *("--env", NAME, "--env_kwargs", arguments, "--encoder", BOARD, *words),
        *("--precision", "fp32"),
    )
    weights = make_weights(flags)
    edit(weights)
    state = {"flags": flags.as_dict(), "model_state_dict": weights}
    checkpoint.save(path, state, keep_previous=False)


def publish(path, column):
    """Writes a checkpoint that plays in this column as long as it can."""

    def edit(weights):
        weights["policy.weight"].zero_()
        weights["policy.bias"].copy_(torch.eye(COLUMNS)[column] * 100)

    save(path, edit=edit)


def make(folder, **arguments):
    return SelfPlay(str(folder), trust=True, **arguments)


def opponents_columns(env):
    """How many pieces the opponent has in each column, from PettingZoo's board."""
    piece = 2 - env.seats.index(env.me)
    return (np.reshape(env.game.board, (6, 7)) == piece).sum(0).tolist()


def play(env, columns, **arguments):
    """Plays the columns in turn. Yields after each step, with the reward or None."""
    env.reset(**arguments)
    for column in columns:
        _, reward, terminated, _, _ = env.step(column)
        yield reward if terminated else None
        if terminated:
            return


def test_gymnasiums_checks(tmp_path):
    env = make(tmp_path)
    sample = env.action_space.sample
    # The checker takes any action.
    env.action_space.sample = lambda mask=None: sample(
        env.game.observe(env.me)["action_mask"]
    )
    check_env(env, skip_render_check=True)


def test_a_game_keeps_its_opponent_whatever_happens_to_the_files(tmp_path):
    publish(tmp_path / "model.10.tar", 2)
    env = make(tmp_path, newest=1.0)
    game = play(env, [0, 1, 0, 1], seed=1, options={"seat": 0})
    assert next(game) is None
    assert opponents_columns(env) == [0, 0, 1, 0, 0, 0, 0]
    publish(tmp_path / "model.20.tar", 5)
    assert next(game) is None
    publish(tmp_path / "other.tar", 6)
    os.replace(tmp_path / "other.tar", tmp_path / "model.10.tar")
    assert next(game) is None
    (tmp_path / "model.10.tar").unlink()
    assert next(game) == -1  # four in column 2
    assert opponents_columns(env) == [0, 0, 4, 0, 0, 0, 0]
    # The next game has the newest file.
    publish(tmp_path / "model.10.tar", 6)
    game = play(env, [0, 1, 0, 1], options={"seat": 0})
    assert list(game)[-1] == -1
    assert opponents_columns(env) == [0, 0, 0, 0, 0, 4, 0]
    # A file with the name of an older one is another opponent.
    publish(tmp_path / "other.tar", 3)
    os.replace(tmp_path / "other.tar", tmp_path / "model.20.tar")
    assert list(play(env, [0, 1, 0, 1], options={"seat": 1}))[-1] == -1
    assert opponents_columns(env) == [0, 0, 0, 4, 0, 0, 0]


def test_a_game_follows_from_its_seed_and_the_actions(tmp_path):
    save(tmp_path / "model.1.tar")
    boards = []
    for _ in range(2):
        env = make(tmp_path)
        env.reset(seed=5)
        observation, over = env.reset(seed=3)[0], False
        while not over:
            action = np.flatnonzero(observation["action_mask"])[-1]
            observation, _, over, _, _ = env.step(action)
        boards.append(env.game.board)
    assert boards[0] == boards[1]


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def test_broken_files_are_told_once_and_skipped(tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    publish(tmp_path / "model.1.tar", 4)
    whole = (tmp_path / "model.1.tar").read_bytes()
    (tmp_path / "model.2.tar").write_bytes(whole[: len(whole) // 2])
    torch.save({"model_state_dict": Evil(), "flags": {}}, tmp_path / "model.3.tar")
    (tmp_path / "model.4.tar").write_bytes(b"")
    (tmp_path / "model.5.tar").mkdir()
    env = make(tmp_path)
    for seed in range(40):
        assert env.reset(seed=seed)[0]["opponent"] == 1
    messages = [x.getMessage() for x in caplog.records]
    assert len(messages) == 4
    for number in (2, 3, 4, 5):
        path = str(tmp_path / f"model.{number}.tar")
        assert sum(path in x for x in messages) == 1
    assert not (tmp_path / "evil").exists()
    # Once it is whole, it plays.
    publish(tmp_path / "other.tar", 3)
    os.replace(tmp_path / "other.tar", tmp_path / "model.2.tar")
    assert {int(env.reset(seed=x)[0]["opponent"]) for x in range(40)} == {1, 2}


def test_a_file_of_somebody_else_is_not_trusted(tmp_path, caplog):
    save(tmp_path / "model.1.tar")  # without a signature
    env = SelfPlay(str(tmp_path))
    assert env.reset(seed=1)[0]["opponent"] == 0
    assert "not signed with your key" in caplog.text
    assert make(tmp_path).reset(seed=1)[0]["opponent"] == 1


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("words", [[], ["--use_lstm"]], ids=str)
def test_a_saved_player_acts_as_the_agent(tmp_path, words, greedy):
    path = tmp_path / "model.1.tar"
    # So that it is not nearly uniform.
    save(path, *words, edit=lambda weights: weights["policy.weight"].mul_(100))
    agent = load_agent(path, trust_env=True)
    env, state = make(tmp_path, against="random"), None
    player = players.Saved(agent, np.random.default_rng(1), greedy)
    agent.generator.manual_seed(int(np.random.default_rng(1).integers(2**62)))
    observation, over, moves = env.reset(seed=2)[0], False, []
    while not over:
        move = player.move(observation)
        action, state = agent.act(observation, state, greedy=greedy)
        assert move == action
        moves.append(move)
        observation, _, over, _, _ = env.step(move)
    assert len(moves) > 3


def test_the_fast_player_has_the_logits_of_the_model(tmp_path, monkeypatch):
    path, seen = tmp_path / "model.1.tar", []
    save(path, edit=lambda weights: weights["policy.weight"].mul_(100))
    agent = load_agent(path, trust_env=True)
    policy = NumpyPolicy.__call__

    def spy(*args):
        logits = policy(*args)
        seen.append(logits.copy())
        return logits

    monkeypatch.setattr(NumpyPolicy, "__call__", spy)
    env = make(tmp_path, against="random")
    for seed, greedy in ((1, False), (2, True)):
        observation, over, state = env.reset(seed=seed)[0], False, None
        player = players.saved(agent, np.random.default_rng(1), greedy)
        assert isinstance(player, players.SavedBoard)
        while not over:
            legal = observation["action_mask"] != 0
            logits = agent.act(observation, state, outputs=True)[2]["policy_logits"]
            move = player.move(observation)
            np.testing.assert_allclose(seen[-1][legal], logits[legal], 1e-4, 1e-5)
            assert not greedy or move == logits.argmax()
            # The state of an agent that has moved like the player.
            state = agent.act(observation, state)[1]._replace(
                last_action=torch.tensor([[move]])
            )
            observation, _, over, _, _ = env.step(move)


def wins(game, who, column):
    """Whether this agent would win with a piece in the column, by PettingZoo."""
    other = connect_four.raw_env()
    other.reset()
    other.board, other.agent_selection = list(game.board), who
    other.step(column)
    other.agent_selection = who
    return other.check_for_winner()


def random_positions(games, rng):
    """Games of random moves. Yields them before each move."""
    for _ in range(games):
        game = connect_four.raw_env()
        game.reset()
        while not any(game.terminations.values()):
            yield game
            mask = game.observe(game.agent_selection)["action_mask"]
            game.step(int(rng.choice(np.flatnonzero(mask))))


def test_the_scripted_player_against_pettingzoos_rules():
    rng = np.random.default_rng(3)
    player, found = players.Scripted(rng), collections.Counter()
    for game in random_positions(60, rng):
        agent = game.agent_selection
        rival = game.possible_agents[agent == "player_0"]
        observation = game.observe(agent)
        legal = np.flatnonzero(observation["action_mask"])
        winning = {x for x in legal if wins(game, agent, x)}
        blocking = {x for x in legal if wins(game, rival, x)}
        move = player.move(observation)
        assert move in (winning or blocking or legal)
        found["wins"] += bool(winning)
        found["blocks"] += bool(blocking) and not winning
    assert found["wins"] > 20
    assert found["blocks"] > 20


@pytest.mark.timeout(500)
@pytest.mark.parametrize("module", ["monobeast", "polybeast"])
def test_both_variants_play_against_their_older_weights(tmp_path, module):
    told = tmp_path / "told"
    told.mkdir()
    arguments = json.dumps({"folder": str(tmp_path / "run"), "history": 4})
    wrapper = f"self_games:Told{json.dumps({'folder': str(told)})}"
    flags = {**runs.SMALL, "env": NAME, "env_kwargs": arguments, "wrapper": wrapper}
    flags |= {"encoder": BOARD, "explorer": SCORES, "checkpoint_history": 4}
    flags |= {"total_steps": 3000, "batch_size": 3}
    if module == "polybeast":
        pytest.importorskip("libtorchbeast", exc_type=ImportError)
        flags["module"] = "torchbeast.polybeast"
        flags |= {"num_servers": 2, "pipes_basename": f"unix:{tmp_path}/pipe"}
    output = runs.run(tmp_path, "run", **flags)
    assert "goes on without" not in output
    assert len(kept(tmp_path / "run")) == 4
    lines = [
        json.loads(line)
        for file in told.iterdir()
        for line in file.read_text().splitlines()
    ]
    played = collections.Counter(number for number, _ in lines)
    logs = runs.read_logs(tmp_path, "run")
    for number in range(5):
        logged = sum(int(row[f"opponent_games_{number}"]) for row in logs)
        # Some games were played and not learned from.
        assert played[number] - 60 <= logged <= played[number]
        cell = logs[-1][f"opponent_score_{number}"]
        assert -1 <= float(cell) <= 1 if logged else cell == ""
    assert played[0] > 30
    assert played[1] + played[2] + played[3] > 30
    # A resumed run has the opponents, the games and the scores of before. Its processes
    # log that a file is broken.
    broken = tmp_path / "run" / "model.1.tar"
    broken.write_bytes(b"half of it")
    flags["total_steps"] = 3300
    output = runs.run(tmp_path, "run", **flags)
    assert f"goes on without the opponent {broken}" in output
    more = runs.read_logs(tmp_path, "run")[len(logs) :]
    assert more[0]["opponent_score_0"] == logs[-1]["opponent_score_0"]
    assert sum(int(row["opponent_games_0"]) for row in more) == 0
    # And another program plays it.
    words = [sys.executable, "-m", "examples.self_play.match", str(tmp_path / "run")]
    output = runs.run_words([*words, "--games", "6"])
    rows = [line for line in output.splitlines() if "lost" in line]
    assert [row.split()[0] for row in rows] == ["moving", "moving", "both"]
    numbers = np.array([[int(x) for x in row.split() if x.isdigit()] for row in rows])
    assert numbers.sum(1).tolist() == [3, 3, 6]
