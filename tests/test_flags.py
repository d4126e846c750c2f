import ast
import contextlib
import pickle
import re
import shlex
import typing
from pathlib import Path

import pytest
import torch

import torchbeast
from torchbeast import monobeast
from torchbeast.base import devices, parts
from torchbeast.base.errors import FlagError
from torchbeast.flags import GROUPS
from torchbeast.presets import PRESETS
from torchbeast.runs import flagset, start
from torchbeast.runs.flagset import preset_flags

# The command line that users copy from TorchBeast's README.
OLD_COMMAND_LINE = """
    --env PongNoFrameskip-v4 --num_actors 45 --total_steps 30000000
    --learning_rate 0.0004 --epsilon 0.01 --entropy_cost 0.01 --batch_size 4
    --unroll_length 80 --num_buffers 60 --num_threads 4 --xpid example
"""


def parse(command_line="", saved=None):
    typed = flagset.read(monobeast.make_parser(), shlex.split(command_line))
    return flagset.merge(typed, saved and {"flags": saved})


def resolve(command_line=""):
    return monobeast.resolve_layout(flagset.resolve(parse(command_line)))


def actions(make_parser=monobeast.make_parser):
    """The declared flags by name."""
    return make_parser().declared


# --- Precedence ---


def test_command_line_then_preset_then_default():
    assert "total_steps" in PRESETS["classic-control"]
    assert parse().batch_size == monobeast.make_parser().declared["batch_size"].default
    assert parse("--preset minatar").batch_size == PRESETS["minatar"]["batch_size"]
    for line in ("--preset minatar --batch_size 5", "--batch_size=5 --preset=minatar"):
        flags = parse(line)
        assert flags.batch_size == 5
        assert flags.learning_rate == PRESETS["minatar"]["learning_rate"]
        assert flags.preset == "minatar"


def test_a_checkpoint_stands_between_command_line_and_preset():
    saved = {"preset": "minatar", "batch_size": 6, "unroll_length": 9, "old": 1}
    for line in ("--unroll_length 7", "--preset minatar --unroll_length 7"):
        flags = parse(line, saved=saved)
        assert flags.preset == "minatar"
        assert flags.batch_size == 6
        assert flags.unroll_length == 7
        assert flags.learning_rate == PRESETS["minatar"]["learning_rate"]
        assert "old" not in flags.as_dict()


def test_another_preset_counts_as_typed():
    saved = {"preset": "minatar", "batch_size": 6, "unroll_length": 9, "seed": 7}
    flags = parse("--preset classic-control --unroll_length 7", saved=saved)
    assert flags.batch_size == PRESETS["classic-control"]["batch_size"]
    assert flags.env == PRESETS["classic-control"]["env"]
    assert (flags.unroll_length, flags.seed) == (7, 7)
    every = preset_flags("classic-control").keys()
    assert flags.typed == {"preset", "unroll_length"} | every


def test_which_flags_were_typed():
    default = monobeast.make_parser().declared["batch_size"].default
    assert parse().typed == frozenset()
    flags = parse(f"--num_threads 1 --batch_size={default} --no-life_loss --sync")
    assert flags.typed == {"num_learner_threads", "batch_size", "life_loss", "sync"}
    assert pickle.loads(pickle.dumps(flags.freeze())).typed == flags.typed
    assert flags.replace(seed=3).typed == flags.typed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("batch_size", "six"), ("batch_size", True), ("learning_rate", [1.0])),
        *(("env", [5]), ("model", "none"), ("life_loss", 1), ("env_kwargs", 5)),
    ],
)
def test_a_checkpoint_with_a_flag_of_a_wrong_type(name, value):
    with pytest.raises(FlagError, match=f"flag {name} is ") as error:
        parse(saved={name: value})
    assert repr(value) in str(error.value)


# --- Presets and command lines ---


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_parses_and_resolves(preset):
    declared = actions()
    flags = resolve(f"--preset {preset}").freeze()
    for name, value in PRESETS[preset].items():
        assert getattr(flags, name) == value
        assert declared[name].from_file(value) == value, name


def test_the_old_command_line_still_runs():
    flags = resolve(OLD_COMMAND_LINE)
    words = shlex.split(OLD_COMMAND_LINE)
    given = dict(zip(words[::2], words[1::2], strict=True))
    given["--num_learner_threads"] = given.pop("--num_threads")
    for name, value in given.items():
        assert str(getattr(flags, name[2:])) == value
    # 45 actors with several environments each would need more than 60 slots.
    assert flags.envs_per_actor == 1


