"""The replay gives back what was stored, and the learner uses it as LASER says."""

import argparse
import io
import json
import logging
import math
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest
import runs
import torch
from gymnasium import spaces
from nets import make_net

from torchbeast.base.nested import map_nested
from torchbeast.core import replay_memory, rollout
from torchbeast.core.acting import row_spec
from torchbeast.core.distributions import make_distribution
from torchbeast.core.mixer import Mixer
from torchbeast.core.replay import Replay, ReplayError
from torchbeast.envs.space_checks import FrameStack

T, A = 5, 3
STACK = (4, 7, 9)  # frames, height, width
OBSERVATIONS = spaces.Dict(
    {
        "stack": FrameStack(0, 255, STACK, np.uint8),
        "last": spaces.Box(0, 255, (7, 9, 4), np.uint8),  # not declared: stored whole
        "colours": spaces.Box(0, 255, (3, 8, 7), np.uint8),
        "vector": spaces.Box(-1, 1, (2,), np.float32),
        "nothing": spaces.Box(-1, 1, (0,), np.float32),
    }
)
DISTRIBUTION = make_distribution(spaces.Discrete(A))
SPEC = row_spec(make_net(OBSERVATIONS, spaces.Discrete(A)))


def dtype_of(spec):
    return torch.empty(0, dtype=spec.dtype).numpy().dtype


class Game:
    """Rows of one environment, random but for `done`, with a history of its steps.

    Args:
      lengths: of its episodes; a negative one is truncated.
    """

    def __init__(self, rng, lengths):
        self.rng, self.rows, self.truncated = rng, [], set()
        step = 0
        ends = {}
        for n in lengths:
            step += abs(n)
            ends[step] = n < 0
        frames = None
        for t in range(step + 1):
            row = {
                name: self._random(leaf)
                for name, leaf in SPEC.items()
                if name != "observation"
            }
            row["last_action"] %= A
            row["done"] = np.array(t == 0 or t in ends)
            row["truncated"] = np.array(ends.get(t, False))
            frame = rng.integers(256, size=STACK[1:]).astype(np.uint8)
            first = row["done"] or frames is None
            frames = [frame] * 4 if first else [*frames[1:], frame]
            row["observation"] = {
                "stack": np.stack(frames),
                "last": np.stack(frames, axis=-1),
                "colours": self._random(SPEC["observation"]["colours"]),
                "vector": self._random(SPEC["observation"]["vector"]),
                "nothing": self._random(SPEC["observation"]["nothing"]),
            }
            self.rows.append(row)

    def _random(self, spec):
        return self.rng.integers(0, 200, spec.shape).astype(dtype_of(spec))

    def rollouts(self):
        """Rollouts [T + 1, ...]; the rest of the steps is dropped."""
        for begin in range(0, len(self.rows) - T, T):
            yield stack(self.rows[begin : begin + T + 1])


def stack(rows, axis=0):
    return map_nested(lambda *x: np.stack(x, axis=axis), *rows)


def make_replay(capacity, seed=1):
    return Replay(SPEC, capacity, T, np.zeros, seed)


def play(replay, games):
    """Adds the rollouts of all games, two at a time, in turns."""
    queues = [list(game.rollouts()) for game in games]
    while any(queues):
        ready = [queue.pop(0) for queue in queues if queue]
        for i in range(0, len(ready), 2):
            replay.add(stack(ready[i : i + 2], axis=1), step=7)


def numbered(games):
    """{bytes of the image: (game, t)}: which row a replayed one comes from."""
    return {
        row["observation"]["colours"].tobytes(): (game, t)
        for game in games
        for t, row in enumerate(game.rows)
    }


