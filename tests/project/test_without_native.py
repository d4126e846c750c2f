"""PolyBeast's programs without the C++ part."""

import os
import subprocess
import sys
from pathlib import Path

import runs

import torchbeast


def environment_without(folder: Path) -> dict[str, str]:
    """As setup.py leaves it where libtorchbeast can't be built."""
    (folder / "libtorchbeast.py").write_text(
        "raise ImportError('was left out; install gRPC', name='libtorchbeast')\n"
    )
    root = Path(torchbeast.__file__).resolve().parent.parent
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(root)]),
        "TORCHBEAST_NATIVE": "skip",  # don't build it
    }


def test_without_libtorchbeast_the_other_tests_can_run(tmp_path):
    words = ["pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", *words, str(Path(__file__).parents[1])],
        env=environment_without(tmp_path),
        capture_output=True,
        text=True,
        timeout=runs.patience(200),
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "test_monobeast.py::test_run_files" in done.stdout
    assert "test_polybeast.py" not in done.stdout
