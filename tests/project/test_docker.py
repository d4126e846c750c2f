"""The Dockerfile, as far as it can be checked without Docker.

scripts/bare_system_trial carries it out whole (docs/bare_system_trial.md).
"""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def docker(monkeypatch):
    """scripts/try_dockerfile.py"""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import try_dockerfile

    yield try_dockerfile
    del sys.modules["try_dockerfile"]


def test_copies_what_is_there_and_what_the_build_reads(docker):
    build, _, _ = docker.parse((ROOT / "Dockerfile").read_text())
    copied = set()
    for name, rest in build.instructions:
        if name != "COPY":
            continue
        origin, sources, destination = docker.copies(rest)
        assert not origin
        for source in sources:
            assert (ROOT / source).exists(), source
            if (ROOT / source).is_dir():
                assert destination == f"{source}/"
        copied |= set(sources)
    setup_reads = {"setup.py", "pyproject.toml", "requirements.txt", "CMakeLists.txt"}
    assert setup_reads | {"torchbeast", "nest", "libtorchbeast"} <= copied

    # Docker gets exactly these files, and no build outputs.
    dockerignore = (ROOT / ".dockerignore").read_text()
    for path in ROOT.iterdir():
        assert docker.ignored(path.name, dockerignore) == (path.name not in copied)