def check_unroll(rows, games):
    """Compares an unroll [T + 1, ...] with the games."""
    places = numbered(games)
    previous = None
    for t in range(T + 1):
        row = map_nested(lambda x, t=t: x[t], rows)
        game, at = places[row["observation"]["colours"].tobytes()]
        original = game.rows[at]
        for name in row.keys() - rollout.RESULTS - {"done", "step_counts"}:
            map_nested(np.testing.assert_array_equal, row[name], original[name])
        goes_on = previous is not None and (game, at) == (previous[0], previous[1] + 1)
        if previous is not None:
            game_before, before = previous
            result = game_before.rows[before + 1]  # of the step before
            for name in (row.keys() & rollout.RESULTS) - {"done"}:
                np.testing.assert_array_equal(row[name], result[name], err_msg=name)
            assert bool(row["done"]) == bool(result["done"])
            assert rows["step_counts"][t - 1] == (not result["truncated"])
            assert goes_on or result["done"]
        if row["done"]:
            assert original["done"]  # the first observation of an episode
        previous = game, at


def test_replayed_unrolls_are_what_was_stored():
    rng = np.random.default_rng(1)
    games = [
        Game(rng, rng.choice([1, 2, 3, 8, -4, 17], size=20)),
        Game(rng, [T, T, 2 * T, T] * 3),  # episodes that end with rollouts
        Game(rng, [40, 1, 1, 1, 30]),
    ]
    replay = make_replay(10_000)
    play(replay, games)
    for _ in range(200):
        rows, readers = replay.read(3)
        for i, reader in enumerate(readers):
            column = map_nested(lambda x, i=i: x[:, i], rows)
            check_unroll(column, games)
            episode = replay.episode(reader.episode)
            assert 0 <= reader.position < episode.length
            assert episode.stored_at == 7
    assert replay.num_lost == 0


def test_a_reader_goes_on_where_it_ended():
    rng = np.random.default_rng(2)
    games = [Game(rng, [3, -9, 12, 4, 26, 5])]
    replay = make_replay(1000)
    play(replay, games)
    places = numbered(games)
    ends = {}
    for _ in range(100):
        rows, readers = replay.read(2)
        images = rows["observation"]["colours"]
        for i, reader in enumerate(readers):
            first, last = (places[images[t, i].tobytes()][1] for t in (0, T))
            assert ends.get(id(reader), first) == first
            ends[id(reader)] = last
            assert rows["done"][0, i] == games[0].rows[first]["done"]


def test_episodes_are_chosen_by_their_length():
    rng = np.random.default_rng(3)
    games = [Game(rng, [2, 30, 8, T])]
    replay = make_replay(1000)
    play(replay, games)
    places = numbered(games)
    steps = np.zeros(len(games[0].rows))
    for _ in range(20_000):
        rows, _ = replay.read(1)
        for t in range(T):
            steps[places[rows["observation"]["colours"][t, 0].tobytes()][1]] += 1
    lengths = (2, 30, 8, T)
    for begin, n in zip(np.cumsum((0, *lengths)), lengths, strict=False):
        share = steps[begin : begin + n].sum() / steps.sum()
        # An episode of n steps is chosen n times as often and has n times the steps.
        # The shortest is chosen 200 times: a deviation is 7 %.
        assert share == pytest.approx(n**2 / sum(m**2 for m in lengths), rel=0.2)


def test_the_oldest_make_room():
    rng = np.random.default_rng(4)
    games = [Game(rng, [9, 11, 7, -8] * 12) for _ in range(2)]
    replay = make_replay(150)
    queues = [list(game.rollouts()) for game in games]
    for i, pair in enumerate(zip(*queues, strict=True)):
        replay.add(stack(pair, axis=1), step=i)
        if i < 10:
            continue
        rows, _ = replay.read(4)
        places = numbered(games)
        for b in range(4):
            check_unroll(map_nested(lambda x, b=b: x[:, b], rows), games)
            _, at = places[rows["observation"]["colours"][T, b].tobytes()]
            assert i * T - at < 150  # not older than the capacity
        assert 0.5 * 150 < replay.size <= 150


