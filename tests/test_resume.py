"""How a run starts in an existing folder, with and without a checkpoint.

MonoBeast's main() runs in this process and ends before it starts actors.
"""

import contextlib
import functools
import importlib.util
import json
import logging
import pathlib
import shlex
import shutil

import pytest
import runs
import torch

from torchbeast import monobeast
from torchbeast.runs import flagset, start, trust
from torchbeast.runs.files import RunFolder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The savedir of a run of faulty:Environment, finished at step 20, saved twice."""
    savedir = tmp_path_factory.mktemp("finished")
    flags = {**runs.SMALL, "env": "faulty:Environment"}
    runs.run(savedir, "a", **{**flags, "total_steps": 20})
    path = savedir / "a" / "model.tar"
    shutil.copy(path, path.with_name("model.previous.tar"))
    return savedir


@pytest.fixture
def savedir(finished, tmp_path):
    """A copy of `finished`."""
    shutil.copytree(finished / "a", tmp_path / "a")
    return tmp_path


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def main(caplog):
    """A function that runs main() and returns its exit status and its log."""
    caplog.set_level(logging.INFO)

    def run_main(savedir, line):
        caplog.clear()
        argv = [*shlex.split(line), "--savedir", str(savedir)]
        status = monobeast.main(argv)
        return status, caplog.text

    return run_main


@pytest.fixture
def fails(main, caplog):
    """A function that runs main() and checks that it fails with one message.

    The run must stay unchanged. Returns the message.
    """

    def run_main(savedir, line):
        run = pathlib.Path(savedir, "a")
        before = content(run) if run.is_dir() else None
        status, text = main(savedir, line)
        assert status == 1
        errors = [x for x in caplog.records if x.levelno >= logging.ERROR]
        assert len(errors) == 1, text
        assert errors[0].exc_info is None, text
        if before is not None:
            assert content(run) == before
        return errors[0].getMessage()

    return run_main


# --- Checkpoints that can't be used ---


def test_a_checkpoint_that_makes_bad_weights_stays(savedir):
    """All numbers are finite, but no update can use them."""
    path = savedir / "a" / "model.tar"
    saved = torch.load(path, weights_only=True)
    saved["optimizer_state_dict"]["state"][0]["square"].fill_(-1)
    torch.save(saved, path)
    before = path.read_bytes()
    output = runs.run(savedir, "a", total_steps=40, status=1)
    assert "made weights that are not finite" in output
    assert path.read_bytes() == before


# --- Environments that a checkpoint names ---


def test_an_environment_that_a_checkpoint_names(
    savedir, fails, main, monkeypatch, tmp_path_factory
):
    status, text = main(savedir, "--xpid a --mode test")
    assert status == 0, "a run of one's own needs no flag"
    other_home = str(tmp_path_factory.mktemp("home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", other_home)  # another user
    path = savedir / "a" / "model.tar"
    for mode in ("--mode test", "--total_steps 40"):
        message = fails(savedir, f"--xpid a {mode}")
        assert f"{path} names --env faulty:Environment" in message
        assert "add --trust_checkpoint_env" in message
    for line in ("--trust_checkpoint_env", "--env faulty:Environment"):
        status, text = main(savedir, f"--xpid a --mode test {line}")
        assert status == 0, text
        assert "10 games: mean return" in text
    # What was allowed once is signed with this user's key.
    flags = {"total_steps": 40, "trust_checkpoint_env": True}
    runs.run(savedir, "a", **flags)
    runs.run(savedir, "a", total_steps=60)
    status, text = main(savedir, "--xpid a --mode test")
    assert status == 0, text


def test_what_a_changed_checkpoint_names_is_not_used(savedir, fails):
    path = savedir / "a" / "model.tar"
    original = torch.load(path, weights_only=True)
    mark = savedir / "mark"
    for changes, words in [
        (
            {"env": "os:mkdir", "env_kwargs": f'{{"path": "{mark}"}}'},
            f'--env os:mkdir --env_kwargs {{"path": "{mark}"}}',
        ),
        ({"wrapper": "shutil:rmtree"}, "--wrapper shutil:rmtree"),
        ({"env": "antigravity:CartPole-v1"}, "--env antigravity:CartPole-v1"),
        ({"env_kwargs": '{"a": 1}'}, '--env_kwargs {"a": 1}'),
    ]:
        torch.save(original | {"flags": original["flags"] | changes}, path)
        for line in ("--mode test", "--total_steps 40"):
            assert words in fails(savedir, f"--xpid a {line}")
    for changes in ({"replay_file": str(mark)}, {"wandb": "theirs"}):
        changes = {"env": "CartPole-v1", **changes}
        torch.save(original | {"flags": original["flags"] | changes}, path)
        name, value = list(changes.items())[-1]
        message = fails(savedir, "--xpid a --total_steps 40")
        assert f"{path} names --{name} {value}, which may run code" in message
        typed = flagset.read(monobeast.make_parser(), ["--mode=test"])
        tested = flagset.merge(typed, {"flags": original["flags"] | changes})
        assert getattr(tested, name) is None, "a test does not need it"
    assert not mark.exists()


# --- Folders ---


def test_a_run_that_is_at_its_end_says_so(savedir, main):
    before = content(savedir / "a")
    status, text = main(savedir, "--xpid a")
    assert status == 0
    assert "is at step 20 of --total_steps 20 already" in text
    assert "Finished" not in text
    assert content(savedir / "a") == before


def test_a_run_that_was_killed_at_its_end(savedir, main):
    """Only the end of meta.json is missing; a start without an update writes it."""
    path = savedir / "a" / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps(meta | {"successful": False, "date_end": None}))
    before = content(savedir / "a")
    assert main(savedir, "--xpid a")[0] == 0
    found = json.loads(path.read_text())
    assert (found["successful"], found["last_step"]) == (True, 20)
    assert found["args"]["env"] == meta["args"]["env"]
    after = content(savedir / "a")
    changed = [name for name in after if after[name] != before[name]]
    assert changed == ["meta.json", "out.log"]
    main(savedir, "--xpid a")
    assert content(savedir / "a") == after


def test_the_folder_is_locked_before_the_checkpoint_is_read(savedir, fails):
    (savedir / "a" / "model.tar").write_text("half of one")
    with contextlib.closing(RunFolder(str(savedir), "a")):
        message = fails(savedir, "--xpid a --total_steps 40")
    assert "Another process writes to this run" in message
    message = fails(savedir, "--xpid a --total_steps 40")
    assert "Cannot load the checkpoint" in message


def test_a_run_without_its_checkpoint(savedir, fails):
    """Only a run that died before its first checkpoint may start over."""
    path = savedir / "a" / "model.tar"
    message = fails(savedir, "--xpid a --total_steps 40 --disable_checkpoint")
    assert "or --disable_checkpoint forbids it" in message
    path.unlink()
    message = fails(savedir, "--xpid a --total_steps 40")
    assert f"copy {path.with_name('model.previous.tar')} to model.tar" in message
    path.with_name("model.previous.tar").unlink()
    message = fails(savedir, "--xpid a --total_steps 40")
    assert "there is no model.tar to resume from" in message
    assert "There is no model.previous.tar to go on from" in message


@pytest.mark.parametrize("learned", [False, True])
def test_a_run_that_was_killed_starts_over_with_its_flags(
    savedir, main, fails, learned
):
    """It does not train the default --env in the folder of another game."""
    for name in ("model.tar", "model.previous.tar"):
        (savedir / "a" / name).unlink()
    path = savedir / "a" / "meta.json"
    meta = json.loads(path.read_text()) | {"successful": False}
    path.write_text(json.dumps(meta | {"flags_signature": None}))
    message = fails(savedir, "--xpid a --total_steps 40")
    assert f"{path} names --env faulty:Environment" in message
    path.write_text("{}")
    assert "there is no model.tar" in fails(savedir, "--xpid a --total_steps 40")
    path.write_text(json.dumps(meta))
    logs = savedir / "a" / "logs.csv"
    if not learned:
        logs.write_text(logs.read_text().partition("\n")[0] + "\n")
    assert main(savedir, "--xpid a --total_steps 40")[0] == 0
    found = json.loads(path.read_text())
    free = {"savedir": str(savedir), "total_steps": 40}
    assert found["args"] == meta["args"] | free
    rows = runs.read_logs(savedir, "a")
    assert [row["_tick"] for row in rows] == [str(i) for i in range(len(rows))]
    assert rows[-1]["step"] == "40"


# --- On another machine, by another script ---


def flags_of(savedir, script, line):
    """The flags of a start that goes on to step 40."""
    words = ["--savedir", str(savedir), "--xpid", "a", "--total_steps", "40"]
    typed = flagset.read(script.make_parser(), [*words, *shlex.split(line)])
    with start.begin(typed, script.resolve_layout) as found:
        return found.flags


@pytest.mark.parametrize("sync", [False, True])
def test_what_was_left_open_is_chosen_again_except_with_sync(savedir, sync):
    """Numbers of threads change rounding."""
    path = savedir / "a" / "model.tar"
    saved = torch.load(path, weights_only=True)
    saved["flags"] |= {"sync": sync, "torch_threads": 77, "num_buffers": 6}
    torch.save(saved | {"flags_left_open": ["torch_threads"], "actors": [1]}, path)
    assert (flags_of(savedir, monobeast, "").torch_threads == 77) == sync


def test_the_way_to_the_environments_never_refuses_a_resume(savedir, monkeypatch):
    """A run of one script is resumed by another, on a machine with other servers."""
    pytest.importorskip("libtorchbeast", exc_type=ImportError)
    from torchbeast.polybeast import learner as polybeast_learner
    from torchbeast.polybeast import start as polybeast

    path = savedir / "a" / "model.tar"
    saved = torch.load(path, weights_only=True)
    saved["flags"] |= {"listen": "0.0.0.0:5000", "insecure": True, "num_servers": 7}
    saved["flags_left_open"] += ["num_servers"]
    saved["flags_signature"] = trust.sign(saved["flags"])
    torch.save(saved, path)

    begin = functools.partial(flags_of, savedir)
    monkeypatch.setattr(polybeast, "num_cpus", lambda: 2)
    flags = begin(polybeast, "")
    assert (flags.listen, flags.num_servers, flags.num_actors) == (None, 2, 2)
    assert flags.env == "faulty:Environment"
    if importlib.util.find_spec("ray"):
        assert begin(polybeast, "--launcher ray").listen == "0.0.0.0:5000"
    flags = begin(polybeast_learner, "")
    assert (flags.listen, flags.insecure) == ("0.0.0.0:5000", True)
    flags = begin(polybeast_learner, "--server_addresses a:1,b:2 --no-insecure")
    assert (flags.listen, flags.server_addresses) == (None, "a:1,b:2")
    assert flags.insecure is False
    assert begin(monobeast, "").num_buffers == saved["flags"]["num_buffers"]
    saved["flags"]["envs_per_actor"] = None  # polybeast_learner's
    saved["flags_signature"] = trust.sign(saved["flags"])
    torch.save(saved, path)
    assert begin(polybeast, "").envs_per_actor == 8  # its default
