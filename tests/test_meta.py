"""meta.json: flags, preset, git, Slurm."""

import datetime
import json
import math
import os
import pathlib
import shutil
import subprocess

import torch
from test_file_writer import ARGS, FileWriter, names, read_meta, run_python

from torchbeast.runs import files
from torchbeast.runs.start import differences


def test_meta(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "swordfish")
    monkeypatch.setenv("SLURM_SECRET", "swordfish")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in files.SLURM_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    writer = FileWriter(str(tmp_path), "run", ARGS | {"savedir": tmp_path})
    meta = read_meta(writer.path)
    assert meta["args"] == ARGS | {"savedir": str(tmp_path)}
    assert meta["xpid"] == "run"
    assert meta["successful"] is False
    assert meta["date_end"] is None
    assert meta["resumed"] == []
    assert meta["slurm"] is None
    assert meta["env"]["OMP_NUM_THREADS"] == "1"
    assert set(meta["env"]) <= set(files.ENVIRONMENT_VARIABLES)
    assert meta["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    writer.close(exit_status=0)
    ended = read_meta(writer.path)
    [entry] = meta["starts"]
    end = {"successful": True, "date_end": ended["date_end"]}
    assert ended == meta | end | {"starts": [entry | end | {"exit_status": 0}]}
    assert entry["flags"] == meta["args"]
    assert (entry["first_step"], entry["date_start"]) == (0, meta["date_start"])
    for name in ("git", "slurm", "env", "versions", "hardware", "protocol", "preset"):
        assert entry[name] == meta[name]
    assert meta["hardware"]["cpus"] == len(os.sched_getaffinity(0))
    assert meta["hardware"]["memory_gib"] > 0.1
    start, end = (
        datetime.datetime.fromisoformat(ended[f"date_{n}"]) for n in ("start", "end")
    )
    assert before <= start <= end
    for name in names(writer.path):
        assert "swordfish" not in (writer.path / name).read_text()


def test_meta_has_preset_and_protocol(tmp_path):
    flags = {"preset": "minatar", "env": "MinAtar/Freeway-v1", "entropy_cost": 0.05}
    flags |= {"reward_clipping": "none"}
    about = {"preset_changes": differences(flags)}
    writer = FileWriter(str(tmp_path), "run", flags, about=about)
    writer.close(exit_status=0)
    meta = read_meta(writer.path)
    assert meta["preset"] == "minatar"
    changes = {"env": "MinAtar/Freeway-v1", "entropy_cost": 0.05}
    assert meta["preset_changes"] == changes
    assert meta["protocol"] == {
        "env": "MinAtar/Freeway-v1",
        "sticky_actions": 0.1,
        "full_action_space": False,
        "reward_clipping": "none",
    }
    assert meta["protocol_text"] == (
        "MinAtar/Freeway-v1, sticky actions 0.1, minimal action set, rewards not "
        "clipped"
    )


def test_meta_is_strict_json(tmp_path):
    """Infinity is not JSON, and --clip_ratio is infinite by default."""

    def refuse(constant):
        raise AssertionError(constant)

    writer = FileWriter(str(tmp_path), "run", {"clip_ratio": math.inf})
    writer.close(exit_status=0)
    text = (writer.path / "meta.json").read_text()
    assert json.loads(text, parse_constant=refuse)["args"]["clip_ratio"] == "inf"
    assert files.read_meta(writer.path)["args"]["clip_ratio"] == math.inf


def test_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1234")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    writer = FileWriter(str(tmp_path), "run", ARGS)
    writer.close(exit_status=0)
    slurm = read_meta(writer.path)["slurm"]
    assert slurm["SLURM_JOB_ID"] == "1234"
    assert slurm["SLURM_ARRAY_TASK_ID"] == "7"


def make_checkout(folder):
    """Makes a repository with a copy of the module; returns a function to run git."""
    source = pathlib.Path(files.__file__).parents[1]
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, folder / "torchbeast", ignore=ignored)
    (folder / "README").write_text("one\n")

    def run_git(*arguments):
        who = ["-c", "user.name=N", "-c", "user.email=n@example.com"]
        command = ["git", "-C", str(folder), *who, *arguments]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        return result.stdout.strip()

    run_git("init", "--quiet", "--initial-branch", "ideas")
    return run_git


GIT_STATE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from torchbeast.runs import files
assert files.__file__.startswith(sys.argv[1]), files.__file__
print(json.dumps(files._git_state()))
"""


def git_state(folder):
    result = run_python(GIT_STATE, folder)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_git_state(tmp_path):
    run_git = make_checkout(tmp_path)
    assert git_state(tmp_path) is None  # The module is not part of the repository.
    run_git("add", ".")
    assert git_state(tmp_path) is None  # No commit yet.
    run_git("commit", "--quiet", "-m", "first")
    commit = run_git("rev-parse", "HEAD")
    expected = {"commit": commit, "branch": "ideas", "dirty": False}
    assert git_state(tmp_path) == expected
    (tmp_path / "README").write_text("two\n")
    assert git_state(tmp_path) == expected | {"dirty": True}
    run_git("checkout", "--quiet", "--detach")
    assert git_state(tmp_path) == expected | {"dirty": True, "branch": None}


def test_no_torch_needed():
    code = "import sys, torchbeast.runs.files; print('torch' in sys.modules)"
    assert run_python(code).stdout.strip() == "False"
