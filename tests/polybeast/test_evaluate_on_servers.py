"""--mode test on servers: the learner's side has no environment."""

import json
import os
import signal
import subprocess

import pytest
import runs
import torch
from watched_servers import E

from torchbeast.polybeast.evaluate import Scorer

LEARNER, POLYBEAST = "torchbeast.polybeast_learner", "torchbeast.polybeast"


def start_test(tmp_path, module=LEARNER, **flags):
    """Runs --mode test without the folder of the tests' environments."""
    words = runs.command(tmp_path, "a", module, mode="test", **flags)
    environment = {**runs.environment(), "PYTHONPATH": str(runs.ROOT)}
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def result_of(tmp_path, process):
    output = runs.finish(process)
    assert process.returncode == 0, output
    return json.loads((tmp_path / "a" / "test.json").read_text()), output


@pytest.mark.parametrize(("greedy", "module"), [(True, LEARNER), (None, POLYBEAST)])
def test_servers_get_greedy_or_sampled_actions(tmp_path, serve, greedy, module):
    """The environment is the servers' only. They have fewer than the training had."""
    env = {"env": "environments:Digits", "use_lstm": True, "total_steps": 100}
    runs.run(tmp_path, "a", **{**runs.SMALL, **env})
    servers = serve(env=env["env"], bind="localhost:0", num_servers=2, envs_per_actor=2)
    flags = {"server_addresses": ",".join(servers.addresses(2)), "greedy": greedy}
    process = start_test(tmp_path, module, num_test_episodes=17, **flags)
    result, _ = result_of(tmp_path, process)
    assert len(result["returns"]) == result["num_games"] == 17
    assert result["lengths"] == [5] * 17
    assert result["step"] == 100
    assert (len(set(result["returns"])) == 1) == bool(greedy)
    assert result["policy"] == ("greedy" if greedy else "sampled")


def test_a_killed_server_costs_its_games_only(tmp_path, serve):
    runs.run(tmp_path, "a", **runs.SMALL)
    servers = serve(bind="localhost:0", num_servers=2)
    addresses = ",".join(servers.addresses(2))
    flags = {"server_addresses": addresses, "num_test_episodes": 2400}
    # A lost game begins anew after the sum of both.
    process = start_test(tmp_path, **flags, connect_timeout=10, actor_timeout=10)
    lines = []
    while "Game" not in (line := process.stdout.readline()):
        lines.append(line)
        assert line, lines
    os.kill(servers.children()[0], signal.SIGKILL)
    result, output = result_of(tmp_path, process)
    assert "lost" in output
    assert result["num_games"] == 2400
    assert result["returns"] == result["lengths"]  # CartPole


def test_the_games_that_begin_first_count():
    """Streams of environments whose games have fixed lengths, in a fixed order."""
    lengths = {1: [3, 9, 2], 2: [7, 1, 8], 3: [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]}
    lengths |= {4: [5, 5, 5], 5: [2, 4, 6, 2], 6: [20]}
    N = 11
    begun = sorted(
        (sum(games[:k]), env, k)
        for env, games in lengths.items()
        for k in range(20)
        if k < len(games)
    )  # time, environment, number of its game
    wanted = sorted(lengths[env][k] for _, env, k in begun[:N])
    scorer = Scorer(range(N), E)
    states = torch.zeros(2, E, dtype=torch.int64)
    ended = []
    at = dict.fromkeys(lengths, (0, 0))  # game and step of each environment
    for _ in range(30):
        for stream in range(2):
            members = [1 + stream * E + i for i in range(E)]
            over = []
            for env in members:
                game, step = at[env]
                games = lengths[env]
                ends = game < len(games) and step == games[game]
                over.append((ends, ends or step % 2 == 0, step))  # a game has lives
                at[env] = (game + 1, 1) if ends else (game, step + 1)
            row = {
                "truncated": torch.zeros(1, E, dtype=torch.bool),
                "done": torch.tensor([[done for _, done, _ in over]]),
                "game_over": torch.tensor([[ends for ends, _, _ in over]]),
                "game_return": torch.tensor([[float(2 * n) for _, _, n in over]]),
                "game_step": torch.tensor([[n for _, _, n in over]]),
            }
            every = torch.ones_like(row["done"])
            asked = {**row, "truncated": every, "done": ~every}
            assert not scorer.add(asked, states[stream].clone())  # not a step
            ended += scorer.add(row, states[stream])
    assert states.flatten().tolist() == list(range(1, 7))
    assert sorted(game.number for game in ended) == list(range(N))
    assert sorted(game.length for game in ended) == wanted
    assert all(game.game_return == 2 * game.length for game in ended)
