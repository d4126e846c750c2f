"""docs/results: each kept run can be made again."""

import importlib
import json
import re
import runpy
from pathlib import Path

import pytest

from torchbeast import monobeast
from torchbeast.presets import PRESETS
from torchbeast.runs import flagset

KEPT = sorted((Path(__file__).parents[2] / "docs/results").glob("*/meta.json"))


def flags_of(meta):
    return json.loads(meta.read_text())["args"]


@pytest.mark.parametrize("meta", KEPT, ids=lambda path: path.parent.name)
def test_config_has_the_flags_of_a_kept_run(meta):
    kept = flags_of(meta)
    parser = monobeast.make_parser()
    if "pipes_basename" in kept:
        pytest.importorskip("libtorchbeast", exc_type=ImportError)
        parser = importlib.import_module("torchbeast.polybeast.start").make_parser()
    flags = flagset.parse(parser, ["--config", str(meta)])
    before = flagset.parse(parser, []).as_dict()
    for name, now in flags.as_dict().items():
        if parser.declared[name].resume or now in (None, "auto"):
            continue  # of one start, or chosen by the machine that it is made on
        # A flag that is newer than the run must do nothing.
        assert now == kept.get(name, before[name]), name


def test_the_citation_has_the_version_of_the_package():
    root = Path(__file__).parents[2]
    package = re.search(
        '^version = "(.*)"$', (root / "pyproject.toml").read_text(), re.M
    )
    assert f"\nversion: {package[1]}\n" in (root / "CITATION.cff").read_text()


def test_the_pictures_are_as_the_script_draws_them():
    image = pytest.importorskip("PIL.Image")
    folder = Path(__file__).parents[2] / "docs/results"
    script = runpy.run_path(str(folder.parents[1] / "scripts/draw_results.py"))
    drawn = {x.stem: image.open(x).text["Description"] for x in folder.glob("*.png")}
    words = {name: script["describe"](name) for name in script["PICTURES"]}
    assert drawn == words | {f"{name}-dark": x for name, x in words.items()}


def test_each_preset_has_a_kept_run():
    older = {"impala2018"}  # a name of impala-atari
    assert PRESETS.keys() - older <= {flags_of(meta).get("preset") for meta in KEPT}
