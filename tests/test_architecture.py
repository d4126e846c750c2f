"""The house: who may import whom, how long the two stories are."""

import ast
import pathlib
import subprocess
import sys

import pytest

import torchbeast

ROOT = pathlib.Path(torchbeast.__path__[0])
SCRIPTS = {"monobeast", "polybeast_learner", "polybeast_env", "polybeast", "plot"}
# From the top: a module imports only from its own floor and those below.
FLOORS = [SCRIPTS, {"evaluate"}, {"learner"}, {"model"}]


def imports(path):
    """Modules of this package that a file imports, such as "core.run", anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "torchbeast"
        ):
            base = node.module.split(".")[1:]
            found |= {".".join([*base, alias.name]) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix("torchbeast.")
                for alias in node.names
                if alias.name.startswith("torchbeast.")
            }
    files = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts) for p in ROOT.rglob("*.py")
    }
    # "core.run.Run" is the module core.run.
    return {
        name if name in files else name.rpartition(".")[0]
        for name in found
        if name in files or name.rpartition(".")[0] in files
    }


def test_no_script_imports_a_script():
    for name in SCRIPTS - {"polybeast"}:  # which starts two of them
        others = imports(ROOT / f"{name}.py") & SCRIPTS
        assert not others, f"{name} imports {others}"


def test_imports_run_downwards():
    for number, floor in enumerate(FLOORS):
        above = set().union(*FLOORS[:number])
        for name in floor:
            found = imports(ROOT / f"{name}.py")
            assert not found & above, f"{name} imports {found & above}"
    for path in (ROOT / "core").glob("*.py"):
        upward = {name for name in imports(path) if not name.startswith("core.")}
        assert not upward, f"core/{path.name} imports {upward}"


def test_core_has_no_circles():
    graph = {
        path.stem: {
            name.removeprefix("core.")
            for name in imports(path)
            if name.startswith("core.")
        }
        for path in (ROOT / "core").glob("*.py")
        if path.stem != "__init__"
    }
    while graph:
        leaves = {name for name, below in graph.items() if not below & graph.keys()}
        assert leaves, f"these import each other: {sorted(graph)}"
        for name in leaves:
            del graph[name]


@pytest.mark.parametrize("name", ["monobeast", "polybeast_learner"])
def test_the_stories_are_short(name):
    assert len((ROOT / f"{name}.py").read_text().splitlines()) <= 450


def test_environment_machines_load_no_torch():
    code = "import sys, torchbeast.polybeast_env; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "False"