def test_names_of_the_outside_surface():
    names = """
        env mode xpid savedir disable_checkpoint num_actors total_steps batch_size
        unroll_length num_learner_threads disable_cuda use_lstm entropy_cost
        baseline_cost discounting reward_clipping learning_rate alpha momentum epsilon
        grad_norm_clipping num_buffers envs_per_actor model seed precision preset
        atari_backend sync tensorboard
    """
    assert set(names.split()) <= actions().keys()
    assert parse("--envs python").atari_backend == "python"
    assert parse("--use_resnet").model == "deep"


def test_the_help_text(capsys):
    """A per cent sign in a help text makes argparse fail only here."""
    texts = []
    for words in ("--help", "--help all"):
        with pytest.raises(SystemExit, match="0"):
            parse(words)
        texts.append(capsys.readouterr().out)
    short, whole = texts
    assert all(f"--{name}" in whole for name in actions())
    assert "--momentum" not in short
    assert short.count("\n") < 50
    commands = re.findall(r"^  .* (--\w.*)$", short.partition("examples:")[2], re.M)
    assert len(commands) == 3
    assert all(parse(command) for command in commands)


def test_a_mistyped_flag(capsys):
    for word, hint in (
        ("--lerning_rate=1", "--learning_rate"),
        ("--no_sync", "--no-sync"),
    ):
        with pytest.raises(SystemExit, match="2"):
            parse(f"{word} --seed 3")
        text = capsys.readouterr().err
        assert text.count("\n") == 2
        assert f"{hint}?" in text


# --- What is declared is read, what is read is declared ---


def flags_read():
    """Names read as flags.NAME or getattr(flags, "NAME", ...) in the package."""
    names = set()
    for path in Path(torchbeast.__path__[0]).rglob("*.py"):
        if path.name == "plot.py":  # it has flags of its own
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value  # flags.NAME or learner.flags.NAME
                if "flags" in (getattr(owner, "id", ""), getattr(owner, "attr", "")):
                    names.add(node.attr)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                owner, name = node.args[:2]
                if getattr(owner, "id", "") == "flags":
                    names.add(getattr(name, "value", None))
    return names - {None}


def test_every_flag_is_read():
    unread = {"config", "trust_checkpoint_env"}  # how to read the flags
    assert actions().keys() - flags_read() == unread


# --- Resolving ---


def test_a_run_without_a_name_gets_one(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))

    def begin(*words):
        typed = flagset.read(monobeast.make_parser(), words)
        with start.begin(typed, monobeast.resolve_layout) as begun:
            assert {"precision", "num_buffers"} <= {*begun.left_open}
            return begun.flags

    flags = begin()
    assert flags.savedir == str(tmp_path / "logs" / "torchbeast")
    assert re.fullmatch(r"torchbeast-\d{8}-\d{6}-[0-9a-f]{6}", flags.xpid)
    # A shell loop starts several runs in a second.
    assert len({begin().xpid for _ in range(3)}) == 3
    flags = begin("--xpid=a", f"--savedir={tmp_path}/b")
    assert (flags.xpid, flags.savedir) == ("a", f"{tmp_path}/b")


