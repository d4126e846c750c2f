"""--record and tools/repeat.py: an asynchronous run that is made again.

Each test starts real runs, whose actors and learner do not wait for each other. What is
equal is decided by logs.csv as the csv module reads it, not by what the command says.
"""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import types

import gymnasium
import numpy as np
import pytest
import runs
import torch
from gymnasium import spaces

from torchbeast.extras import record
from torchbeast.runs.files import RunFileError

# More actors than cores, a batch that is no multiple of an actor's rollouts, and no
# more slots than needed.
SMALL = {
    **runs.SMALL,
    "num_actors": 3,
    "envs_per_actor": 3,
    "batch_size": 4,
    "num_buffers": 9,
    "total_steps": 3000,
    "record": True,
}
LASER = {"replay_ratio": 1, "replay_size": 600, "learn_start": 100}
SETTINGS = {
    "threads": {
        **{"num_learner_threads": 3, "minibatches": 2, "updates_per_batch": 4},
        **{"use_lstm": True, "normalize_observations": True},
        **{"normalize_rewards": True, "num_buffers": 20, "total_steps": 2000},
    },
    "laser": {
        **{**LASER, "use_lstm": True, "rollouts": "episode"},
        **{"normalize_observations": True, "normalize_rewards": True},
    },
    "pong": {
        **{"env": "PongNoFrameskip-v4", "num_actors": 2, "envs_per_actor": 2},
        **{"batch_size": 2, "num_buffers": 5, "total_steps": 400},
    },
}


class Counts(gymnasium.Env):
    """Episodes of 7 steps. The observation is random, and all steps are counted."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(5)
    all_steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        self.steps, self.all_steps = self.steps + 1, self.all_steps + 1
        return self.observe(), float(action), self.steps == 7, False, {}

    def observe(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)


class Drifts(Counts):
    """Its 18th observation, and no other, is another one in each process."""

    def observe(self):
        drawn = super().observe()
        if self.all_steps == 18:
            drawn[1] = int.from_bytes(os.urandom(2), "big") / 2**16
        return drawn


class Breaks(Counts):
    def step(self, action):
        if self.all_steps == 150:
            raise ValueError(f"the {self.all_steps}th ball is flat")
        return super().step(action)


def events(savedir, xpid, step=0):
    _, data = record.read_whole(savedir / xpid / f"record.{step}")
    whole = data[: len(data) // record.EVENTS.itemsize * record.EVENTS.itemsize]
    return np.frombuffer(whole, record.EVENTS).tolist()


def command(savedir, xpid, repeat, **flags):
    """The command that repeats a run as `xpid`."""
    words = runs.command(savedir, xpid, "torchbeast.tools.repeat", **flags)
    return [*words[:3], repeat, *words[3:]]


def repeat(savedir, xpid, status=0, **flags):
    """Makes a run again, as XPID-repeated; returns the output."""
    words = command(savedir, f"{xpid}-repeated", xpid, **flags)
    return runs.run_words(words, status=status)


def check_repetition(savedir, xpid, **flags):
    output = repeat(savedir, xpid, **flags)
    again = runs.logs(savedir, f"{xpid}-repeated")
    assert again == runs.logs(savedir, xpid)
    assert f"Equal to the recorded run: {len(again)} rows." in output
    return output


@pytest.fixture
def load():
    """A process that keeps a core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    process.kill()
    process.wait()


