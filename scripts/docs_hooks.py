"""Hooks of mkdocs.yml: pages from outside docs/, and an API page per module.

Links to files of the repository that are no page become their names: the site does not
know where the repository is.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# Page: file of the repository.
OUTSIDE = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def modules() -> list[str]:
    """The modules of the package, as torchbeast.core.run."""
    files = sorted((ROOT / "torchbeast").rglob("*.py"))
    names = [".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files]
    return [name for name in names if not name.endswith("__init__")]


def on_config(config: Any) -> Any:
    pages = [{name: f"api/{name}.md"} for name in modules()]
    top = [page for page in pages if next(iter(page)).count(".") == 1]
    core = [page for page in pages if page not in top]
    config.nav.append({"API": [*top, {"torchbeast.core": core}]})
    return config


def on_files(files: Files, config: Any) -> Files:
    for page, source in OUTSIDE.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=text))
    for name in modules():
        text = f"# {name}\n\n::: {name}\n"
        files.append(File.generated(config, f"api/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    own = page.file.src_uri
    in_docs = "docs" if own not in OUTSIDE else "."

    def replace(match: re.Match[str]) -> str:
        bang, text, link = match.groups()
        path, _, anchor = link.partition("#")
        if not path or "://" in link or link.startswith("mailto:"):
            return match[0]
        folder = posixpath.join(in_docs, posixpath.dirname(own))
        target = posixpath.normpath(posixpath.join(folder, path))  # in the repository
        if not (ROOT / target).exists():
            return match[0]  # mkdocs says that it is broken
        inverse = {source: name for name, source in OUTSIDE.items()}
        uri = inverse.get(target, posixpath.relpath(target, "docs"))
        page_file = files.get_file_from_path(uri)
        if page_file is None or page_file.inclusion.is_excluded():
            return text if bang or text.startswith("`") else f"{text} (`{target}`)"
        here = posixpath.relpath(uri, posixpath.dirname(own))
        return f"{bang}[{text}]({here}{'#' + anchor if anchor else ''})"

    return LINK.sub(replace, markdown)
