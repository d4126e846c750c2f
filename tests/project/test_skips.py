"""A skip that the list does not have makes the tests fail; an expected one does not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import runs

TESTS = Path(__file__).parents[1]
ONE = """
import pytest
def test_passes(): pass
def test_needs(): pytest.skip("needs a display")
@pytest.mark.xfail(reason="not yet")
def test_fails(): assert False
"""
WHOLE_FILE = "import pytest\npytest.importorskip('no_such_package')\n"
EXPECTED = """
# a comment
test_one.py::test_needs | no display there
test_file.py | no such package
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "test_one.py").write_text(ONE)
    (tmp_path / "test_file.py").write_text(WHOLE_FILE)

    def run(expected, *arguments):
        (tmp_path / "expected.txt").write_text(expected)
        return subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-p", "skips"),
                *("-c", "/dev/null", "--rootdir", str(tmp_path), *arguments),
                str(tmp_path),
            ],
            cwd=tmp_path,
            env={
                **{k: v for k, v in os.environ.items() if "PYTEST" not in k},
                "PYTHONPATH": str(TESTS),
                "TORCHBEAST_EXPECTED_SKIPS": "expected.txt",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=runs.patience(100),
        )

    return run


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_a_skip_that_is_not_expected_fails(run, workers):
    if workers:
        pytest.importorskip("xdist")
    done = run("", *workers)
    assert done.returncode == 7, done.stdout
    assert "UNEXPECTED SKIP test_one.py::test_needs: Skipped: needs a" in done.stdout
    assert "UNEXPECTED SKIP test_file.py: " in done.stdout
    assert "no_such_package" in done.stdout
    assert "test_fails: " not in done.stdout  # it was run
    done = run(EXPECTED, *workers)
    assert done.returncode == 0, done.stdout
    assert "UNEXPECTED" not in done.stdout