def test_two_runs_differ_and_each_can_be_repeated(tmp_path, load):
    for xpid in "ab":
        runs.run(tmp_path, xpid, **SMALL)
    assert events(tmp_path, "a") != events(tmp_path, "b")
    assert runs.logs(tmp_path, "a") != runs.logs(tmp_path, "b")
    check_repetition(tmp_path, "a")
    # On one core, where all is late.
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    words = command(tmp_path, "b-repeated", "b")
    one = ["taskset", "-c", str(min(cores)), *words]
    process = runs.start_words(one if len(cores) > 1 else words)
    output = runs.finish(process)
    assert process.returncode == 0, output
    assert runs.logs(tmp_path, "b-repeated") == runs.logs(tmp_path, "b")


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_drawn_follows_from_the_order(tmp_path, load, name):
    runs.run(tmp_path, "a", **{**SMALL, **SETTINGS[name]})
    check_repetition(tmp_path, "a")
    bytes_of_unrolls = 12 * sum(who % 2 for who, _ in events(tmp_path, "a"))
    size = (tmp_path / "a" / "record.0").stat().st_size
    assert bytes_of_unrolls < size < bytes_of_unrolls + 20_000


def test_a_run_that_was_killed_and_resumed(tmp_path):
    """Three starts: the first is killed, the second is stopped, the third finishes."""
    flags = {**SMALL, "checkpoint_interval": 0.3, "total_steps": 8_000}
    for number, rows in (signal.SIGKILL, 60), (signal.SIGTERM, 120):
        process = runs.start(tmp_path, "a", **flags)
        runs.wait_for_rows(process, tmp_path, "a", rows)
        while not (tmp_path / "a" / "model.tar").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        runs.finish(process)
    # As a power failure leaves it: the last event is not complete.
    torn = tmp_path / "a" / "record.0"
    torn.write_bytes(torn.read_bytes() + b"\1\2\3")
    runs.run(tmp_path, "a", **flags)
    assert len(record.records_of(tmp_path / "a")) == 3
    meta = json.loads((tmp_path / "a" / "meta.json").read_text())
    assert len(meta["resumed"]) == 2
    assert meta["first_step"] > 0
    output = repeat(tmp_path, "a")
    assert output.count("Equal to the recorded run") == 3
    assert runs.logs(tmp_path, "a-repeated") == runs.logs(tmp_path, "a")


def test_until_saves_the_checkpoint_of_that_moment(tmp_path):
    runs.run(tmp_path, "a", **{**SMALL, "checkpoint_history": 4})
    kept = sorted((tmp_path / "a").glob("model.[0-9]*.tar"))
    saved = torch.load(kept[0], weights_only=True)
    step = saved["stats"]["step"]
    assert 0 < step < SMALL["total_steps"]
    repeat(tmp_path, "a", until=step)
    again = torch.load(tmp_path / "a-repeated" / "model.tar", weights_only=True)
    assert again["stats"] == saved["stats"]
    for name, x in saved["model_state_dict"].items():
        assert torch.equal(x, again["model_state_dict"][name])
    (tmp_path / "b").mkdir()
    shutil.copytree(tmp_path / "a-repeated", tmp_path / "b" / "a-repeated")
    for savedir in tmp_path, tmp_path / "b":
        words = command(savedir, "a-repeated", str(tmp_path / "a"))
        assert "a-repeated exists: choose --xpid" in runs.run_words(words, status=1)
    assert "omit --serial" in runs.run_words([*words, "--serial"], status=1)


# --- Differences ---


def repeat_and_fail(savedir, xpid, **flags):
    return repeat(savedir, xpid, 1, **flags)


def test_an_environment_that_is_not_deterministic_is_named(tmp_path):
    runs.run(tmp_path, "a", **{**SMALL, "env": "test_record:Drifts"})
    output = repeat_and_fail(tmp_path, "a")
    assert "in steps 16 to 20 of actor" in output
    assert "Equal to" not in output
    assert "do not follow from their seeds and actions. No package has" in output


