"""Builds the C++ modules `nest` and `libtorchbeast`; the rest is in pyproject.toml.

If a module can't be built, torchbeast is installed without it. A Python file takes its
place and raises an ImportError that names what is missing. Environment variables:

TORCHBEAST_NATIVE        auto (default: as above), require (fail instead), skip
TORCHBEAST_CMAKE_ARGS    more arguments for cmake, such as -DCMAKE_CXX_COMPILER=clang++
CMAKE_BUILD_PARALLEL_LEVEL    number of compilers at once; default: one per core
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def build_folder() -> Path:
    """The folder of cmake's build. It is kept, so the next build compiles only changes.

    There is one per Python and per value of the settings that cmake reads only once.
    """
    names = "TORCHBEAST_CMAKE_ARGS CXX CXXFLAGS LDFLAGS CMAKE_PREFIX_PATH CONDA_PREFIX"
    settings = [sys.base_prefix, *map(os.environ.get, names.split())]
    key = f"{zlib.crc32(repr(settings).encode()):08x}"
    python = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    return ROOT / "build" / f"native-{python}-{key}"


BUILD = build_folder()
MODULES = ("nest", "libtorchbeast")
# Written in Python; they lie beside the module that imports them.
PYTHON_HALF = {"libtorchbeast": sorted(ROOT.glob("libtorchbeast/python/*.py"))}
LINES_SHOWN = 25  # lines of a failed command's output


class NotBuilt(Exception):
    """Why a module could not be built."""


class BuildNative(build_ext):
    def run(self) -> None:
        choice = os.environ.get("TORCHBEAST_NATIVE") or "auto"
        if choice not in ("auto", "require", "skip"):
            raise SystemExit(
                f"TORCHBEAST_NATIVE is {choice!r}; it may be auto, require or skip"
            )
        if self.editable_mode:
            # Install into the environment. In the checkout, several Pythons would
            # share the modules, and the folder nest/ could hide one.
            self.inplace = False
            self.build_lib = self.get_finalized_command("install").install_lib
        failure = None
        try:
            if choice == "skip":
                raise NotBuilt(
                    "TORCHBEAST_NATIVE=skip was set, maybe by scripts/train_pong; "
                    "unset it."
                )
            configure()
        except NotBuilt as e:
            failure = e

        for module in MODULES:
            library = Path(self.get_ext_fullpath(module)).absolute()
            substitute = library.with_name(f"{module}.py")
            library.parent.mkdir(parents=True, exist_ok=True)
            # Remove instead of overwriting: a process may run the old library.
            library.unlink(missing_ok=True)
            substitute.unlink(missing_ok=True)
            try:
                if failure:
                    raise failure
                shutil.copy2(build(module, library.name), library)
                for file in PYTHON_HALF.get(module, ()):
                    shutil.copy2(file, library.parent)
            except NotBuilt as e:
                if choice == "require":
                    raise SystemExit(f"{module} could not be built. {e}") from None
                print(f"{module} is left out. {e}", flush=True)
                message = (
                    f"{module}, native code that PolyBeast needs and MonoBeast does "
                    f"not, was left out when torchbeast was installed. {e}\n"
                    "Then install torchbeast again, the way it was installed "
                    "(pip install . or bash scripts/setup)."
                )
                substitute.write_text(
                    f"raise ImportError({message!r}, name={module!r})\n",
                    encoding="utf-8",
                )


def configure() -> None:
    """Run cmake's configure step.

    Raises:
      NotBuilt: there is no cmake, or it fails.
    """
    cmake = find_cmake()
    if cmake is None:
        raise NotBuilt("Missing: cmake >= 3.18, from pip, apt, brew or conda.")
    arguments = [
        *("-S", str(ROOT), "-B", str(BUILD)),
        "-DTORCHBEAST_ALLOW_MISSING=ON",
        f"-DPython_EXECUTABLE={sys.executable}",
        *shlex.split(os.environ.get("TORCHBEAST_CMAKE_ARGS", "")),
    ]
    if shutil.which("make") is None and (ninja := shutil.which("ninja")):
        arguments += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    if directory := pybind11_directory():
        arguments.append(f"-Dpybind11_DIR={directory}")
    try:
        run(cmake, *arguments)
    except NotBuilt:
        # An earlier build may not fit: a moved checkout, another generator. Clear it.
        shutil.rmtree(BUILD)
        pybind11_directory()
        run(cmake, *arguments)


def build(module: str, filename: str) -> Path:
    """Compile a module; returns the shared library.

    Raises:
      NotBuilt: something is missing, or the compiler fails.
    """
    missing = (BUILD / f"{module}-missing.txt").read_text()
    if missing:
        raise NotBuilt(f"Missing, with commands that install it:\n{missing}")
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
    run(find_cmake(), "--build", str(BUILD), "--target", module, "--parallel", jobs)
    return BUILD / filename


def pybind11_directory() -> str | None:
    """The folder of pybind11's CMake configuration, or None if pip did not bring it.

    pip installs pybind11 into a new temporary folder for each build. A copy at a fixed
    path avoids a full rebuild.
    """
    try:
        import pybind11
    except ImportError:
        return None
    copy = BUILD / f"pybind11-{pybind11.__version__}"
    if not copy.exists():
        unfinished = copy.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(Path(pybind11.__file__).parent, unfinished)
        unfinished.rename(copy)
    return str(copy / "share" / "cmake" / "pybind11")


def run(*command: str) -> None:
    """Run a command; raises NotBuilt with the end of its output if it fails."""
    done = subprocess.run(
        command,
        env={**os.environ, "LC_ALL": "C"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    print(done.stdout, flush=True)
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines()
        first_error = next((i for i, s in enumerate(lines) if "error" in s.lower()), 0)
        start = min(first_error, max(0, len(lines) - LINES_SHOWN))
        shown = "\n".join(f"  {s}" for s in lines[start : start + LINES_SHOWN])
        raise NotBuilt(f"This failed: {shlex.join(command)}\n{shown}\n")


def find_cmake() -> str | None:
    cmake = shutil.which("cmake")
    if cmake is None:
        return None
    said = subprocess.run([cmake, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"(\d+)\.(\d+)", said)
    if version is None or tuple(map(int, version.groups())) < (3, 18):
        return None
    return cmake


def build_requirements() -> list[str]:
    """The build tools that pip must get: none if there is no compiler to use them."""
    compilers = (os.environ.get("CXX", "c++").split()[0], "g++", "clang++")
    if os.environ.get("TORCHBEAST_NATIVE") == "skip" or not any(
        map(shutil.which, compilers)
    ):
        return []
    has_make = shutil.which("make") or shutil.which("ninja")
    return ["cmake>=3.18"] * (not find_cmake()) + ["ninja"] * (not has_make)


setup(
    ext_modules=[Extension(module, sources=[]) for module in MODULES],
    cmdclass={"build_ext": BuildNative},
    setup_requires=build_requirements(),
)
