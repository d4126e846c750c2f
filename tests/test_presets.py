"""presets.json says what each preset means; a new default shows here what it changes.

It has the defaults of monobeast, what those of the other scripts differ in, and what
each preset differs in from its script's. After an intended change:
python tests/test_presets.py
"""

import importlib
import json
from pathlib import Path

import pytest

from torchbeast import monobeast
from torchbeast.base.errors import FlagError
from torchbeast.presets import PRESETS
from torchbeast.runs import flagset
from torchbeast.runs.files import strict_json

GOLDEN = Path(__file__).with_name("presets.json")
MISSING = "the script has no such flag"
SCRIPTS = {
    "monobeast": "monobeast",
    "polybeast": "polybeast.start",
    "polybeast_learner": "polybeast.learner",
}
# These depend on the machine, or name the run.
OPEN = {"savedir", "torch_threads", "precision", "pipes_basename", "num_servers"}


def meaning(variant, preset):
    """All resolved flags of a script with this preset."""
    script = importlib.import_module(f"torchbeast.{SCRIPTS[variant]}")
    words = [f"--preset={preset}"] if preset else []
    flags = flagset.resolve(flagset.parse(script.make_parser(), words))
    values = script.resolve_layout(flags).as_dict()
    return strict_json({k: v for k, v in values.items() if k not in {*OPEN, "xpid"}})


@pytest.mark.parametrize("preset", ["", *PRESETS])
@pytest.mark.parametrize("variant", SCRIPTS)
def test_what_each_preset_means(variant, preset):
    if variant != "monobeast":
        pytest.importorskip("libtorchbeast", exc_type=ImportError)
    stored = json.loads(GOLDEN.read_text())
    golden = stored["monobeast"][""] | stored[variant][""] | stored[variant][preset]
    golden = {name: value for name, value in golden.items() if value != MISSING}
    now = meaning(variant, preset)
    # A flag that is added as a line changes no preset.
    assert {name: now.get(name) for name in golden} == golden


def test_a_preset_of_a_deleted_part_is_refused():
    flags = flagset.parse(monobeast.make_parser(), ["--preset", "laser-atari"])
    del flags.replay_ratio
    with pytest.raises(FlagError, match=r"laser-atari sets \['replay_ratio'\]"):
        flagset.resolve(flags)


if __name__ == "__main__":
    every = {x: {name: meaning(x, name) for name in ["", *PRESETS]} for x in SCRIPTS}
    first = dict(every["monobeast"][""])
    for presets in every.values():
        own = dict(presets[""])
        for name, now in presets.items():
            base = own if name else first
            presets[name] = {k: v for k, v in now.items() if base.get(k, MISSING) != v}
            presets[name] |= dict.fromkeys(base.keys() - now.keys(), MISSING)
    every["monobeast"][""] = first
    GOLDEN.write_text(json.dumps(every, indent=1) + "\n")
