"""The code of a run, beside its meta.json: what git does not have.

code.patch  changes of the checkout that torchbeast is imported from, against the commit
            in meta.json, with new Python files; `git apply` restores them
sources/    files outside the checkout that --env, --wrapper, --encoder and --explorer
            import, except packages of site-packages

If a resumed run has other code, it adds code.2.patch and sources.2. Each entry in
`starts` of meta.json names those of its start.

Importing this module does not load torch.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from torchbeast.base.flag import CODE_FLAGS
from torchbeast.runs.files import run_git, writing

log = logging.getLogger(__name__)

MAX_BYTES = 5_000_000  # of code.patch, and of sources
MAX_SECONDS = 5.0  # to find the sources


def attach(run: Any) -> Code:
    return Code(run.folder, run.flags)


class Code:
    def __init__(self, folder: pathlib.Path, flags: Any) -> None:
        self.folder, self.flags = folder, flags

    def about(self) -> dict[str, str | None]:
        """Writes the files; returns their names for meta.json, or None.

        Raises:
          RunFileError: a file can't be written.
        """
        patch, checkout = _changes()
        named = ",".join(getattr(self.flags, name, None) or "" for name in CODE_FLAGS)
        sources = _sources(named, checkout)
        files = {"": patch} if patch else {}
        with writing(self.folder):
            return {
                "code_patch": _keep(self.folder, "code{}.patch", files),
                "sources": _keep(self.folder, "sources{}", sources),
            }


def _keep(
    folder: pathlib.Path, name: str, files: dict[str, bytes], number: int = 1
) -> str | None:
    """Writes a file, or a folder of files, unless an earlier start has written it."""
    if not files:
        return None
    if (size := sum(map(len, files.values()))) > MAX_BYTES:
        log.warning(
            "The run does not keep %s: %s bytes are more than %s.",
            *(name.format(""), f"{size:,}", f"{MAX_BYTES:,}"),
        )
        return None
    path = folder / name.format(f".{number}" if number > 1 else "")
    if not path.exists():
        for part, content in files.items():
            (path / part).parent.mkdir(parents=True, exist_ok=True)
            (path / part).write_bytes(content)
    elif files != {part: _read(path / part) for part in files}:
        return _keep(folder, name, files, number + 1)
    return path.name


def _read(path: pathlib.Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _changes() -> tuple[bytes, set[str]]:
    """The patch of the checkout, and its Python files; nothing without git."""
    try:
        if not run_git("ls-files", "--", "."):
            return b"", set()
    except (OSError, subprocess.SubprocessError):  # files.py logs it
        return b"", set()
    try:
        folder = pathlib.Path(__file__).parent
        top = os.fsdecode(run_git("rev-parse", "--show-toplevel").rstrip(b"\n"))
        index = run_git("rev-parse", "--git-path", "index").rstrip(b"\n")
        python = ("--", ":(top)*.py", ":(top,exclude)*/site-packages/*")
        with tempfile.TemporaryDirectory() as temporary:
            # A copy of the index, in which new files are announced to `git diff`.
            copied = shutil.copy(folder / os.fsdecode(index), f"{temporary}/index")
            own = {"GIT_INDEX_FILE": copied}
            run_git("add", "--intent-to-add", *python, **own)
            diff = ("diff", "--binary", "--no-color", "--no-ext-diff", "--no-textconv")
            prefixes = ("--src-prefix=a/", "--dst-prefix=b/", "--no-relative", "HEAD")
            patch = run_git(*diff, *prefixes, **own)
            names = run_git("ls-files", "-z", "--full-name", *python, **own)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("The run does not keep the changes of its code: %s", error)
        return b"", set()
    return patch, {f"{top}/{name}" for name in os.fsdecode(names).split("\0")}


def _sources(named: str, checkout: set[str]) -> dict[str, bytes]:
    """The files of the modules in `named`, and of those that they import.

    Imports nothing. A package counts as a whole. Stops at MAX_BYTES and MAX_SECONDS.
    """
    waiting = re.findall(r"(?:^|,)\s*(\w+)[\w.]*:", named)
    seen, size, deadline = set(waiting), 0, time.monotonic() + MAX_SECONDS
    found: dict[str, bytes] = {}
    while waiting:
        for name, path in _files_of(waiting.pop(), deadline):
            if size > MAX_BYTES:
                return found
            if str(path) not in checkout:
                try:
                    found[name] = path.read_bytes()
                except OSError as error:
                    log.warning("The run does not keep its code %s: %s", path, error)
                    continue
                size += len(found[name])
                new = set(_imported(found[name])) - seen
                seen |= new
                waiting += new
    return found


def _files_of(module: str, deadline: float) -> Iterator[tuple[str, pathlib.Path]]:
    """Names and paths of a module's files; none if it is installed."""
    if module in sys.stdlib_module_names:
        return
    with contextlib.suppress(ImportError, ValueError):  # ValueError: __main__
        spec = importlib.util.find_spec(module)
        folders = spec.submodule_search_locations if spec else None
        for where in folders or [(spec and spec.origin) or os.devnull]:
            place = pathlib.Path(where).resolve()
            if {"site-packages", "dist-packages"} & set(place.parts):
                continue
            for folder, _, names in os.walk(place) if folders else [(place, (), ("",))]:
                if time.monotonic() > deadline:
                    return
                for path in (pathlib.Path(folder, name) for name in names):
                    if path.suffix == ".py" and path.is_file():
                        yield str(path.relative_to(place.parent)), path


def _imported(source: bytes) -> Iterator[str]:
    """The modules, up to the first dot, that a file imports."""
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]
