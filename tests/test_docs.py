"""The docs name tests that exist."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]


def test_every_fault_in_the_docs_has_its_test():
    rows = (ROOT / "docs" / "faults.md").read_text()
    names = re.findall(r"`(\w+)::(test_\w+)`", rows)
    assert len(names) > 40
    assert "## Attacks" in rows
    for file, name in names:
        source = (ROOT / "tests" / f"test_{file}.py").read_text()
        assert f"def {name}(" in source, f"{file}::{name}"
    native = re.findall(r"`(\w+)\.(\w+)`", rows)
    cpp = "".join(p.read_text() for p in (ROOT / "tests" / "cpp").glob("*.cc"))
    for suite, name in native:
        if suite[0].isupper():
            assert re.search(rf"TEST(_F)?\({suite},\s*{name}\)", cpp), (suite, name)
