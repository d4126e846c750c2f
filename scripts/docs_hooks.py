"""Hooks of mkdocs.yml: pages from outside docs/, and an API page per module.

A link to a module of the package leads to its API page. A link to another file of the
repository leads to a page that shows it, and a link to a folder to a list of its files.
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
    "questions.md": "docs/README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
for folder in ("examples", "examples/*", "benchmarks/peers", "third_party"):
    pages = (x.relative_to(ROOT).as_posix() for x in ROOT.glob(f"{folder}/README.md"))
    OUTSIDE |= {page: page for page in pages}
# What readers type into the search, beside the words of the page's headings.
WORDS = {
    "tour.md": "install start jupyter colab first steps quickstart",
    "coming-from.md": "rllib cleanrl sample factory stable baselines migrate",
    "your_environment.md": "custom own gym gymnasium environment game dict register",
    "several_agents.md": "multi-agent marl pettingzoo parallel",
    "your_network.md": "cnn resnet transformer lstm gru architecture custom model",
    "your_loss.md": "auxiliary custom loss optimizer",
    "evaluation.md": "test video record gif render play jupyter agent load",
    "many_runs.md": "seeds sweep grid hyperparameter search optuna slurm array plot",
    "tuning.md": "hyperparameters learning rate entropy presets ppo",
    "debugging.md": "breakpoint pdb debugger step through reproduce",
    "troubleshooting.md": "slow bottleneck nan memory profile not learning docker",
    "errors.md": "exception message traceback",
    "gpu.md": "cuda compile bf16 speed",
    "cluster.md": "slurm kubernetes docker ray machines tls",
    "monitoring.md": "prometheus tensorboard wandb grafana mirror s3",
    "flags.md": "options arguments command line config",
    "files.md": "logs csv columns meta json",
    "operations.md": "resume continue checkpoint save stop kill ctrl-c",
    "atari.md": "sticky actions frame skip rom preprocessing",
    "laser.md": "replay buffer off-policy",
    "building.md": "compile c++ grpc wheels macos",
}
# Pages that a search shows after all others.
RECORDS = re.compile(
    r"(notebook|results|benchmarks|third_party)/"
    r"|(CHANGELOG|CONTRIBUTING|architecture|faults|bare_system|performance|papers)"
)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
IMAGE = re.compile(r'(<img\b[^>]*?\bsrc=")([^"]+)("[^>]*>)')
# GitHub's way to name a picture for a dark page.
PICTURE = re.compile(
    r'<picture>.*?srcset="([^"]+)".*?(<img\b[^>]*>).*?</picture>', re.S
)
# Languages of the highlighter whose name is not the file's suffix.
LANGUAGES = {"cc": "cpp", "h": "cpp", "patch": "diff", "proto": "protobuf"}


def modules() -> list[str]:
    """The modules of the package, as torchbeast.runs.run."""
    files = sorted((ROOT / "torchbeast").rglob("*.py"))
    names = [".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files]
    return [name for name in names if not name.endswith("__init__")]


def on_config(config: Any) -> Any:
    pages = [{name: f"api/{name}.md"} for name in modules()]
    top = [page for page in pages if next(iter(page)).count(".") == 1]
    wings: dict[str, list] = {}
    for page in pages:
        wing, _, _ = next(iter(page)).rpartition(".")
        if page not in top:
            wings.setdefault(wing, []).append(page)
    config.nav.append({"API": [*top, *({name: wing} for name, wing in wings.items())]})
    return config


def on_files(files: Files, config: Any) -> Files:
    for page, source in OUTSIDE.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=text))
    for name in modules():
        text = f"# {name}\n\n::: {name}\n"
        files.append(File.generated(config, f"api/{name}.md", content=text))
    for file in list(files.documentation_pages()):
        if not file.src_uri.startswith("api/"):
            for match in LINK.finditer(file.content_string):
                target = in_repository(file.src_uri, match[3])
                if target and files.get_file_from_path(page_of(target)) is None:
                    add_source(files, config, target)
    return files


def in_repository(page: str, link: str) -> str | None:
    """The file or folder of the repository that a link on a page names, if any."""
    path = link.partition("#")[0]
    if not path or "://" in link or link.startswith("mailto:"):
        return None
    folder = posixpath.dirname(OUTSIDE.get(page, f"docs/{page}"))
    target = posixpath.normpath(posixpath.join(folder, path))
    return target if (ROOT / target).exists() else None


def page_of(target: str) -> str:
    """The page that shows a file or folder of the repository."""
    if f"{target}/README.md" in OUTSIDE:
        return f"{target}/README.md"
    for page, source in OUTSIDE.items():
        if source == target:
            return page
    module = target.removesuffix(".py").replace("/", ".")
    if target.endswith(".py") and module in modules():
        return f"api/{module}.md"
    if target.startswith("docs/") and target.endswith((".md", ".png", ".svg", ".gif")):
        return target.removeprefix("docs/")
    return f"source/{target}" + ("" if target.endswith(".gz") else ".md")


def add_source(files: Files, config: Any, target: str) -> None:
    """Adds the page of a file or folder. Compressed files are only copied."""
    path = ROOT / target
    uri = page_of(target)
    if path.suffix == ".gz":
        files.append(File.generated(config, uri, content=path.read_bytes()))
        return
    if path.is_dir():
        listed = ""
        for child in sorted(x for x in path.iterdir() if x.is_file()):
            to = page_of(f"{target}/{child.name}")
            if child.suffix not in (".md", ".png"):
                to = f"source/{target}/{child.name}"
                files.append(File.generated(config, to, content=child.read_bytes()))
            listed += (
                f"- [{child.name}]({posixpath.relpath(to, posixpath.dirname(uri))})\n"
            )
        text = f"# {target}\n\n{listed}"
    else:
        language = LANGUAGES.get(path.suffix[1:], path.suffix[1:])
        text = f"# {target}\n\n``````{language}\n{path.read_text()}\n``````\n"
    text = f"---\nsearch:\n  exclude: true\n---\n{text}"
    files.append(File.generated(config, uri, content=text))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    own = page.file.src_uri

    def moved(link: str) -> str:
        target = in_repository(own, link)
        if target is None:
            return link  # mkdocs says if it is broken
        _, hash_sign, anchor = link.partition("#")
        here = posixpath.relpath(page_of(target), posixpath.dirname(own))
        return here + hash_sign + anchor

    def both(match: re.Match[str]) -> str:
        """Two images, of which the theme hides one; <picture> misses its button."""
        dark, image = match.groups()
        return IMAGE.sub(r"\1\2#only-light\3", image) + IMAGE.sub(
            rf"\1{dark}#only-dark\3", image
        )

    if own.startswith("api/"):
        page.meta["search"] = {"exclude": True}
    if own.startswith(("api/", "source/")):
        return markdown
    if own in WORDS:
        page.meta["tags"] = WORDS[own].split()
    if RECORDS.match(own):
        page.meta["search"] = {"boost": 0.1}
    markdown = IMAGE.sub(
        lambda m: m[1] + moved(m[2]) + m[3], PICTURE.sub(both, markdown)
    )
    return LINK.sub(lambda m: f"{m[1]}[{m[2]}]({moved(m[3])})", markdown)
