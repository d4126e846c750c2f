"""autotune: its layouts, its search, and the whole command."""

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs
from cpu_time import process_tree

from torchbeast.runs import flagset
from torchbeast.tools import autotune, trial, variants
from torchbeast.tools.autotune import Layout, choose, layouts


def load(variant):
    if variant == "polybeast":
        pytest.importorskip("libtorchbeast", exc_type=ImportError)
    return variants.load(variant)


def resolver(line, variant="monobeast"):
    script = load(variant)
    typed = flagset.read(script.make_parser(), shlex.split(line))

    def resolve(layout):
        flags = flagset.merge(typed)
        for name, value in (layout._asdict() if layout else {}).items():
            setattr(flags, name, value)
        return script.resolve_layout(flagset.resolve(flags)).freeze()

    return resolve


@pytest.mark.parametrize("cores", [1, 16])
@pytest.mark.parametrize(
    "line",
    ["--batch_size 6 --unroll_length 7", "--num_buffers 30", "--sync --batch_size 8"],
)
def test_all_layouts_are_allowed(line, cores):
    resolve = resolver(line)
    own = resolve(None)
    first, *others = layouts(resolve, cores)
    assert first == Layout(own.num_actors, own.envs_per_actor)
    assert 1 <= len(others) <= 4
    for layout in others:
        flags = resolve(layout)
        assert (flags.num_actors, flags.envs_per_actor) == layout
        assert layout.num_envs <= max(first.num_envs, 8 * own.batch_size)


def test_polybeast_gets_whole_streams_per_batch():
    for layout in layouts(resolver("--batch_size 24 --num_servers 1", "polybeast"), 4):
        large, small = sorted([24, layout.envs_per_actor])[::-1]
        assert large % small == 0


def test_typed_flags_stay():
    found = layouts(resolver("--num_actors 3"), 2)
    assert {x.num_actors for x in found} == {3}
    assert len(found) > 3
    assert layouts(resolver("--num_actors 3 --envs_per_actor 5"), 2) == [(3, 5)]


def test_the_choice_prefers_fewer_environments():
    assert choose({Layout(2, 8): 100.0, Layout(4, 8): 102.0}) == Layout(2, 8)
    assert choose({Layout(2, 8): 100.0, Layout(4, 8): 110.0}) == Layout(4, 8)


SMALL = "--env CartPole-v1 --batch_size 4 --unroll_length 5 --precision fp32"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", ["monobeast", "polybeast"])
def test_it_prints_flags_and_leaves_nothing(variant, tmp_path, capsys, monkeypatch):
    load(variant)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(trial, "START_SECONDS", 500.0)

    def few(resolve, cores):
        return layouts(resolve, cores)[:2]

    monkeypatch.setattr(autotune, "layouts", few)
    line = f"{SMALL} --num_actors 2 --savedir {tmp_path}/runs"
    line += f" --mirror {tmp_path}/copy --eval_interval 100 --tensorboard"
    assert autotune.tune(variant, shlex.split(line), 0.4) == 0
    out = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"--num_actors 2 --envs_per_actor \d+", out[-1])
    assert 0 < float(out[-3].split()[0].replace(",", "")) < 100_000
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "copy").exists()
    assert not list(tmp_path.glob("torchbeast-autotune-*"))


def test_the_runs_have_the_flags_of_the_command(monkeypatch, tmp_path, capsys):
    seen = []

    def spy(command, folder, seconds):
        assert command[:3] == [sys.executable, "-m", "torchbeast.monobeast"]
        seen.append(flagset.parse(load("monobeast").make_parser(), command[3:]))
        return 1000.0

    monkeypatch.setattr(autotune, "try_command", spy)
    line = f"--preset minatar --learning_rate 0.003 --wandb x --savedir {tmp_path}"
    line += f" --init_from y --mirror {tmp_path}/copy --metrics_port 1234"
    line += " --clip_ratio inf --replay_size 9000 --replay_ratio 1"
    assert autotune.tune("monobeast", shlex.split(line)) == 0
    assert len({(x.num_actors, x.envs_per_actor) for x in seen}) == len(seen) == 5
    for flags in seen:
        assert (flags.preset, flags.learning_rate) == ("minatar", 0.003)
        assert (flags.replay_size, flags.learn_start) == (9000, 0)
        assert flags.disable_checkpoint
        assert not any((flags.wandb, flags.init_from, flags.mirror, flags.metrics_port))
    assert capsys.readouterr().out.count("1,000 ") == len(seen)


@pytest.mark.timeout(400)
def test_a_fault_of_the_environment_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", runs.environment()["PYTHONPATH"])
    monkeypatch.setenv("FAULT_FILE", str(tmp_path / "fault"))
    (tmp_path / "fault").write_text("raise_error")
    line = "--env faulty:Environment --num_actors 1"
    with pytest.raises(trial.TrialError, match="the ball left the table"):
        autotune.tune("monobeast", shlex.split(line), 0.4)


@runs.needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_all_processes(number, tmp_path):
    words = [sys.executable, "-m", "torchbeast.tools.autotune", "monobeast"]
    process = subprocess.Popen(
        [*words, *shlex.split(SMALL)],
        env={**runs.environment(), "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    tree = {}
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("torchbeast-autotune-*/run/logs.csv")):
        tree |= process_tree(process.pid)
        assert time.monotonic() < deadline
        time.sleep(0.1)
    tree |= process_tree(process.pid)
    assert len(tree) > 3
    process.send_signal(number)
    _, errors = process.communicate(timeout=runs.patience(60))
    if number == signal.SIGINT:
        assert process.returncode == 128 + number, errors
        assert b"Traceback" not in errors
        assert not list(tmp_path.glob("torchbeast-autotune-*"))
    deadline = time.monotonic() + 40
    while alive := [pid for pid in tree if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)
