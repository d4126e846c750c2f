"""The key that signs the flags of a run."""

import logging
import os
import subprocess
import sys

import pytest
import runs

from torchbeast.runs import trust

FLAGS = {"env": "a:B", "env_kwargs": None, "seed": 3, "clip_ratio": float("inf")}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A new user's folder for configurations, which does not exist yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


def test_a_signature_covers_every_text(config):
    signature = trust.sign(FLAGS)
    assert trust.is_signed(FLAGS, signature)
    assert trust.is_signed({**FLAGS, "seed": 4, "clip_ratio": "inf"}, signature)
    for change in (
        {"env": "a:C"},
        {"wrapper": "a:b"},
        {"insecure": True},
        {"env_kwargs": {}},
    ):
        assert not trust.is_signed({**FLAGS, **change}, signature)
    for wrong in (None, "", 3, signature[:-1], "é"):
        assert not trust.is_signed(FLAGS, wrong)


def test_the_key_is_private(config):
    trust.sign(FLAGS)
    folder = config / "torchbeast"
    assert [path.name for path in folder.iterdir()] == ["key"]
    key = folder / "key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(key.read_bytes()) == 32


def test_it_is_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CONFIG_HOME", value)
        assert trust.key_path() == f"{tmp_path}/.config/torchbeast/key"


def test_processes_that_start_at_once_have_one_key(config):
    code = "from torchbeast.runs import trust; input(); print(trust.sign({'env': 'a'}))"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    words = [sys.executable, "-c", code]
    started = [
        subprocess.Popen(words, env=runs.environment(), **pipes) for _ in range(4)
    ]
    for process in started:  # all have imported the module, or will soon
        process.stdin.write("\n")
        process.stdin.flush()
    found = {process.communicate(timeout=runs.patience(60))[0] for process in started}
    assert found == {trust.sign({"env": "a"}) + "\n"}


@pytest.mark.parametrize("damage", ["short", "public", "lost"])
def test_a_key_that_can_not_be_used(config, caplog, damage):
    signature = trust.sign(FLAGS)
    key = config / "torchbeast" / "key"
    if damage == "short":
        key.write_bytes(b"")
    elif damage == "public":
        key.chmod(0o644)
    else:
        key.unlink()
    assert not trust.is_signed(FLAGS, signature)
    assert key.exists() == (damage != "lost"), "to read a file makes no key"
    if damage != "lost":
        with caplog.at_level(logging.WARNING):
            assert trust.sign(FLAGS) is None
        assert str(key) in caplog.text


def test_a_run_without_a_key_goes_on(tmp_path, monkeypatch):
    runs.forking()  # outside of what follows
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/nobody")
    flags = {**runs.SMALL, "env": "faulty:Environment", "total_steps": 20}
    output = runs.run(tmp_path, "a", **flags)
    assert output.count("can't be signed with /proc/nobody/torchbeast/key") == 1
    output = runs.run(tmp_path, "a", total_steps=40, status=1)
    assert "add --trust_checkpoint_env" in output
    output = runs.run(tmp_path, "a", total_steps=40, env="faulty:Environment")
    assert "Finished at step 40" in output
    assert not os.path.exists("/proc/nobody")
