"""Optional parts can be deleted: a copy of the package without them trains CartPole."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import runs

import torchbeast
from torchbeast.runs.files import read_meta

PACKAGE = Path(torchbeast.__path__[0])
PARTS = sorted(
    str(path.relative_to(PACKAGE))
    for folder in ("extras", "extras/envs")
    for path in (PACKAGE / folder).iterdir()
    if path.stem[:2] != "__"
)
FLAGS = ["--env=CartPole-v1", "--total_steps=200", "--batch_size=2"]
FLAGS += ["--unroll_length=10", "--precision=fp32"]
# Python imports its packages once, and forks for each part.
EACH = """
import os, sys, traceback
from pathlib import Path
import gymnasium, numpy, torch
root, parts, flags = Path(sys.argv[1]), sys.argv[2].split(), sys.argv[3:]
for part in parts:
    (root / "torchbeast" / part).rename(root / "away")
    if not os.fork():
        sys.path.insert(0, str(root))
        status = 1
        try:
            from torchbeast import monobeast
            if part == "extras/serial.py":
                flags.remove("--serial")
            status = monobeast.main([*flags, f"--xpid={part.replace('/', '.')}"])
            ours = [x for name, x in sys.modules.items() if name[:10] == "torchbeast"]
            assert all(x.__file__.startswith(str(root)) for x in ours)
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    _, status = os.wait()
    (root / "away").rename(root / "torchbeast" / part)
    print("WITHOUT", part, status, flush=True)
"""


@pytest.fixture
def copy(tmp_path):
    caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "torchbeast", ignore=caches)
    # An editable installation would find what the copy lacks.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "sys.meta_path = [x for x in sys.meta_path if 'editable' not in x.__module__]\n"
    )
    return tmp_path


def run(copy, *words):
    return subprocess.run(
        [sys.executable, *words, *FLAGS, f"--savedir={copy}/runs"],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=runs.patience(250),
    )


def test_each_part_can_be_deleted(copy):
    done = run(copy, "-c", EACH, str(copy), " ".join(PARTS), "--serial")
    failed = [x for x in PARTS if f"WITHOUT {x} 0\n" not in done.stdout]
    assert not failed, done.stdout[-5000:]
    for part in PARTS:
        assert read_meta(copy / "runs" / part.replace("/", "."))["successful"]


def test_all_optional_folders_can_be_deleted(copy):
    for folder in ("extras", "polybeast", "tools"):
        shutil.rmtree(copy / "torchbeast" / folder)
    done = run(copy, "-m", "torchbeast.monobeast", "--num_actors=1", "--xpid=core")
    assert done.returncode == 0, done.stdout[-5000:]
    assert read_meta(copy / "runs" / "core")["successful"]
    done = run(copy, "-m", "torchbeast.monobeast", "--mode=test", "--xpid=core")
    assert "FlagError: --mode test needs extras/play, now deleted" in done.stdout
    assert done.returncode == 1
