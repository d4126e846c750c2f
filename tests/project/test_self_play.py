"""examples/self_play: opponents, scores, and runs of both variants."""

import collections
import json
import os
import sys

import numpy as np
import pytest
import runs
import torch
from nets import make_flags, make_weights

from examples.self_play import players
from examples.self_play.games import SelfPlay, kept
from examples.self_play.league import League
from torchbeast.base.errors import FlagError
from torchbeast.runs import checkpoint

connect_four = pytest.importorskip("pettingzoo.classic.connect_four_v3")

NAME = "examples.self_play.games:SelfPlay"
BOARD = "examples.self_play.columns:Columns"
SCORES = "examples.self_play.scores:Scores"
COLUMNS = 7


def save(path, *words, edit=lambda weights: None, encoder=BOARD):
    """Writes a checkpoint with random weights."""
    arguments = json.dumps({"folder": str(path.parent)})
    flags = make_flags(
        *("--env", NAME, "--env_kwargs", arguments, "--encoder", encoder, *words),
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


def test_a_file_of_somebody_else_is_not_trusted(tmp_path, caplog):
    save(tmp_path / "model.1.tar")  # without a signature
    env = SelfPlay(str(tmp_path))
    assert env.reset(seed=1)[0]["opponent"] == 0
    assert "you have not signed it" in caplog.text
    assert make(tmp_path).reset(seed=1)[0]["opponent"] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        *({"newest": 2}, {"greedy": "x"}, {"history": 0}, {"game": "no_such_game"}),
        *({"game": "pettingzoo.classic.texas_holdem_v9"}, {"game": "math"}),
    ],
)
def test_arguments_that_can_not_work(tmp_path, wrong):
    with pytest.raises(FlagError, match=r"^SelfPlay's --env_kwargs: "):
        make(tmp_path, **wrong)


def test_a_checkpoint_of_another_game_is_left_out(tmp_path, caplog):
    tictactoe = {"folder": str(tmp_path), "game": "pettingzoo.classic.tictactoe_v3"}
    save(tmp_path / "model.1.tar", "--env_kwargs", json.dumps(tictactoe), encoder="")
    save(
        tmp_path / "model.2.tar",
        "--env",
        "CartPole-v1",
        "--env_kwargs",
        "{}",
        encoder="",
    )
    assert make(tmp_path).reset(seed=1)[0]["opponent"] == 0
    assert caplog.text.count("is of another game, --env") == 2
    with pytest.raises(ValueError, match="is of another game"):
        make(tmp_path, against=tmp_path / "model.1.tar").reset()


def test_opponents_act_in_batches_as_one_by_one(tmp_path, monkeypatch):
    for number in (1, 2, 3):  # as they have a core, they are in PyTorch
        random = torch.Generator().manual_seed(number)
        save(
            tmp_path / f"model.{number}.tar",
            "--use_lstm",
            edit=lambda x, random=random: x["policy.weight"].normal_(generator=random),
        )
    sizes, act = [], players.move_batch

    def move_batch(batch, observations):
        sizes.append(len(batch))
        return act(batch, observations)

    monkeypatch.setattr(players, "move_batch", move_batch)
    E, rng = 5, np.random.default_rng(1)
    league = League(E, folder=str(tmp_path), trust=True)
    singles = [make(tmp_path) for _ in range(E)]
    rows, _ = league.reset(seed=10)
    mine = [x.reset(seed=10 + i)[0] for i, x in enumerate(singles)]
    for _ in range(30):
        for name, part in rows.items():
            np.testing.assert_array_equal(part, [x[name] for x in mine])
        actions = [rng.choice(np.flatnonzero(x)) for x in rows["action_mask"]]
        rows, *results, info = league.step(actions)
        for i, single in enumerate(singles):
            mine[i], *result, _ = single.step(actions[i])
            assert [x[i] for x in results] == result
            assert (info["final_obs"]["observation"][i] == mine[i]["observation"]).all()
            if result[1]:
                mine[i], _ = single.reset()
    assert max(sizes) > 2


def test_hard_opponents_come_more_often(tmp_path):
    for number in (1, 2):
        publish(tmp_path / f"model.{number}.tar", 6)
    env, drawn = make(tmp_path, newest=0.0, hard=8.0), []
    for seed in range(60):
        row, _ = env.reset(seed=seed, options={"seat": 0})
        drawn.append(int(row["opponent"]))
        for column in (1, 1, 1, 1) if drawn[-1] == 1 else (0, 1, 0, 1):
            env.step(column)  # wins against the first, loses to the second
    assert drawn[20:].count(2) > 35


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
    # log that files are broken: all but the newest, so that one is drawn soon.
    for broken in kept(tmp_path / "run")[:3]:
        broken.write_bytes(b"half of it")
    flags["total_steps"] = 3300
    output = runs.run(tmp_path, "run", **flags)
    assert "goes on without the opponent" in output
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
