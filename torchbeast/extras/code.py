"""The code of a run, beside its meta.json: what git does not have.

code.patch  changes of the checkout that torchbeast is imported from, against the commit
            in meta.json, with new Python files; `git apply` restores them
sources/    files outside the checkout that --env, --wrapper, --encoder and --explorer
            import, except packages of site-packages

If a resumed run has other code, it adds code.2.patch and sources.2; meta.json has the
names of those of its start. Importing this module does not load torch.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import itertools
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from torchbeast.base.flag import CODE_FLAGS
from torchbeast.runs.files import run_git, writing

log = logging.getLogger(__name__)

MAX_BYTES = 5_000_000  # of code.patch, and of sources


def attach(run: Any) -> Code:
    return Code(run.folder, run.flags)


class Code:
    def __init__(self, folder: pathlib.Path, flags: Any) -> None:
        self.folder, self.flags = folder, flags

    def about(self) -> dict[str, str | None]:
        """Writes the files; returns their names for meta.json, or None."""
        patch, checkout = b"", set[str]()
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git
            if run_git("ls-files", "--", "."):
                patch, checkout = _changes()
        named = ",".join(getattr(self.flags, name, None) or "" for name in CODE_FLAGS)
        files = {"": patch} if patch else {}
        with writing(self.folder):
            return {
                "code_patch": _keep(self.folder, "code{}.patch", files),
                "sources": _keep(self.folder, "sources{}", _sources(named, checkout)),
            }


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
    places = run_git("rev-parse", "--show-toplevel", "--absolute-git-dir")
    top, repository = os.fsdecode(places).splitlines()
    python = ("--", ":(top)*.py", ":(top,exclude)*/site-packages/*")
    with tempfile.TemporaryDirectory() as temporary:
        # A copy of the index, in which new files are announced to `git diff`.
        own = {"GIT_INDEX_FILE": shutil.copy(f"{repository}/index", temporary)}
        run_git("add", "--intent-to-add", *python, **own)
        diff = ("diff", "--binary", "--no-color", "--no-ext-diff", "--no-textconv")
        prefixes = ("--src-prefix=a/", "--dst-prefix=b/", "--no-relative", "HEAD")
        patch = run_git(*diff, *prefixes, **own)
        names = run_git("ls-files", "-z", "--full-name", *python, **own)
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
