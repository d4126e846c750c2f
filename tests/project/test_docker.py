"""The Dockerfile, as far as it can be checked without Docker.

scripts/bare_system_trial carries it out whole (docs/bare_system_trial.md).
"""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@pytest.fixture
def docker(monkeypatch):
    """scripts/try_dockerfile.py"""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import try_dockerfile

    yield try_dockerfile
    del sys.modules["try_dockerfile"]


@pytest.fixture
def stages(docker):
    build, environments, run = docker.parse(DOCKERFILE)
    return build, environments, run


def instructions(stage, word):
    return [rest for name, rest in stage.instructions if name == word]


def installed(stage):
    """Debian packages that a stage installs."""
    (command,) = (
        rest for rest in instructions(stage, "RUN") if "apt-get install" in rest
    )
    words = command.partition("--no-install-recommends")[2].partition("&&")[0]
    return set(words.split())


def test_copies_what_is_there_and_what_the_build_reads(docker, stages):
    copied = set()
    for rest in instructions(stages[0], "COPY"):
        origin, sources, destination = docker.copies(rest)
        assert not origin
        for name in sources:
            assert (ROOT / name).exists(), name
            if (ROOT / name).is_dir():
                assert destination == f"{name}/"
        copied |= set(sources)
    setup_reads = {"setup.py", "pyproject.toml", "requirements.txt", "CMakeLists.txt"}
    assert setup_reads | {"torchbeast", "nest", "libtorchbeast"} <= copied

    # Docker gets exactly these files, and no build outputs.
    dockerignore = (ROOT / ".dockerignore").read_text()
    for path in ROOT.iterdir():
        assert docker.ignored(path.name, dockerignore) == (path.name not in copied)


def test_installs_what_the_guide_and_the_set_up_do(stages):
    guide = (ROOT / "docs/building.md").read_text()
    (line,) = re.findall(r"\| Debian, Ubuntu \| `apt-get install ([^`]*)`", guide)
    assert installed(stages[0]) == {*line.split(), "python3-venv"}
    script = (ROOT / "scripts/setup").read_text()
    for package in line.split():
        # The interpreter's name is a variable there.
        name = package.replace("python3", "${base##*/}")
        assert f'native+=" {name}"' in script
    for command in instructions(stages[0], "RUN"):
        assert ("pip install" in command) == ("--constraint constraints.txt" in command)
