"""scripts/build_wheels: what a wheel contains, and that it works with its own gRPC.

scripts/bare_system_trial installs a wheel where there is no compiler and no gRPC.
"""

import fcntl
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import runs

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.slow,
    pytest.mark.xdist_group("wheels"),  # one process builds the wheel for all of them
]
# What a wheel may take from any Linux: the C and C++ libraries, and zlib.
SYSTEM = r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|z)\.so\.\d+|ld-linux.*"

PATH = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The unpacked wheel of this checkout; it compiles only what has changed."""
    for module in ("auditwheel", "setuptools", "pybind11"):
        if not importlib.util.find_spec(module):
            runs.skip(f"needs {module}: pip install '.[dev]'")
    for tool in ("patchelf", "cmake", "c++", "protoc"):
        if not shutil.which(tool, path=PATH):
            runs.skip(f"needs {tool}")
    dist = tmp_path_factory.mktemp("dist")
    (runs.ROOT / "build").mkdir(exist_ok=True)
    with (runs.ROOT / "build" / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers of pytest build there, too
        done = subprocess.run(
            ["bash", "scripts/build_wheels", str(dist), "--no-build-isolation"],
            cwd=runs.ROOT,
            env={**os.environ, "BUILD_PYTHON": sys.executable},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=450,
        )
    assert done.returncode == 0, done.stdout[-5000:]
    (archive,) = dist.iterdir()
    assert re.search(r"-manylinux_2_\d+_\w+\.whl$", archive.name)
    with zipfile.ZipFile(archive) as file:
        file.extractall(dist / "unpacked")
    return dist / "unpacked"


def in_wheel(wheel, *command):
    """Runs a command for which the wheel comes before what is installed."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=runs.ROOT,
        env={**os.environ, "PYTHONPATH": str(wheel)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_libraries_need_only_each_other_and_the_system(wheel):
    libraries = [p for p in wheel.rglob("*") if ".so" in p.suffixes]
    packed = {p.name for p in libraries}
    assert {name.split(".")[0] for name in packed} >= {"nest", "libtorchbeast"}
    for library in libraries:
        done = subprocess.run(
            ["patchelf", "--print-needed", str(library)],
            env={"PATH": PATH},
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        )
        needed = {n for n in done.stdout.split() if not re.fullmatch(SYSTEM, n)}
        assert needed <= packed, library.name


def test_import_loads_only_the_wheels_grpc(wheel):
    code = "import libtorchbeast, nest; print(open('/proc/self/maps').read())"
    maps = in_wheel(wheel, "-c", code)
    names = r"grpc|protobuf|absl|libcrypto|torchbeast\.cpython|nest\.cpython"
    loaded = set(re.findall(rf"/\S*(?:{names})\S*", maps))
    assert len(loaded) > 5
    assert {p for p in loaded if not p.startswith(str(wheel))} == set()


def test_its_tls_works_beside_pythons(wheel):
    """Both have a libcrypto in one process: the wheel's and the system's."""
    test = "tests/polybeast/test_env_connection.py::test_why_tls_cannot_work"
    said = in_wheel(wheel, "-m", "pytest", "-q", "-p", "no:cacheprovider", test)
    assert "1 passed" in said


def test_it_packs_the_package_and_no_old_file(wheel):
    packed = {str(p.relative_to(wheel)) for p in (wheel / "torchbeast").rglob("*.py")}
    there = {p.relative_to(runs.ROOT) for p in (runs.ROOT / "torchbeast").rglob("*.py")}
    assert packed == set(map(str, there))
