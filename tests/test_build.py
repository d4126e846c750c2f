"""The build of the C++ modules: setup.py, CMakeLists.txt, scripts/setup."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    *(
        "setup.py",
        "pyproject.toml",
        "requirements.txt",
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

needs_tools = pytest.mark.skipif(
    not all(map(shutil.which, ("cmake", "make", "c++"))),
    reason="needs cmake, make and a C++ compiler",
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
        timeout=100,
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
        timeout=60,
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


@needs_tools
def test_import_shows_why_the_compiler_failed(checkout):
    pytest.importorskip("pybind11")
    (checkout / "nest/src/nest_python.cc").write_text("#error broken on purpose\n")
    done = build_modules(checkout, TORCHBEAST_CMAKE_ARGS=HIDE_GRPC)
    assert done.returncode == 0, done.stdout
    said = import_error(checkout, "nest")
    assert "cmake --build" in said
    assert "broken on purpose" in said


def test_unknown_choice_is_refused(checkout):
    done = build_modules(checkout, TORCHBEAST_NATIVE="perhaps")
    assert done.returncode != 0
    assert "'perhaps'; it may be auto, require or skip" in done.stdout


def test_without_cmake_the_import_names_it(checkout, tmp_path):
    (tmp_path / "bin").mkdir()
    done = build_modules(checkout, PATH=str(tmp_path / "bin"), CXX="none")
    assert done.returncode == 0, done.stdout
    for module in ("nest", "libtorchbeast"):
        assert "Missing: cmake" in import_error(checkout, module)


def test_sources_hide_no_module():
    """In a checkout, `import nest` has to find the module, not the folder."""
    assert not list(ROOT.glob("nest/__init__.py*"))
    assert not list(ROOT.glob("libtorchbeast/__init__.py*"))


def test_source_distribution_has_all_that_the_build_reads(checkout):
    done = setup_py(checkout, "-q", "sdist", "--formats=gztar")
    assert done.returncode == 0, done.stdout
    (archive,) = (checkout / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    read = {"setup.py", "CMakeLists.txt", "requirements.txt", "third_party/build_grpc"}
    for folder in ("nest", "libtorchbeast"):
        for path in (checkout / folder).rglob("*"):
            if path.suffix in (".cc", ".h", ".proto", ".pyi", ".toml"):
                read.add(str(path.relative_to(checkout)))
    assert len(read) > 20
    assert read <= packed


def fingerprint(checkout):
    """The fingerprint of scripts/setup, which sets up again if it differs."""
    code = 'eval "$(sed -n "/^fingerprint() {/,/^}/p" scripts/setup)"; fingerprint'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=checkout,
        env={**os.environ, "python": sys.executable},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert len(done.stdout.split()[0]) == 64
    return done.stdout


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="needs sha256sum")
def test_set_up_notices_what_changes_the_native_modules(checkout):
    seen = [fingerprint(checkout)]
    os.utime(checkout / "libtorchbeast/array.cc")
    assert fingerprint(checkout) == seen[0]  # its time is not its content
    for name in (
        *(
            "CMakeLists.txt",
            "setup.py",
            "libtorchbeast/array.cc",
            "libtorchbeast/new.cc",
        ),
        *("libtorchbeast/proto/torchbeast.proto", "nest/include/nest/nest.h"),
    ):
        with (checkout / name).open("a") as file:
            file.write("\n")
        seen.append(fingerprint(checkout))
    (checkout / "libtorchbeast/new.cc").rename(checkout / "libtorchbeast/newer.cc")
    seen.append(fingerprint(checkout))
    assert len(set(seen)) == len(seen)
