"""The Dockerfile, as far as it can be checked without Docker.

scripts/bare_system_trial carries it out whole (docs/bare_system_trial.md).
"""

import json
import re
import subprocess
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


@pytest.mark.parametrize("image", [1, 2])
def test_image_has_no_compiler_and_runs_as_an_ordinary_user(stages, image):
    run = stages[image]
    assert installed(run) == installed(stages[1])
    assert not any(p.endswith("-dev") or p in ("g++", "gcc") for p in installed(run))
    assert instructions(run, "USER")[-1] not in ("0", "root")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["torchbeast.polybeast"]),
        (["--env", "a b"], ["torchbeast.polybeast", "--env", "a b"]),
        (["torchbeast.monobeast", "--sync"], ["torchbeast.monobeast", "--sync"]),
    ],
)
def test_arguments_go_to_polybeast_or_to_the_module_named(
    arguments, expected, stages, tmp_path
):
    (entrypoint,) = map(json.loads, instructions(stages[2], "ENTRYPOINT"))
    assert entrypoint[:2] == ["tini", "--"]
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    said = subprocess.run(
        [*entrypoint[2:], *arguments],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout
    assert said.splitlines() == ["-m", *expected]
