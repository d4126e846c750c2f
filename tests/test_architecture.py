"""The layout: imports run downwards, files are short, docs/architecture.md is right."""

import ast
import pathlib
import re
import subprocess
import sys

import torchbeast

ROOT = pathlib.Path(torchbeast.__path__[0])
SCRIPTS = {
    "monobeast",
    "polybeast_learner",
    "polybeast_env",
    "polybeast",
    "plot",
    "report",
    "sweep",
}
# From top to bottom: a module imports only from its own floor and from those below.
FLOORS = [SCRIPTS, {"agent", "evaluator"}, {"evaluate"}, {"learner"}, {"model"}]


def imports(path):
    """The modules of this package that a file imports, such as "core.run"."""
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


def num_lines(path):
    return len(path.read_text().splitlines())


def test_no_file_is_long():
    long = {p.name: n for p in ROOT.rglob("*.py") if (n := num_lines(p)) > 450}
    assert not long


# --- docs/architecture.md ---

DOCS = ROOT.parent / "docs" / "architecture.md"


def defined_in(path):
    """Functions, methods and classes of a file: "act", "Run", "Run.going"."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{part.name}"
                for part in node.body
                if isinstance(part, ast.FunctionDef)
            }
    return names


def test_the_docs_list_every_file():
    text = DOCS.read_text()
    tree = text.partition("torchbeast/\n")[2].partition("nest/ ")[0]
    listed = re.findall(r"^ +(\w+\.py) ", tree, re.MULTILINE)
    files = [p.name for p in ROOT.rglob("*.py") if p.name != "__init__.py"]
    assert sorted(listed) == sorted(files)


def test_every_hop_of_the_walks_exists():
    walks = DOCS.read_text().partition("## Two walks")[2].partition("\n## ")[0]
    hops = re.findall(r"`([\w/]+\.(?:py|cc)): ([\w.:]+)`", walks)
    assert len(hops) > 25
    for file, name in hops:
        if file.endswith(".py"):
            assert name in defined_in(ROOT / file), f"{file}: {name}"
        else:
            source = (ROOT.parent / file).read_text()
            assert f"{name}(" in source, f"{file}: {name}"


def test_the_lines_of_the_docs_are_short():
    for number, line in enumerate(DOCS.read_text().splitlines(), start=1):
        assert len(line) <= 105 or line.startswith("|"), f"line {number}"


# --- Processes ---


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
