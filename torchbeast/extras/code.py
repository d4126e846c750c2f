"""The code and the machine of a run, in meta.json and beside it.

meta.json has the commit, versions, hardware, and the flags that differ from the preset.
Beside it is what git does not have:

code.patch  changes of the checkout that torchbeast is imported from, against the commit
            in meta.json, with new Python files; `git apply` restores them
sources/    files outside the checkout that --env, --wrapper, --encoder and --explorer
            import, except packages of site-packages

If a resumed run has other code, it adds code.2.patch and sources.2; meta.json has the
names of those of its start. Importing this module does not load torch.
"""

import ast
import contextlib
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from torchbeast.base import hardware
from torchbeast.runs.files import writing
from torchbeast.runs.flagset import preset_flags

log = logging.getLogger(__name__)

PACKAGES = ("torchbeast", "torch", "numpy", "gymnasium", "ale-py", "minatar")
# Flags that name code as MODULE:NAME.
CODE_FLAGS = ("env", "wrapper", "encoder", "core", "explorer", "loss")
# Set in hooks of git, for example. They would name another repository.
OTHER_REPOSITORY = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR"}
MAX_BYTES = 5_000_000  # of code.patch, and of sources


def attach(run: Any) -> "Code":
    return Code(run.folder, run.flags)


class Code:
    def __init__(self, folder: pathlib.Path, flags: Any) -> None:
        self.folder, self.flags = folder, flags

    def about(self) -> dict[str, Any]:
        """Writes the files; returns entries of meta.json: a name, or None."""
        patch, checkout, about = b"", set[str](), provenance()
        try:
            if about["git"]:
                patch, checkout = _changes()
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("The run does not keep its code.patch: %s", error)
        named = ",".join(getattr(self.flags, name, None) or "" for name in CODE_FLAGS)
        files = {"": patch} if patch else {}
        with writing(self.folder):
            return {
                **about,
                "preset_changes": differences(self.flags.as_dict()),
                "code_patch": _keep(self.folder, "code{}.patch", files),
                "sources": _keep(self.folder, "sources{}", _sources(named, checkout)),
            }


def provenance() -> dict[str, Any]:
    """The code and the machine: git state, versions, hardware."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    git = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git
        if _run_git("ls-files", "--", __file__):  # else it is that of another project
            dirty = bool(_run_git("status", "--porcelain", "--untracked-files=no"))
            commit = _run_git("rev-parse", "HEAD").decode().strip()
            git = {"commit": commit, "dirty": dirty}
    return {"git": git, "versions": versions, "hardware": machine()}


def machine() -> dict[str, Any]:
    """CPUs and memory that this process may use; CUDA's GPUs if it has loaded torch."""
    model = None
    with contextlib.suppress(OSError):  # not Linux
        cpuinfo = pathlib.Path("/proc/cpuinfo").read_text()
        model = re.search(r"model name\s*: (.+)", cpuinfo)
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    count = cuda.device_count() if cuda else 0
    return {
        "cpu": model[1] if model else platform.machine(),
        "cpus": hardware.num_cpus(),
        "gpus": [cuda.get_device_name(i) for i in range(count)],
        "memory_gib": round(hardware.memory_limit() / 2**30, 1),
    }


def differences(values: dict[str, Any]) -> dict[str, Any]:
    """Those of a run's flags that differ from its preset; without a preset, {}."""
    preset = preset_flags(values.get("preset"))
    return {k: values[k] for k, x in preset.items() if values.get(k, x) != x}


def _run_git(*words: str, **variables: str) -> bytes:
    """What git prints about this folder. Raises OSError or SubprocessError."""
    command = ["git", "-C", os.path.dirname(__file__), *words]
    env = {k: x for k, x in os.environ.items() if k not in OTHER_REPOSITORY}
    env, no = env | variables, subprocess.DEVNULL
    return subprocess.check_output(command, stderr=no, timeout=10, env=env)


def _keep(folder: pathlib.Path, name: str, files: dict[str, bytes]) -> str | None:
    """Writes a file, or a folder of files, unless an earlier start has written it."""
    if sum(map(len, files.values())) > MAX_BYTES:
        text = "The run does not keep %s: more than %d bytes."
        log.warning(text, name.format(""), MAX_BYTES)
    elif files:
        for number in itertools.count(1):
            path = folder / name.format(f".{number}" if number > 1 else "")
            if not path.exists():
                for part, content in files.items():
                    (path / part).parent.mkdir(parents=True, exist_ok=True)
                    (path / part).write_bytes(content)
            there = (path / part for part in files)
            if [x.is_file() and x.read_bytes() for x in there] == [*files.values()]:
                return path.name
    return None


def _changes() -> tuple[bytes, set[str]]:
    """The patch of the checkout, and its Python files."""
    places = _run_git("rev-parse", "--show-toplevel", "--absolute-git-dir")
    top, repository = os.fsdecode(places).splitlines()
    python = ("--", ":(top)*.py", ":(top,exclude)*/site-packages/*")
    with tempfile.TemporaryDirectory() as temporary:
        # A copy of the index, in which new files are announced to `git diff`.
        own = {"GIT_INDEX_FILE": shutil.copy(f"{repository}/index", temporary)}
        _run_git("add", "--intent-to-add", *python, **own)
        diff = ("diff", "--binary", "--no-color", "--no-ext-diff", "--no-textconv")
        prefixes = ("--src-prefix=a/", "--dst-prefix=b/", "--no-relative", "HEAD")
        patch = _run_git(*diff, *prefixes, **own)
        names = _run_git("ls-files", "-z", "--full-name", *python, **own)
    return patch, {f"{top}/{name}" for name in os.fsdecode(names).split("\0")}


def _sources(named: str, checkout: set[str]) -> dict[str, bytes]:
    """The files of the modules in `named` and their imports; packages as a whole."""
    waiting = re.findall(r"(?:^|,)\s*(\w+)[\w.]*:", named)
    seen, found = set(sys.stdlib_module_names), dict[str, bytes]()
    while waiting and sum(map(len, found.values())) <= MAX_BYTES:
        if (module := waiting.pop()) not in seen:
            seen.add(module)
            for name, path in _files_of(module):
                if str(path) not in checkout:
                    found[name] = path.read_bytes()
                    waiting += _imported(found[name])
    return found


def _files_of(module: str) -> Iterator[tuple[str, pathlib.Path]]:
    """Names and paths of a module's files; none if it is installed."""
    with contextlib.suppress(ImportError, ValueError):  # ValueError: __main__
        spec: Any = importlib.util.find_spec(module)
        places = (spec.submodule_search_locations or [spec.origin]) if spec else []
        for place in (pathlib.Path(x or os.devnull).resolve() for x in places):
            for path in place.rglob("*.py") if place.is_dir() else [place]:
                installed = {"site-packages", "dist-packages"} & set(path.parts)
                if path.suffix == ".py" and path.is_file() and not installed:
                    yield str(path.relative_to(place.parent)), path


def _imported(source: bytes) -> Iterator[str]:
    """The modules, up to the first dot, that a file imports."""
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(source)):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            yield from (name.partition(".")[0] for name in names)
