"""The commands and the code of the docs run: page by page, in a copy of the tree."""

import json
import re
import subprocess
import sys

import pytest
import runs
from test_forking import Fork

pytestmark = pytest.mark.timeout(600)
DOCS = runs.ROOT / "docs"


def blocks(page):
    """(language, code) of each block, in order; of a notebook, of each cell of code."""
    if page.endswith(".md"):
        text = (DOCS / page).read_text()
        return re.findall(r"```(bash|python)\n(.*?)```", text, re.DOTALL)
    cells = json.loads((DOCS / page).read_text())["cells"]
    codes = ["".join(x["source"]) + "\n" for x in cells if x["cell_type"] == "code"]
    bash = "%%bash\n"
    return [
        ("bash" if x.startswith(bash) else "python", x.removeprefix(bash))
        for x in codes
    ]


def named(code):
    """The file that a block says it is, if any."""
    return re.match(r"# (\w+\.py)\n", code)


def run_blocks(tmp_path, found, most_steps):
    """Runs blocks in order, those in Python in one process. Returns the output."""
    tree = Fork(tmp_path, ()).path
    shown = [code for x in DOCS.glob("*.md") for _, code in blocks(x.name)]
    for code in filter(named, shown):
        (tree / named(code)[1]).write_text(code)
    script = ["import subprocess, sys, torch", "torch.set_num_threads(1)"]
    for language, code in found:
        if language == "bash":
            code = re.sub(r"^python ", f"{sys.executable} ", code, flags=re.MULTILINE)
            steps = f"--total_steps {most_steps}"
            code = re.sub(r"--total_steps \d{5,}", steps, "set -e\n" + code)
            code = f"subprocess.run({code!r}, shell=True, check=True)"
        if not named(code):
            script.append(code)
    (tmp_path / "page.py").write_text("\n".join(script))
    variables = {"HOME": str(tmp_path), "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, tmp_path / "page.py"],
        cwd=tree,
        env={**runs.environment(), **variables},
        capture_output=True,
        text=True,
        timeout=runs.patience(500),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_tour_and_its_notebook_are_the_same_and_run(tmp_path):
    assert blocks("tour.md") == blocks("tour.ipynb")[1:]  # the first changes folder
    output = run_blocks(tmp_path, blocks("tour.ipynb") + blocks("api.md"), 50_000)
    returned = float(re.search(r"^return ([\d.]+)$", output, re.MULTILINE)[1])
    assert returned > 50  # a policy that learned nothing gets about 20


@pytest.mark.parametrize("page", ["your_environment.md", "your_network.md"])
def test_the_blocks_of_a_page_run(tmp_path, page):
    run_blocks(tmp_path, blocks(page), 2000)


def test_a_loss_of_ones_own(tmp_path):
    """The resumed run goes on with it."""
    run_blocks(tmp_path, blocks("your_loss.md"), 3000)
    rows = runs.read_logs(tmp_path / "logs" / "torchbeast", "mine")
    assert "entropy_loss" not in rows[0]
    for row in rows:
        total = float(row["pg_loss"]) + float(row["baseline_loss"])
        assert float(row["total_loss"]) == pytest.approx(total, rel=1e-4, abs=1e-3)
