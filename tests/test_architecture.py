"""The layout: imports run downwards, files are short, docs/architecture.md is right."""

import ast
import pathlib
import re
import subprocess
import sys

import runs

import torchbeast

ROOT = pathlib.Path(torchbeast.__path__[0])
DOCS = ROOT.parent / "docs" / "architecture.md"
SCRIPTS = {
    "monobeast",
    "polybeast_learner",
    "polybeast_env",
    "polybeast",
    "plot",
    "report",
    "sweep",
}
# What each wing may import beside itself, and which files above the wings.
WINGS = {
    "base": "",
    "procs": "base",
    "envs": "base procs",
    "records": "base procs envs",
    "core": "base envs records",
    "runs": "base procs envs records core flags presets",
    "local": "base procs envs core runs",
    "remote": "base procs envs records core runs local flags",
    "on_ray": "base procs envs records core runs local remote",
    "play": "base procs envs records core runs local remote flags encoders model",
    "sweeps": "base procs envs records runs",
}
TOP = {
    "presets": "",
    "flags": "presets",
    "encoders": "",
    "recurrent": "",
    "model": "encoders recurrent",
    "learner": "model optimizer",
}


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


def room(module):
    """The wing of a module, or the module itself if it is in none."""
    return module.partition(".")[0]


def test_each_wing_imports_only_wings_below():
    assert set(WINGS) == {p.parent.name for p in ROOT.glob("*/__init__.py")}
    for wing, allowed in WINGS.items():
        for path in (ROOT / wing).glob("*.py"):
            found = {room(name) for name in imports(path)} - {wing}
            more = found - set(allowed.split())
            assert not more, f"{wing}/{path.name} imports {more}"


def test_the_loss_and_the_model_import_no_script():
    for name, allowed in TOP.items():
        found = {room(x) for x in imports(ROOT / f"{name}.py")} - set(WINGS)
        assert found <= set(allowed.split()), f"{name}.py imports {found}"


def test_no_module_imports_itself_through_others():
    graph = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): imports(path)
        for path in ROOT.rglob("*.py")
        if path.stem != "__init__"
    }
    while graph:
        leaves = {name for name, below in graph.items() if not below & graph.keys()}
        assert leaves, f"these import each other: {sorted(graph)}"
        for name in leaves:
            del graph[name]


def num_lines(path):
    return len(path.read_text().splitlines())


FORKED = """
    monobeast polybeast_learner learner optimizer model encoders recurrent flags presets
    local/actors envs/extra_fields
    core/acting core/rollout core/vtrace core/distributions
"""


def longest_function():
    functions = (
        node.end_lineno - node.lineno + 1
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return max(functions)


def test_the_house_is_as_light_as_the_docs_say():
    """The table of docs/architecture.md has what there is, to 1 %, and its limit."""
    found = {
        "lines of `torchbeast/`": sum(map(num_lines, ROOT.rglob("*.py"))),
        "lines of the files that a fork opens": sum(
            num_lines(ROOT / f"{name}.py") for name in FORKED.split()
        ),
        "lines of the longest file": max(map(num_lines, ROOT.rglob("*.py"))),
        "lines of the longest function": longest_function(),
    }
    table = DOCS.read_text()
    for name, lines in found.items():
        (row,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", table, re.MULTILINE)
        now, most = (int(cell.replace(",", "")) for cell in row.split("|"))
        assert lines <= most, name
        assert abs(lines - now) <= max(10, 0.01 * now), f"{name}: {lines}"


# --- docs/architecture.md ---


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
    hops = re.findall(r"`([\w/]+\.(?:py|cc|h)): ([\w.:]+)`", walks)
    assert len(hops) > 25
    for file, name in hops:
        path = (ROOT.parent if file.startswith("libtorchbeast/") else ROOT) / file
        if file.endswith(".py"):
            assert name in defined_in(path), f"{file}: {name}"
        else:
            assert f"{name}(" in path.read_text(), f"{file}: {name}"


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
        timeout=runs.patience(60),
        check=True,
    )
    assert done.stdout.strip() == "False"
