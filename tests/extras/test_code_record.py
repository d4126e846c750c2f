"""code.patch and sources/: the code of a run, beside its meta.json."""

import json
import os
import shutil
import subprocess

import pytest
import runs
from test_files import make_checkout, read_meta, run_python

RECORD = """
import argparse, json, pathlib, sys
checkout, folder, *parts = sys.argv[1:]
sys.path[:0] = [checkout, *parts]
from torchbeast.extras import code as code_record
assert code_record.__file__.startswith(checkout), code_record.__file__
flags = argparse.Namespace(env="mine.games:Game", wrapper="numpy:two, wraps:one")
names = code_record.Code(pathlib.Path(folder), flags).about()
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
    assert read_meta(folder)["sources"] == "sources.2"
