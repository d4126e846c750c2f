"""--mode test: real processes, and the games that they play."""

import json
import os
import re
import signal
import statistics

import gymnasium
import pytest
import runs
from nets import make_flags, make_weights
from watched_runs import processes_of_session, wait_until

from torchbeast.extras.play import link_latest
from torchbeast.extras.play.games import EVAL_STREAM, TEST_STREAM, play

# --- Games ---


@pytest.mark.parametrize(
    "words",
    [
        ("--env", "CartPole-v1", "--use_lstm"),
        ("--env", "environments:GridWorld", "--mode", "test", "--greedy"),
        ("--env", "environments:Steering"),
    ],
)
def test_a_game_does_not_depend_on_the_others(words):
    flags = make_flags(*words)
    weights = make_weights(flags)
    games = sorted(play(flags, weights, range(21)))
    assert [game.number for game in games] == list(range(21))
    assert len({game[1:] for game in games}) > 2
    assert sorted(play(flags, weights, range(21))) == games
    assert sorted(play(flags, weights, [20, 3, 7])) == [games[i] for i in (3, 7, 20)]
    other = flags.replace(seed=2)
    assert sorted(play(other, weights, range(21))) != games


def test_a_game_of_atari_does_not_depend_on_the_others():
    words = "--env Breakout-v4 --sticky_actions 0.25 --max_episode_frames 600"
    flags = make_flags(*words.split())
    weights = make_weights(flags)
    games = sorted(play(flags, weights, range(11)))
    assert len({game[1:] for game in games}) > 2
    assert sorted(play(flags, weights, [10, 5])) == [games[5], games[10]]


def test_a_game_is_whole_and_its_rewards_are_not_clipped():
    flags = make_flags("--env", "environments:Lives")
    assert flags.reward_clipping == "abs_one"
    games = play(flags, make_weights(flags), range(3))
    assert [game[1:3] for game in games] == [(60.0, 12)] * 3


def test_no_two_environments_have_the_same_number():
    """Not even in two processes, or beside the training."""
    flags = make_flags("--env", "environments:Numbered")
    weights = make_weights(flags)
    for stream, first in ((TEST_STREAM, 10_000), (EVAL_STREAM, 20_000)):
        for own in (range(8), [8, 9, 16]):
            games = sorted(play(flags, weights, own, stream))
            numbers = [game.game_return - first for game in games]
            assert numbers == ([8, 9, 8] if 16 in own else [*range(8)])


def test_a_first_reset_that_differs_from_all_later_ones():
    wrapper = 'examples.exploration.staggered:Staggered{"limit": 20}'
    flags = make_flags("--env", "MountainCar-v0", "--wrapper", wrapper)
    games = play(flags, make_weights(flags), range(10))
    assert [game.length for game in games] == [200] * 10


@pytest.mark.parametrize("greedy", [False, True])
def test_greedy_games_take_the_likeliest_actions(greedy):
    """Only the actions differ between games, so greedy games are all the same."""
    flags = make_flags(
        "--env", "environments:Digits", *["--mode", "test", "--greedy"] * greedy
    )
    games = list(play(flags, make_weights(flags), range(17)))
    digits = {game.game_return for game in games}
    assert len(digits) == 1 if greedy else len(digits) > 10


# --- The newest run, test.json ---


def test_latest(tmp_path):
    for xpid in ("first", "second"):
        link_latest(tmp_path / xpid)
        assert os.readlink(tmp_path / "latest") == xpid
    assert os.listdir(tmp_path) == ["latest"]


def read_result(savedir):
    return json.loads((savedir / "a" / "test.json").read_text())