def test_other_packages_are_named(tmp_path):
    runs.run(tmp_path, "a", **SMALL)
    path = tmp_path / "a" / "record.0"
    header, _, data = path.read_bytes().partition(b"\n")
    version = json.loads(header)["about"]["torch"]
    path.write_bytes(header.replace(version.encode(), b"1.2.3") + b"\n" + data)
    output = check_repetition(tmp_path, "a")
    assert f"Changed since: torch 1.2.3 -> {version}" in output
    # The model of this one computes something else: the lower half of a checksum.
    first = next(i for i, (who, _) in enumerate(events(tmp_path, "a")) if who % 2)
    changed = bytearray(data)
    changed[record.EVENTS.itemsize * first + 2] ^= 1
    path.write_bytes(header.replace(version.encode(), b"1.2.3") + b"\n" + changed)
    words = command(tmp_path, "c", "a")
    output = runs.run_words(words, status=1)
    assert "in steps 1 to 5 of actor" in output
    assert "the model gave other outputs for the same observations" in output
    assert f"observations. Changed since: torch 1.2.3 -> {version}" in output


def test_a_learner_that_computes_something_else_is_named_by_its_first_row(tmp_path):
    """As if the last update had been another one, which no unroll shows."""
    runs.run(tmp_path, "a", **SMALL)
    path = tmp_path / "a" / "logs.csv"
    lines = path.read_text().splitlines()
    column = lines[0].split(",").index("grad_norm")
    cells = lines[-1].split(",")
    cells[column] = "0.5"
    path.write_text("\n".join([*lines[:-1], ",".join(cells), ""]))
    output = repeat_and_fail(tmp_path, "a")
    assert "logs.csv differs first at step 3000: grad_norm was 0.5" in output


# --- Failures ---


def test_a_failure_of_an_environment_comes_again(tmp_path):
    process = runs.start(tmp_path, "a", **{**SMALL, "env": "test_record:Breaks"})
    output = runs.finish(process)
    assert process.returncode == 1
    assert f"-m torchbeast.tools.repeat a --savedir {tmp_path}" in output
    output = repeat_and_fail(tmp_path, "a")
    assert "the 150th ball is flat" in output
    # Batches that wait when the environment fails are dropped.
    pairs = list(
        zip(runs.logs(tmp_path, "a-repeated"), runs.logs(tmp_path, "a"), strict=False)
    )
    assert len(pairs) > 20
    assert all(now == then for now, then in pairs)
    # A record that is shorter than logs.csv, whose failure would never come.
    path = tmp_path / "a" / "record.0"
    path.write_bytes(path.read_bytes()[: -12 * len(pairs)])
    output = runs.run_words(command(tmp_path, "c", "a"), status=1)
    assert "record.0 is damaged" in output
    assert "Equal to" not in output


@pytest.mark.parametrize(
    "more", [{"sync": True}, {"module": "torchbeast.polybeast", "batch_size": 3}]
)
def test_a_record_is_of_asynchronous_monobeast(tmp_path, more):
    output = runs.run(tmp_path, "a", **runs.SMALL | more, record=True, status=1)
    assert "--record is for MonoBeast without --sync" in output


def test_a_record_is_not_trusted_to_name_code(tmp_path):
    runs.run(tmp_path, "a", **{**SMALL, "total_steps": 600})
    path = tmp_path / "a" / "record.0"
    header, _, data = path.read_bytes().partition(b"\n")
    path.write_bytes(
        header.replace(b"CartPole-v1", b"test_record:Counts") + b"\n" + data
    )
    output = repeat_and_fail(tmp_path, "a")
    assert "UntrustedError" in output
    assert "test_record:Counts" in output


def test_a_disk_that_takes_a_part_of_an_event_ends_the_run(tmp_path):
    """If it went on, all later events would be read from the wrong place."""
    flags, learner = types.SimpleNamespace(as_dict=dict), types.SimpleNamespace(step=0)
    started = types.SimpleNamespace(start_unroll=lambda index, slots: 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        parts = {"flags": flags, "folder": tmp_path, "learner": learner, "stack": stack}
        recorder = record.Recorder(types.SimpleNamespace(**parts))
        actors = recorder.actors(started, {})
        size = (tmp_path / "record.0").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 15, before[1]))
        actors.start_unroll(0, [])
        actors.start_unroll(0, [])
        with pytest.raises(RunFileError, match=r"Cannot write .*record\.0"):
            actors.start_unroll(0, [])
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