@pytest.mark.parametrize("num_games", [1, 3, 4, 16])
def test_long_episodes_are_cut(num_games):
    """Environments without ends can be replayed; where one is cut does not count."""
    rng = np.random.default_rng(5)
    games = [Game(rng, [200, 102]) for _ in range(num_games)]
    replay = make_replay(160)
    for step, ready in enumerate(zip(*(x.rollouts() for x in games), strict=True)):
        for rows in ready:
            replay.add(stack([rows], axis=1), step)
            assert replay.size >= 160 / 4 or not replay.was_full
    assert replay.num_lost == 0
    places, cut = numbered(games), 0
    for _ in range(50):
        rows, (reader,) = replay.read(1)
        observations = map_nested(lambda x: x[:, 0], rows["observation"])
        at = [places[x.tobytes()] for x in observations["colours"]]
        for t in range(T):
            game, before = at[t]
            result = game.rows[before + 1]
            assert rows["reward"][t + 1, 0] == result["reward"]
            stacked = game.rows[before]["observation"]["stack"]
            np.testing.assert_array_equal(observations["stack"][t], stacked)
            assert rows["done"][t + 1, 0] or at[t + 1] == (game, before + 1)
            counts = result["done"] or not rows["done"][t + 1, 0]
            assert rows["step_counts"][t, 0] == counts
            cut += not counts
        episode = replay.episode(reader.episode)
        end = at[T][1] + episode.length - 1 - reader.position
        assert episode.stored_at == end // T
    assert cut >= 3


def test_stacks_that_share_no_frames():
    """Several frames per action, or noise: frames run out before steps do."""
    rng = np.random.default_rng(5)
    games = [Game(rng, [300]) for _ in range(8)]
    for row in (row for game in games for row in game.rows):
        noise = rng.integers(256, size=STACK, dtype=np.uint8)
        row["observation"] = {**row["observation"], "stack": noise}
    replay = make_replay(400)
    play(replay, games)
    assert replay.was_full
    assert replay.size >= 50
    replay.read(3)


def test_too_small_for_a_rollout():
    rng = np.random.default_rng(6)
    with pytest.raises(ReplayError, match=r"4 steps.*rollouts of 5.*--replay_size"):
        play(make_replay(4), [Game(rng, [15])])


def test_a_lost_rollout_costs_one_episode():
    rng = np.random.default_rng(7)
    game = Game(rng, [12, 12, 12])
    replay = make_replay(200)
    for i, rows in enumerate(game.rollouts()):
        if i != 1:  # rows 5 to 10 are lost
            replay.add(map_nested(lambda x: x[:, None], rows), step=0)
    assert replay.num_lost == 2  # rows 10 and 11; the first 5 wait
    for _ in range(30):
        rows, _ = replay.read(1)
        check_unroll(map_nested(lambda x: x[:, 0], rows), [game])
    assert replay.size == 12


