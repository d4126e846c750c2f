"""The layout: what imports what, how much there is, docs/architecture.md is right."""

import ast
import functools
import pathlib
import re
import subprocess
import sys

import pytest
import runs

import torchbeast

ROOT = pathlib.Path(torchbeast.__path__[0])
DOCS = ROOT.parent / "docs" / "architecture.md"
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
OPTIONAL = ("extras", "polybeast", "tools")
COMMANDS = ("plot", "polybeast_env", "polybeast_learner", "report", "sweep")
# Where the core imports an optional part, in a function and behind its flag.
LATE = {
    ("__init__", "tools.agent"),  # torchbeast.load_agent
    ("base.ranks", "extras.ranks.several"),  # torchrun
    ("encoders", "extras.moments.running"),  # --normalize_observations
    ("learner", "extras.episodes"),  # --rollouts episode
    ("learner", "extras.explorer.method"),  # --explorer
    ("learner", "extras.replay.mixer"),  # --replay_ratio
    ("model", "extras.explorer.method"),
    ("model", "extras.moments.running"),  # --normalize_rewards
    ("runs.start", "extras.ranks.several"),
}
# What a MonoBeast forker reads.
FORKED = """
    monobeast learner optimizer model encoders recurrent flags presets
    local/actors envs/extra_fields
    core/acting core/rollout core/vtrace core/distributions
"""


def name_of(path):
    return ".".join(path.with_suffix("").parts)


def is_core(path):
    return path.parts[0] not in OPTIONAL and path.stem not in COMMANDS


@functools.cache
def parse(path):
    return ast.parse((ROOT / path).read_text())


def imports(path, nodes):
    """The modules of this package that these nodes import, such as "runs.run"."""
    files = {name_of(x).removesuffix(".__init__") for x in FILES}
    found = set()
    for node in nodes:
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "")[:10] == "torchbeast"
        ):
            base = node.module.split(".")[1:]
            found |= {".".join([*base, alias.name]) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("torchbeast.") for alias in node.names}
    # "runs.run.Run" is the module runs.run.
    return {x if x in files else x.rpartition(".")[0] for x in found} & files


def at_start(path):
    """The nodes of a file that run when it is imported."""
    nodes = list(parse(path).body)
    for node in nodes:
        is_late = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        nodes += [] if is_late else ast.iter_child_nodes(node)
    return nodes


def test_the_core_imports_optional_parts_only_behind_their_flags():
    early, late = set(), set()
    for path in filter(is_core, FILES):
        optional = {
            (name_of(path), x)
            for x in imports(path, ast.walk(parse(path)))
            if x.split(".")[0] in OPTIONAL
        }
        first = {(name_of(path), x) for x in imports(path, at_start(path))}
        early |= optional & first
        late |= optional - first
    assert not early
    assert late == LATE


def test_no_module_imports_itself_through_others():
    graph = {
        name_of(path): imports(path, at_start(path)) - {name_of(path)}
        for path in FILES
        if path.stem != "__init__"
    }
    while graph:
        leaves = {name for name, below in graph.items() if not below & graph.keys()}
        assert leaves, f"these import each other: {sorted(graph)}"
        for name in leaves:
            del graph[name]


@pytest.mark.parametrize(
    ("module", "most"), [("model", 20), ("learner", 35), ("monobeast", 45)]
)
def test_how_many_files_an_import_loads(module, most):
    code = f"""
import sys, torchbeast.{module}
found = [getattr(x, "__file__", None) for x in list(sys.modules.values())]
print(*sorted(x for x in found if x and x.startswith(sys.argv[1]) and open(x).read()))
"""
    words = [sys.executable, "-c", code, str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    files = done.stdout.split()
    assert len(files) <= most, files


def test_environment_machines_load_no_torch():
    code = "import sys, torchbeast.polybeast.env; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=runs.patience(60),
        check=True,
    )
    assert done.stdout.strip() == "False"


# --- How much there is


def num_lines(paths):
    return sum(len((ROOT / path).read_text().splitlines()) for path in paths)


def functions():
    """The lines of each function, by its name."""
    return {
        f"{path}: {node.name}": node.end_lineno - node.lineno + 1
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def table():
    """The rows of numbers in docs/architecture.md: what there is, and the limit."""
    rows = re.findall(
        r"^\| (lines [^|]+) \| ([\d,]+) \| ([\d,]+) \|$", DOCS.read_text(), re.M
    )
    return {name: [int(x.replace(",", "")) for x in numbers] for name, *numbers in rows}


SIZES = {
    "lines of `torchbeast/`": lambda: num_lines(FILES),
    "lines without extras, polybeast and tools": lambda: num_lines(
        path for path in FILES if path.parts[0] not in OPTIONAL
    ),
    "lines that a MonoBeast forker reads": lambda: num_lines(
        f"{name}.py" for name in FORKED.split()
    ),
    "lines of the longest file": lambda: max(num_lines([path]) for path in FILES),
    "lines of the longest function": lambda: max(functions().values()),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_house_is_as_light_as_the_docs_say(name):
    """The table of docs/architecture.md has what there is, to 1 %, and its limit."""
    if name not in table():
        pytest.fail(f"docs/architecture.md has no row {name!r}")
    lines, (now, most) = SIZES[name](), table()[name]
    assert lines <= most
    assert abs(lines - now) <= max(10, 0.01 * now), lines


# --- docs/architecture.md


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
