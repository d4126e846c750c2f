"""The docs are short, name tests that exist, and their links hold on GitHub, too."""

import pathlib
import re
import urllib.parse

ROOT = pathlib.Path(__file__).parents[2]


def test_every_fault_in_the_docs_has_its_test():
    rows = (ROOT / "docs" / "faults.md").read_text()
    names = re.findall(r"`(\w+)::(test_\w+)`", rows)
    assert len(names) > 40
    assert "## Attacks" in rows
    for file, name in names:
        (path,) = (ROOT / "tests").rglob(f"test_{file}.py")
        source = path.read_text()
        assert f"def {name}(" in source, f"{file}::{name}"
    native = re.findall(r"`(\w+)\.(\w+)`", rows)
    cpp = "".join(p.read_text() for p in (ROOT / "tests" / "cpp").glob("*.cc"))
    for suite, name in native:
        if suite[0].isupper():
            assert re.search(rf"TEST(_F)?\({suite},\s*{name}\)", cpp), (suite, name)


def pages() -> list[pathlib.Path]:
    """The texts that a reader finds on GitHub; test_site.py has the site's."""
    folders = [ROOT / name for name in ("docs", "examples", "libtorchbeast", "nest")]
    return [*ROOT.glob("*.md"), *(p for f in folders for p in f.rglob("*.md"))]


def without_code(page: pathlib.Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: pathlib.Path) -> set[str]:
    """The names that GitHub gives to the headings, with a dash for each blank."""
    titles = re.findall(r"^#+ +(.*?) *$", without_code(page), flags=re.MULTILINE)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in plain}


def test_every_link_leads_to_a_file_and_a_heading():
    broken, followed = [], 0
    for page in pages():
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            url = urllib.parse.urlsplit(link)
            if url.scheme:
                continue
            target = page.parent / url.path if url.path else page
            known = anchors(target) if target.suffix == ".md" else {url.fragment}
            if not target.exists() or (url.fragment and url.fragment not in known):
                broken.append((str(page.relative_to(ROOT)), link))
            followed += 1
    assert followed > 300
    assert not broken


RECORDS = ("notebook/", "results/", "faults", "bare_system", "performance", "papers")
END = re.compile(r"[.!?][)*]*\s|\||\n\s*\n|^ *(?:[-*]|\d+\.) |^#.*$|^ {4}.*$", re.M)


def test_what_a_reader_has_to_read():
    """Code and tables count as words. What is in backticks is one in a sentence."""
    num_words, long = 0, []
    for page in (ROOT / "docs").rglob("*.md"):
        if not str(page.relative_to(ROOT / "docs")).startswith(RECORDS):
            num_words += len(page.read_text().split())
            text = re.sub(r"`[^`]*`|\]\([^)]*\)", "x", without_code(page))
            sentences = [re.findall(r"\S*\w\S*", x) for x in END.split(text)]
            long += [(page.name, " ".join(x)) for x in sentences if len(x) > 35]
    assert 20_000 < num_words <= 26_000
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
    assert not long