@pytest.mark.parametrize("in_file", [False, True])
def test_memory_is_as_announced(in_file, tmp_path):
    """The memory that a full replay takes is what was said, within 5 %."""
    path = str(tmp_path / "replay") if in_file else ""
    words = [sys.executable, "-c", f"import test_replay; test_replay.fill({path!r})"]
    done = subprocess.run(
        words, env=runs.environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    said, used, size = map(float, done.stdout.split())
    assert size > 0.9
    assert said == pytest.approx(NUM_STEPS * 84 * 84 / 1e9, rel=0.1)  # a frame a step
    assert used == pytest.approx(said, rel=0.05)
    assert list(tmp_path.iterdir()) == []  # the file has no name any more


NUM_STEPS = 10_000  # of the replay in the test above


def fill(path):
    """Fills a replay and writes GB said, GB used, and the share that is filled."""
    flags = argparse.Namespace(
        replay_size=NUM_STEPS, unroll_length=T, seed=1, replay_file=path or None
    )
    screens = FrameStack(0, 255, (4, 84, 84), np.uint8)
    spec = row_spec(make_net(screens, spaces.Discrete(A)))
    said = io.StringIO()
    logging.basicConfig(level=logging.INFO, stream=said)
    row = {
        name: np.zeros((T + 1, 1, *s.shape), dtype_of(s))
        for name, s in spec.items()
        if name != "observation"
    }
    rng = np.random.default_rng(1)
    frames = list(rng.integers(256, size=(4, 84, 84)).astype(np.uint8))
    images = [np.stack(frames)]
    before = resident()
    replay = replay_memory.make_replay(flags, spec)
    for step in range(0, 2 * NUM_STEPS, T):
        for _ in range(T):
            frame = rng.integers(256, size=(84, 84)).astype(np.uint8)
            frames = [*frames[1:], frame]
            images.append(np.stack(frames))
        done = np.zeros((T + 1, 1), bool)
        done[[0, T], 0] = step % 100 == 0, (step + T) % 100 == 0
        observation = np.stack(images)[:, None]
        replay.add({**row, "observation": observation, "done": done}, step)
        images = images[-1:]
    gigabytes = said.getvalue().split(": ")[1].split(" GB")[0]
    words = gigabytes, (resident() - before) / 1e9, replay.size / NUM_STEPS
    sys.stdout.write(" ".join(map(str, words)))


def resident():
    with open("/proc/self/status") as file:
        values = dict(line.split(":") for line in file)
    return 1024 * sum(
        int(values[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem")
    )


def test_a_replay_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(replay_memory, "free_memory", lambda: 10**9)
    monkeypatch.setattr(replay_memory, "free_disk", lambda path: 10**9)
    flags = argparse.Namespace(
        replay_size=10**7, unroll_length=T, seed=1, replay_file=None
    )
    with pytest.raises(ReplayError, match=r"needs .* GB, but only 1 GB of memory"):
        replay_memory.make_replay(flags, SPEC)
    flags.replay_file = str(tmp_path / "file")
    with pytest.raises(ReplayError, match=r"only 1 GB of the file .*file"):
        replay_memory.make_replay(flags, SPEC)


def make_mixer(replay, model, ratio):
    return make_mixer_of(replay, model, replay_ratio=ratio, learn_start=0)


def make_mixer_of(replay, model, **flags):
    normal = {"normalize_rewards": False, "normalize_observations": False}
    flags = argparse.Namespace(reward_clipping="none", **normal, **flags)
    return Mixer(replay, flags, model.initial_state(1))


def test_states_are_those_of_whole_episodes():
    """The state before an unroll equals that of its episode, run alone."""
    rng = np.random.default_rng(8)
    games = [Game(rng, [3, 9, 14, 22, 6])]
    replay = make_replay(1000)
    play(replay, games)
    torch.manual_seed(1)
    model = make_net(OBSERVATIONS, spaces.Discrete(A), use_lstm=True)
    mixer = make_mixer(replay, model, 1.5)
    places = numbered(games)
    batch = map_nested(
        torch.from_numpy, map_nested(lambda x: x[:, None], next(games[0].rollouts()))
    )
    batch = map_nested(lambda x: torch.cat([x, x], dim=1), batch)
    compared = 0
    for _ in range(12):
        mixed, state = mixer.mix(batch, model.initial_state(2))
        assert mixed["replayed"].tolist() == [False] * 2 + [True] * 3
        for i in range(2, 5):
            image = mixed["observation"]["colours"][0, i].numpy().tobytes()
            _, at = places[image]
            begin = max(t for t in range(at + 1) if games[0].rows[t]["done"])
            if begin == at:
                continue
            whole = stack(games[0].rows[begin:at])
            whole = map_nested(lambda x: torch.from_numpy(x)[:, None], whole)
            with torch.no_grad():
                _, expected = model(whole, model.initial_state(1))
            for x, y in zip(state, expected, strict=True):
                torch.testing.assert_close(x[:, i : i + 1], y, rtol=1e-4, atol=1e-5)
            compared += 1
        mixer.carry_states(model)
    assert compared > 10


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("in_file", [False, True])
def test_images_that_share_no_frame_with_the_one_before(tmp_path, in_file, declared):
    """If they are declared as stacks all the same, fewer have room."""
    rng = np.random.default_rng(12)
    spec = {**SPEC, "observation": rollout.Spec((8, 10, 10), torch.uint8, declared)}
    flags = argparse.Namespace(
        replay_size=400, unroll_length=T, seed=1, replay_file=None
    )
    if in_file:
        flags.replay_file = str(tmp_path / "file")
    replay = replay_memory.make_replay(flags, spec)
    games = [Game(rng, [7] * 100) for _ in range(2)]
    planes = {}
    for step, columns in enumerate(zip(*(g.rollouts() for g in games), strict=True)):
        rows = map_nested(lambda *x: np.stack(x, axis=1), *columns)
        shape = (*rows["done"].shape, 8, 10, 10)
        observation = rng.integers(0, 256, shape, np.uint8)
        if planes:
            observation[0] = planes["last"]
        planes["last"] = observation[-1]
        replay.add({**rows, "observation": observation}, step)
    assert replay.size > (30 if declared else 0.9 * 400)
    rows, _ = replay.read(3)
    assert rows["observation"].shape == (T + 1, 3, 8, 10, 10)
    path = tmp_path / "replay.zip"
    replay_memory.save(replay, path, step)
    again = replay_memory.make_replay(flags, spec)
    replay_memory.load(again, path, step)
    assert again.size == replay.size


def test_a_loaded_replay_goes_on(tmp_path):
    """It has what was stored, and stores more without harm to it."""
    rng = np.random.default_rng(16)
    games = [Game(rng, [9, 11, 7, -8] * 12) for _ in range(3)]
    replay, again = make_replay(150), make_replay(150)
    play(replay, games[:2])  # it was full, so its slots are in no order
    replay_memory.save(replay, tmp_path / "replay.zip", 7)
    replay_memory.load(again, tmp_path / "replay.zip", 7)
    for more in ([], games[2:]):
        play(again, more)
        for _ in range(30):
            rows, _ = again.read(3)
            for b in range(3):
                check_unroll(map_nested(lambda x, b=b: x[:, b], rows), games)
    assert replay.size == pytest.approx(again.size, abs=2 * T + 20)


def test_an_incomplete_index_is_refused(tmp_path):
    path = tmp_path / "replay.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("index.json", '{"step": 7, "arrays": [], "episodes": []}')
    with pytest.raises(ReplayError, match="another --replay_size or other spaces"):
        replay_memory.load(make_replay(150), path, 7)


def double_slots(index):
    index["episodes"][1]["slots"] = index["episodes"][0]["slots"]


def shift_slots(index):
    index["episodes"][0]["slots"][0] += 1


def exchange_episodes(index):
    first, second = index["episodes"][:2]
    first["is_cut"], second["is_cut"] = not first["is_cut"], first["is_cut"]


def set_to(name, value):
    return lambda index: index.update({name: value})


@pytest.mark.parametrize(
    "edit",
    [
        *(double_slots, shift_slots, exchange_episodes),
        *(set_to("episodes", 3), set_to("episodes", []), set_to("arrays", None)),
        set_to("digest", None),
    ],
)
def test_a_changed_index_is_refused(tmp_path, edit):
    """Its checksums are right, so only what it says can show the fault."""
    replay = make_replay(150)
    play(replay, [Game(np.random.default_rng(16), [9, 11, 7, -8] * 6)])
    path = tmp_path / "replay.zip"
    replay_memory.save(replay, path, 7)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    index = json.loads(parts["index.json"])
    edit(index)
    parts["index.json"] = json.dumps(index).encode()
    refused_with(path, parts)


@pytest.mark.parametrize("edit", ["short", "long", "other", "missing", "not an index"])
def test_a_changed_part_is_refused(tmp_path, edit):
    replay = make_replay(150)
    play(replay, [Game(np.random.default_rng(16), [9, 11, 7, -8] * 6)])
    path = tmp_path / "replay.zip"
    replay_memory.save(replay, path, 7)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    number = max(
        (name for name in parts if name.isdigit()), key=lambda x: len(parts[x])
    )
    data = parts[number]
    changed = {"short": data[:-9], "long": data + b"x", "other": data[::-1]}
    if edit == "not an index":
        parts["index.json"] = b"[[[[["
    elif edit == "missing":
        del parts[number]
    else:
        parts[number] = changed[edit]
    refused_with(path, parts)


def refused_with(path, parts):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    with pytest.raises(ReplayError, match=r"replay.zip can't be loaded: .*Remove it"):
        replay_memory.load(make_replay(150), path, 7)


def test_a_short_episode_among_long_unfinished_ones_is_found_at_once():
    """The time to choose an episode must not depend on the others' steps."""
    leaf = rollout.Spec((1,), torch.float32)
    replay = Replay({**SPEC, "observation": leaf}, 500_000, T, np.zeros, 1)

    def add(num_rows, **ends):
        rows = map_nested(
            lambda s: np.zeros((num_rows, 1, *s.shape), dtype_of(s)),
            {**SPEC, "observation": leaf},
        )
        rows["done"][list(ends.values())] = True
        replay.add(rows, 0)

    add(3, begin=0, end=2)
    add(100_001, begin=0)
    assert replay.size == 2
    began = time.process_time()
    for _ in range(100):
        replay.read(10)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("field", "value", "cause"),
    [
        ("reward", np.nan, "the reward is nan"),
        ("reward", -np.inf, "the reward is -inf"),
        ("policy_logits", np.nan, "The cause is the update"),
    ],
)
def test_a_batch_that_no_loss_can_use_is_not_stored(field, value, cause):
    rng = np.random.default_rng(11)
    replay = make_replay(1000)
    model = make_net(OBSERVATIONS, spaces.Discrete(A))
    mixer = make_mixer(replay, model, 1.0)
    rows = map_nested(lambda x: x[:, None], next(Game(rng, [2] * 9).rollouts()))
    mixer.add(map_nested(torch.from_numpy, rows), T)
    size = replay.size
    assert size > 0
    rows[field][2, 0] = value
    with pytest.raises(FloatingPointError, match=cause):
        mixer.add(map_nested(torch.from_numpy, rows), 2 * T)
    assert replay.size == size


def test_masked_actions_are_stored():
    rng = np.random.default_rng(17)
    replay = make_replay(1000)
    mixer = make_mixer(replay, make_net(OBSERVATIONS, spaces.Discrete(A)), 1.0)
    rows = map_nested(lambda x: x[:, None], next(Game(rng, [2] * 9).rollouts()))
    rows["policy_logits"][:, 0, 1] = -np.inf
    assert mixer.add(map_nested(torch.from_numpy, rows), T)


def test_masked_actions_do_not_count_in_the_divergence():
    """It is that of the policies over the other actions."""
    torch.manual_seed(1)
    target, behavior = torch.randn(2, 4, 5, 7).double()
    left, masked = [0, 2, 3, 6], [1, 4, 5]
    few = make_distribution(spaces.Discrete(len(left)))
    expected = few.implied_kl(target[..., left], behavior[..., left], 1.0)
    target[..., masked] = behavior[..., masked] = -math.inf
    found = make_distribution(spaces.Discrete(7)).implied_kl(target, behavior, 1.0)
    torch.testing.assert_close(found, expected)
    assert (found > 0).all()


def test_when_the_learner_may_learn():
    """Also if unfinished episodes never let the replay reach learn_start."""
    rng = np.random.default_rng(10)
    games = [Game(rng, [12] * 30) for _ in range(2)]
    model = make_net(OBSERVATIONS, spaces.Discrete(A))
    for learn_start, first in ((0, 24), (50, 72), (100, 80)):
        replay = make_replay(100)
        mixer = make_mixer_of(replay, model, replay_ratio=1, learn_start=learn_start)
        ready = []
        for pair in zip(*(game.rollouts() for game in games), strict=True):
            rows = map_nested(torch.from_numpy, stack(pair, axis=1))
            ready.append(mixer.add(rows, step=0))
            if ready[-1]:
                mixer.mix(rows, ())
        begin = ready.index(True)
        assert all(ready[begin:])
        assert (begin + 1) * 2 * T >= first
        assert begin < 14


def test_fractions_of_a_ratio_add_up():
    rng = np.random.default_rng(9)
    games = [Game(rng, [12] * 5)]
    replay = make_replay(1000)
    play(replay, games)
    model = make_net(OBSERVATIONS, spaces.Discrete(A))
    mixer = make_mixer(replay, model, 0.3)
    rows = map_nested(lambda x: torch.from_numpy(x)[:, None], next(games[0].rollouts()))
    sizes = []
    for _ in range(10):
        mixed, _ = mixer.mix(rows, ())
        sizes.append(mixed["done"].shape[1] - 1)
    assert sizes == [0, 0, 0, 1, 0, 0, 1, 0, 0, 1]
