"""The build of the C++ modules: setup.py, CMakeLists.txt, scripts/setup."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest
import runs

ROOT = Path(__file__).parents[2]
FILES = [
    *(
        "setup.py",
        "pyproject.toml",
        "requirements.txt",
        "constraints.txt",
        "MANIFEST.in",
        "CMakeLists.txt",
    ),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "scripts/setup"),
]
FOLDERS = ["nest", "libtorchbeast", "third_party"]
HIDE_GRPC = " ".join(
    f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("gRPC", "PkgConfig")
)
QUICK_NEST = """
#include <pybind11/pybind11.h>
PYBIND11_MODULE(nest, m) { m.attr("answer") = 42; }
"""

STAND_IN_FOR_PIP = """
import os, pathlib, sys
if sys.argv[1] == "install":
    native = os.environ["TORCHBEAST_NATIVE"]
    constraints = sys.argv[sys.argv.index("--constraint") + 1]
    assert "numpy==" in pathlib.Path(constraints).read_text()
    pathlib.Path("calls").write_text(f"{native} {sys.argv[-1]}")
    library = pathlib.Path(__file__).parents[1] / "libtorchbeast.cpython.so"
    library.unlink(missing_ok=True)
    if native != "skip":
        library.touch()
"""

needs_tools = pytest.mark.skipif(
    not all(map(shutil.which, ("cmake", "make", "c++"))),
    reason="needs cmake, make and a C++ compiler",
)

needs_sha256sum = pytest.mark.skipif(
    not shutil.which("sha256sum"), reason="needs sha256sum"
)


@pytest.fixture
def checkout(tmp_path):
    """A copy of the files that the build reads, without the package torchbeast."""
    copy = tmp_path / "checkout"
    (copy / "scripts").mkdir(parents=True)
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    ignore = shutil.ignore_patterns("build", "*.egg-info", "*.so", "grpc-*", "install")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    return copy


def edit(path):
    with path.open("a") as file:
        file.write("\n")


def setup_py(checkout, *arguments, **environment):
    pytest.importorskip("setuptools")
    settings = {"CMAKE_BUILD_PARALLEL_LEVEL": "1", "TORCHBEAST_NATIVE": "auto"}
    return subprocess.run(
        [sys.executable, "setup.py", *arguments],
        cwd=checkout,
        env={**os.environ, **settings, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=runs.patience(200),
    )


def build_modules(checkout, **environment):
    return setup_py(checkout, "build_ext", "--build-lib", "modules", **environment)


def import_error(checkout, module):
    """The error of `import module`, or an empty string if it works."""
    code = f"try:\n  import {module}\nexcept ImportError as e:\n  print(e)"
    return subprocess.run(
        [sys.executable, "-S", "-c", code],  # without what else is installed
        env={"PYTHONPATH": str(checkout / "modules")},
        cwd=checkout,
        check=True,
        capture_output=True,
        text=True,
        timeout=runs.patience(60),
    ).stdout


@needs_tools
def test_without_grpc_the_rest_is_built_and_the_import_says_what_to_install(checkout):
    pytest.importorskip("pybind11")
    (checkout / "nest/src/nest_python.cc").write_text(QUICK_NEST)
    done = build_modules(checkout, TORCHBEAST_CMAKE_ARGS=HIDE_GRPC)
    assert done.returncode == 0, done.stdout
    assert import_error(checkout, "nest") == ""
    said = import_error(checkout, "libtorchbeast")
    assert "gRPC's C++ library" in said
    assert "apt-get install libgrpc++-dev" in said
    assert "brew install grpc" in said
    assert "conda install -c conda-forge libgrpc" in said
    assert "GoogleTest" not in said

    # The module and its substitute never exist at the same time.
    done = build_modules(checkout, TORCHBEAST_NATIVE="skip")
    assert done.returncode == 0, done.stdout
    assert "TORCHBEAST_NATIVE=skip" in import_error(checkout, "nest")
    done = build_modules(checkout, TORCHBEAST_CMAKE_ARGS=HIDE_GRPC)
    assert import_error(checkout, "nest") == ""
    assert len(list((checkout / "modules").glob("nest*"))) == 1

    done = build_modules(
        checkout, TORCHBEAST_CMAKE_ARGS=HIDE_GRPC, TORCHBEAST_NATIVE="require"
    )
    assert done.returncode != 0
    assert "apt-get install libgrpc++-dev" in done.stdout


def test_source_distribution_has_all_that_the_build_reads(checkout):
    done = setup_py(checkout, "-q", "sdist", "--formats=gztar")
    assert done.returncode == 0, done.stdout
    (archive,) = (checkout / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    read = {"setup.py", "CMakeLists.txt", "requirements.txt", "third_party/build_grpc"}
    for folder in ("nest", "libtorchbeast"):
        for path in (checkout / folder).rglob("*"):
            if path.suffix in (".cc", ".h", ".proto", ".py", ".pyi", ".toml"):
                read.add(str(path.relative_to(checkout)))
    assert len(read) > 20
    assert read <= packed


@pytest.fixture
def set_up(checkout, tmp_path):
    """Runs the checkout's scripts/setup; returns how it called pip, or None.

    Its .venv has stand-ins for pip, which only notes the call and makes the library's
    file, and for the packages that the script imports.
    """
    venv.create(checkout / ".venv", symlinks=True)
    (packages,) = (checkout / ".venv").glob("lib/python*/site-packages")
    for module in ("ale_py", "cv2", "gymnasium", "torch"):
        (packages / f"{module}.py").touch()
    (packages / "pip").mkdir()
    (packages / "pip/__main__.py").write_text(STAND_IN_FOR_PIP)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/apt-get").symlink_to("/bin/false")  # a test installs nothing

    def run(native, extra="plot", status=0):
        calls = checkout / "calls"
        calls.unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", "scripts/setup", extra],
            cwd=checkout,
            env={
                **os.environ,
                "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
                "PYTHON": sys.executable,
                "TORCHBEAST_NATIVE": native,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=runs.patience(60),
        )
        assert done.returncode == status, done.stdout
        assert calls.exists() == ("up to date" not in done.stdout)
        return calls.read_text() if calls.exists() else None

    return run


@needs_sha256sum
def test_set_up_for_monobeast_neither_builds_nor_removes_the_native_part(
    set_up, checkout
):
    assert set_up("later") == "skip .[plot]"  # as scripts/train_pong
    assert set_up("later") is None
    assert set_up("auto", "dev") == "auto .[dev]"  # as scripts/test
    assert set_up("auto", "dev") is None
    assert set_up("later") is None
    edit(checkout / "libtorchbeast/array.cc")
    assert set_up("later") is None
    assert set_up("require") == "require .[plot]"
    # pip replaces the whole package, so now the C++ part is built, too.
    edit(checkout / "pyproject.toml")
    assert set_up("later") == "auto .[plot]"
    assert set_up("skip") == "skip .[plot]"
    assert set_up("later") is None


@needs_sha256sum
def test_an_update_that_fails_keeps_the_environment(set_up, checkout):
    """As without a network, or at a Ctrl-C. A first set-up is made anew."""
    set_up("later")
    (packages,) = (checkout / ".venv").glob("lib/python*/site-packages")
    (packages / "mine.py").touch()
    imported = packages / "ale_py.py"
    imported.write_text("raise ImportError")  # comes after pip
    set_up("auto", status=1)
    imported.write_text("")
    assert set_up("auto") == "auto .[plot]"
    assert set_up("auto") is None
    assert (packages / "mine.py").exists()