def test_what_test_json_has(tmp_path):
    runs.run(tmp_path, "a", **runs.SMALL, seed=5)
    test = {"mode": "test", "num_test_episodes": 11}
    output = runs.run(tmp_path, "a", **test)
    path = tmp_path / "a" / "test.json"
    assert f"Wrote {path}" in output
    result = read_result(tmp_path)
    returns = result["returns"]
    assert len(returns) == 11
    assert returns == result["lengths"]  # CartPole: 1 per step
    assert f"11 games: mean return {statistics.fmean(returns):.2f}, " in output
    logged = dict(re.findall(r"Game (\d+): return ([\d.]+) after", output))
    assert {int(k): float(v) for k, v in logged.items()} == dict(enumerate(returns))
    assert result["mean"] == pytest.approx(statistics.fmean(returns))
    assert result["std"] == pytest.approx(statistics.stdev(returns))
    assert (result["step"], result["seed"], result["xpid"]) == (600, 5, "a")
    assert result["policy"] == "sampled"
    assert (result["num_games"], result["checkpoint"]) == (11, "model.tar")
    assert result["flags"]["env"] == "CartPole-v1"
    meta = json.loads((tmp_path / "a" / "meta.json").read_text())
    for name in ("git", "versions", "hardware"):
        assert result[name] == meta[name]
    assert result["date"] >= meta["date_end"]
    # The same games again.
    output = runs.run(tmp_path, "latest", **test, suppress_logs=True)
    assert "Game 0" not in output
    assert read_result(tmp_path)["returns"] == result["returns"]
    assert read_result(tmp_path)["xpid"] == "a"
    runs.run(tmp_path, "a", **test, seed=6, greedy=True)
    other = read_result(tmp_path)
    assert (other["policy"], other["seed"]) == ("greedy", 6)
    assert other["returns"] != returns


class Counting(gymnasium.Wrapper):
    """Notes how many there are at once."""

    alive, most = 0, 0

    def __init__(self, env):
        super().__init__(env)
        Counting.alive += 1
        Counting.most = max(Counting.most, Counting.alive)

    def close(self):
        Counting.alive -= 1
        super().close()


def test_at_most_as_many_environments_as_in_training(monkeypatch):
    """In each process; and the games are the same."""
    words = "--env", "CartPole-v1", "--num_actors", "4", "--wrapper"
    words = *words, "test_play:Counting", "--envs_per_actor"
    many, few = make_flags(*words, "8"), make_flags(*words, "3")
    weights = make_weights(many)
    games = []
    for flags, most in ((many, 8), (few, 3)):
        monkeypatch.setattr(Counting, "most", 0)
        games.append(sorted(play(flags, weights, range(13))))
        assert (Counting.alive, Counting.most) == (0, most)
    assert games[0] == games[1]


# --- Faults ---


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A run on an environment that fails on demand."""
    savedir = tmp_path_factory.mktemp("runs")
    flags = {**runs.SMALL, "env": "faulty:Environment", "total_steps": 20}
    runs.run(savedir, "a", **flags)
    return savedir


@pytest.fixture
def fault(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULT_FILE", str(tmp_path / "fault"))
    return tmp_path / "fault"


@pytest.mark.parametrize(
    ("what", "env", "words"),
    [
        # It also raises if its close() never returns.
        ("raise_error", "HangsAfterAnError", "ValueError: the ball left the table"),
        ("leave", "Environment", "died with exit status 3"),
    ],
)
def test_an_environment_that_fails_in_a_test(faulty, fault, what, env, words):
    fault.write_text(what)
    test = {"mode": "test", "num_test_episodes": 9, "env": f"faulty:{env}"}
    output = runs.run(faulty, "a", status=1, **test)
    assert words in output
    assert output.count("[ERROR ") == 1
    assert not (faulty / "a" / "test.json").exists()


def test_an_environment_that_hangs_in_a_test(faulty, fault):
    fault.write_text("hang")
    flags = {"mode": "test", "num_test_episodes": 9, "actor_timeout": 5}
    process = runs.start(faulty, "a", module="impatient", **flags)
    output = runs.finish(process)
    assert process.returncode == 1, output
    assert "that plays games of faulty:Environment (pid " in output
    assert "made no step for 30 s" in output
    assert "in step" in output  # its stack
    wait_until(lambda: not processes_of_session(process.pid), "all processes ended")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (9, -9)])
def test_a_test_that_is_ended_leaves_nothing(faulty, fault, number, status):
    fault.write_text("hold_the_lock")  # the worst case: only SIGKILL ends it
    env = "faulty:WithProgram"
    process = runs.start(faulty, "a", mode="test", num_test_episodes=9, env=env)

    def sleeping():
        commands = [p.command for p in processes_of_session(process.pid)]
        return sum(command.startswith("sleep ") for command in commands) >= 2

    wait_until(sleeping, "the games began", 60)
    os.kill(process.pid, number)
    output = runs.finish(process)
    assert process.returncode == status, output
    wait_until(lambda: not processes_of_session(process.pid), "all processes ended")


def test_an_environment_that_does_not_close_delays_the_end_only(faulty):
    env = "faulty:SlowToClose"
    output = runs.run(faulty, "a", mode="test", num_test_episodes=3, env=env)
    assert "3 games: mean return" in output
