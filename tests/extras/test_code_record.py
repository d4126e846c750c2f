"""The code and the machine of a run: meta.json, code.patch and sources/."""

import json
import os
import shutil
import subprocess

import pytest
import runs
import torch
from test_files import read_meta, run_python
from test_flags import resolve

from torchbeast.extras.code import differences


def make_checkout(folder):
    """Makes a repository with a copy of the package; returns a function to run git."""
    source = runs.ROOT / "torchbeast"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, folder / "torchbeast", ignore=ignored)
    (folder / "README").write_text("one\n")

    def git(*arguments):
        who = ["-c", "user.name=N", "-c", "user.email=n@example.com"]
        command = ["git", "-C", str(folder), *who, *arguments]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        return result.stdout.strip()

    git("init", "--quiet")
    return git


RECORD = """
import json, pathlib, sys
checkout, folder, *parts = sys.argv[1:]
sys.path[:0] = [checkout, *parts]
from torchbeast.extras import code as code_record
from torchbeast.flags import Flags
assert code_record.__file__.startswith(checkout), code_record.__file__
flags = Flags(env="mine.games:Game", wrapper="numpy:two, wraps:one")
about = code_record.Code(pathlib.Path(folder), flags).about()
names = {k: about[k] for k in ("code_patch", "sources")}
loaded = {"mine", "wraps", "torch"} & sys.modules.keys()
print(json.dumps([names, sorted(loaded)]))
"""


def record(*folders):
    result = run_python(RECORD, *folders)
    assert result.returncode == 0, result.stderr
    names, loaded = json.loads(result.stdout)
    assert not loaded, "to record a module does not import it"
    return names, result.stderr


@pytest.fixture
def checkout(tmp_path):
    """A repository with a copy of the package and one commit."""
    run_git = make_checkout(tmp_path / "checkout")
    (tmp_path / "checkout" / ".gitignore").write_text("ignored.py\n__pycache__\n")
    (tmp_path / "checkout" / "windows.py").write_bytes(b"x = 1\r\ny = 2\r\n")
    run_git("add", ".")
    run_git("commit", "--quiet", "-m", "first")
    (tmp_path / "run").mkdir()
    return tmp_path / "checkout"


def change(folder):
    core = folder / "torchbeast" / "base"
    with (core / "seeds.py").open("a") as file:
        file.write("# a change, not UTF-8: ")
    with (core / "seeds.py").open("ab") as file:
        file.write(b"\xff")
    (core / "nested.py").unlink()
    (core / "my_loss.py").write_text("new = True\n")
    (core / "empty.py").touch()
    (folder / "windows.py").write_bytes(b"x = 1\r\ny = 33\r\n")
    (folder / "picture").write_bytes(bytes(range(256)))
    (folder / "ignored.py").write_text("ignored = True\n")
    (folder / "venv" / "lib" / "site-packages").mkdir(parents=True)
    (folder / "venv" / "lib" / "site-packages" / "big.py").write_text("installed")


def files(folder):
    found = (p for p in folder.rglob("*") if p.is_file() and ".git/" not in str(p))
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in found
        if "__pycache__" not in str(p)
    }


def test_the_patch_restores_the_code(checkout, tmp_path):
    shutil.copytree(checkout, tmp_path / "clean")
    config = checkout / ".git" / "config"  # of a user with wishes of their own
    config.write_text(
        config.read_text() + "[color]\nui = always\n[diff]\nnoprefix = true\n"
        "external = false\n[core]\nautocrlf = false\n"
    )
    assert record(checkout, tmp_path / "run")[0]["code_patch"] is None
    assert not list((tmp_path / "run").iterdir())
    change(checkout)
    before = (checkout / ".git" / "index").read_bytes()
    assert record(checkout, tmp_path / "run")[0]["code_patch"] == "code.patch"
    assert (checkout / ".git" / "index").read_bytes() == before
    patch = tmp_path / "run" / "code.patch"
    command = ["git", "-C", str(tmp_path / "clean"), "apply", str(patch)]
    subprocess.run(command, check=True, timeout=runs.patience(60))
    left_out = {"picture", "ignored.py", "venv/lib/site-packages/big.py"}
    expected = {k: x for k, x in files(checkout).items() if k not in left_out}
    assert files(tmp_path / "clean") == expected


def test_the_sources_of_environments_and_wrappers(checkout, tmp_path):
    parts = tmp_path / "parts"
    (parts / "mine").mkdir(parents=True)
    (parts / "mine" / "games.py").write_text("import json, used\nfrom . import more\n")
    (parts / "mine" / "more.py").write_text("this is no Python")
    (parts / "used.py").write_text("from torchbeast.base import seeds\nimport mine\n")
    (parts / "unused.py").touch()
    (parts / "wraps.py").touch()
    (parts / "mine" / "folder.py").mkdir()  # what can't be read costs itself alone
    names, _ = record(checkout, tmp_path / "run", parts)
    assert names == {"code_patch": None, "sources": "sources"}
    expected = {k: x for k, x in files(parts).items() if k != "unused.py"}
    assert files(tmp_path / "run" / "sources") == expected


def test_a_resumed_run_keeps_both(tmp_path, monkeypatch):
    parts = tmp_path / "parts"
    parts.mkdir()
    paths = [str(parts), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    code = "import faulty\nclass Game(faulty.Environment):\n    pass\n"
    (parts / "mine.py").write_text(code)
    flags = {**runs.SMALL, "env": "mine:Game"}
    runs.run(tmp_path, "a", **{**flags, "total_steps": 20})
    runs.run(tmp_path, "a", total_steps=40)
    (parts / "mine.py").write_text(code + "# changed\n")
    runs.run(tmp_path, "a", total_steps=60)
    folder = tmp_path / "a"
    assert (folder / "sources" / "mine.py").read_text() == code
    assert (folder / "sources.2" / "mine.py").read_text() == code + "# changed\n"
    meta = read_meta(folder)
    assert meta["sources"] == "sources.2"
    assert meta["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert meta["hardware"]["cpus"] == len(os.sched_getaffinity(0))


def test_what_differs_from_the_preset():
    line = "--preset minatar --entropy_cost 0.05 --env MinAtar/Freeway-v1 --seed 3"
    changes = {"entropy_cost": 0.05, "env": "MinAtar/Freeway-v1"}
    assert differences(resolve(line).as_dict()) == changes
    assert differences(resolve("--seed 3").as_dict()) == {}


GIT_STATE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from torchbeast.extras import code
assert code.__file__.startswith(sys.argv[1]), code.__file__
assert "torch" not in sys.modules
print(json.dumps(code.provenance()["git"]))
"""


def test_git_state(tmp_path, monkeypatch):
    def state():
        result = run_python(GIT_STATE, tmp_path)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    git = make_checkout(tmp_path)
    assert state() is None  # The module is not part of the repository.
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert state() == {"commit": commit, "dirty": False}
    (tmp_path / "README").write_text("two\n")
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as in a hook of another repository
    monkeypatch.setenv("GIT_WORK_TREE", "/")
    assert state() == {"commit": commit, "dirty": True}
