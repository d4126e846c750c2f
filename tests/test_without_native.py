"""PolyBeast's programs without the C++ part."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchbeast


@pytest.mark.timeout(120)
@pytest.mark.parametrize("program", ["polybeast", "polybeast_learner", "polybeast_env"])
def test_without_libtorchbeast_the_message_tells_all(program, tmp_path):
    # As setup.py leaves it where it can't be built.
    (tmp_path / "libtorchbeast.py").write_text(
        "raise ImportError('was left out; install gRPC', name='libtorchbeast')\n"
    )
    root = Path(torchbeast.__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-m", f"torchbeast.{program}", "--env", "CartPole-v1"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)]),
            "TORCHBEAST_NATIVE": "skip",  # don't build it
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert "was left out; install gRPC" in done.stderr
    assert "Traceback" not in done.stderr
