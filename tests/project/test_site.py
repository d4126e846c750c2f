"""The docs site: it builds, and no link is broken."""

import html.parser
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import urllib.parse

import pytest
import runs

pytest.importorskip("mkdocs", reason="needs the packages of the extra docs")

# One process builds the site once.
pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("site")]


def build(site, config=runs.ROOT / "mkdocs.yml"):
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-f", config, "-d", site],
        capture_output=True,
        text=True,
        timeout=runs.patience(500),
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )


class Links(html.parser.HTMLParser):
    """The ids of a page, and what it links to."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_no_broken_link(site):
    """mkdocs checks the pages' links; this follows all that the pages then have."""
    pages = {p: Links(p.read_text()) for p in site.rglob("*.html")}
    assert len(pages) > 80
    broken = []
    for page, found in pages.items():
        if page.name == "404.html":  # its links begin at the site's root
            continue
        for link in found.links:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                assert url.scheme in ("https", "http", "mailto"), link
                continue
            target = page
            if url.path:
                target = page.parent / urllib.parse.unquote(url.path)
                target = pathlib.Path(os.path.normpath(target))
                target = target / "index.html" if target.is_dir() else target
            anchor = urllib.parse.unquote(url.fragment)
            known = pages[target].ids if target in pages else None
            if not target.exists() or (anchor and known and anchor not in known):
                broken.append((page.name, link))
    assert not broken


def test_the_site_needs_no_network(site):
    index = json.loads((site / "search/search_index.json").read_text())
    inside = [x for x in index["docs"] if x["location"].startswith(("api/", "source/"))]
    assert not inside
    # From a folder, too: nothing is loaded from elsewhere.
    assert (site / "search/search_index.js").exists()
    assert not re.search('(src|link href)="http', (site / "index.html").read_text())


def test_the_dark_figure_is_the_light_one():
    dark = runpy.run_path(str(runs.ROOT / "scripts/draw_dark.py"))["dark"]
    light = runs.ROOT / "docs/pictures/impala-light.svg"
    drawn = light.with_name("impala-dark.svg").read_text()
    assert dark(light.read_text()) == drawn