def test_resolving_fills_in_what_is_open():
    flags = resolve()
    assert flags.precision in ("fp32", "bf16")
    assert flags.num_buffers >= flags.num_actors * flags.envs_per_actor
    slots = "--batch_size 8 --envs_per_actor 16 --num_actors "
    assert [resolve(slots + A).num_buffers for A in "12"] == [16 + 8, 2 * 16 + 16]
    open_flags = {name for name, value in flags.as_dict().items() if value is None}
    # All whose type has no None are filled in, but the name of a run that is not begun.
    groups = (*GROUPS, *parts.groups())
    types = {k: x for g in groups for k, x in typing.get_type_hints(g).items()}
    assert {n for n in open_flags if type(None) not in typing.get_args(types[n])} == {
        "xpid"
    }


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(("A", "B"), [(1, 4), (2, 1), (2, 2), (2, 4), (2, 8), (4, 8)])
def test_the_environments_fit_the_slots(A, B, sync):
    # Numbers of slots with which a run is possible need no --envs_per_actor.
    def works(line):
        with contextlib.suppress(FlagError):
            return bool(resolve(line + " --sync" * sync))

    for slots in range(1, 33):
        line = f"--num_actors {A} --batch_size {B} --num_buffers {slots}"
        layouts = (f"{line} --envs_per_actor {E}" for E in range(1, slots + 1))
        assert bool(works(line)) == any(map(works, layouts)), line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--total_steps 0", ["--total_steps", "at least 1", "got 0"]),
        ("--seed -1", ["--seed", "at least 0", "got -1"]),
        ("--momentum 1", ["--momentum", "in [0, 1)", "got 1"]),
        ("--learning_rate inf", ["--learning_rate", "finite", "got inf"]),
        ("--entropy_cost nan", ["--entropy_cost", "finite", "got nan"]),
        ("--alpha nan", ["--alpha", "[0, 1]", "got nan"]),
        (f"--seed {2**64}", ["--seed", f"below {2**64}", f"got {2**64}"]),
        (f"--total_steps {2**63}", [f"at most {2**63 - 1}", f"got {2**63}"]),
        ("--learn_start 7", ["--learn_start has no effect without --replay_ratio"]),
        ("--core a:B", ["--core has no effect without --use_lstm"]),
        ("--actor_timeout inf", ["--actor_timeout", "(0, 1e+06]", "got inf"]),
        (
            "--batch_size 4 --unroll_length 30 --total_steps 119",
            ["one batch has more steps than --total_steps"],
        ),
        ("--grad_norm_clipping 0", ["--grad_norm_clipping", "more than 0", "got 0"]),
        ("--num_threads 0", ["--num_learner_threads", "at least 1", "got 0"]),
        (
            "--num_actors 3 --envs_per_actor 2 --batch_size 4 --num_buffers 5",
            ["--num_buffers 5", "3 actors", "2 environments", "at least 6"],
        ),
        (
            "--num_actors 1 --envs_per_actor 2 --batch_size 7 --num_buffers 7",
            ["--num_buffers 7", "batch of 7", "at least 8"],
        ),
        (
            "--sync --num_actors 3 --envs_per_actor 3 --batch_size 2",
            ["--sync", "9 environments", "--batch_size", "got 2"],
        ),
        (
            "--batch_size 6 --updates_per_batch 4 --minibatches 4",
            ["--minibatches 4", "--batch_size 6"],
        ),
        (
            "--batch_size 6 --updates_per_batch 4 --minibatches 3",
            ["--updates_per_batch 4", "--minibatches 3"],
        ),
    ],
)
def test_values_that_cannot_work(line, words):
    with pytest.raises(FlagError) as error:
        resolve(line)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "line",
    [
        *("--seed 0", f"--seed {2**64 - 1}", "--noop_max 0"),
        *("--grad_norm_clipping inf", "--checkpoint_interval inf"),
        "--batch_size 4 --unroll_length 30 --total_steps 120",
        "--preset laser-atari --replay_ratio 0",
        "--replay_size 1000 --replay_ratio 0",
        "--preset laser-atari --replay_ratio 0 --replay_size 0",
    ],
)
def test_values_at_the_edge(line):
    resolve(line)


def machine_with(monkeypatch, count, kind="cuda"):
    """A machine with so many GPUs."""
    device = torch.device(kind) if count else None
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "current_accelerator", lambda **_: device)
    monkeypatch.setattr(accelerator, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("kind", "count", "line", "learner", "actor"),
    [
        ("cuda", 2, "", "cuda:0", "cuda:1"),
        ("cuda", 2, "--disable_cuda", "cpu", "cpu"),
        ("cuda", 2, "--learner_device cuda:1", "cuda:1", "cuda:1"),
        ("cuda", 1, "", "cuda:0", "cuda:0"),
        ("cuda", 0, "", "cpu", "cpu"),
        ("xpu", 1, "", "xpu:0", "xpu:0"),
        ("xpu", 1, "--learner_device xpu", "xpu", "xpu"),
        ("mps", 1, "", "cpu", "cpu"),
        ("mps", 1, "--learner_device mps", "mps", "mps"),
        ("cuda", 2, "--learner_device cuda:2", "there are 2 GPUs", ""),
        ("cuda", 2, "--learner_device meta", "meta: there are 2 GPUs of kind cuda", ""),
    ],
)
def test_devices(monkeypatch, kind, count, line, learner, actor):
    machine_with(monkeypatch, count, kind)
    flags = parse(line)
    if not actor:
        with pytest.raises(FlagError, match=learner):
            devices.learner_device(flags)
        return
    assert devices.learner_device(flags) == torch.device(learner)
    assert devices.actor_device(flags) == torch.device(actor)


def test_every_number_has_a_range():
    pytest.importorskip("libtorchbeast", exc_type=ImportError)
    from torchbeast.polybeast import start as polybeast

    declared = actions() | actions(polybeast.make_parser)
    for name, flag in declared.items():
        is_number = flag.converter in (int, float)
        assert is_number == (flag.range is not None), name


# --- Resuming ---


def test_changed_names_what_differs_and_is_not_free():
    saved = parse("--batch_size 5 --use_lstm").as_dict()
    free = "--savedir /b --checkpoint_interval 3 --greedy --actor_timeout 9 --mode test"
    now = parse(f"--batch_size 6 {free} --disable_checkpoint")
    changes = {"batch_size": (5, 6), "use_lstm": (True, False)}
    assert flagset.changed(saved, now) == changes
    assert flagset.changed(now.as_dict(), now) == {}
